"""Scored texts in memory-mapped arrays. Shapes: N rows, D distinct texts, W numbers per row."""

import hashlib
import json
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped_array
from datamodules.files.rows import BadRows, OnBadRows
from datamodules.files.splitting import stem_key
from datamodules.scored.labels import LabelOptions, LabelReader
from datamodules.scored.rows import RowReader, ScoredRow, TextColumns

STORE_VERSION = 2
REJECTED = -1


@dataclass(frozen=True)
class StoreRequest:
    """All that the arrays depend on.

    Args:
        files: (part, file) in order; the part is 0, 1 or 2.
        columns: of text and group.
        heads: name -> labels; empty for texts to predict.
        on_bad_rows: `error` names them, `reject` leaves them out.
    """

    files: tuple[tuple[int, Path], ...]
    columns: TextColumns
    heads: dict[str, LabelOptions]
    on_bad_rows: OnBadRows = "error"

    def folder(self) -> Path:
        """The cache folder of these arrays; reads the files' digests."""
        root = cache_root()
        facts = {
            "version": STORE_VERSION,
            "files": [[part, str(p.resolve()), file_digest(p, root)] for part, p in self.files],
            "columns": asdict(self.columns),
            "heads": {name: head.facts(name) for name, head in self.heads.items()},
            "on_bad_rows": self.on_bad_rows,
        }
        return root / "scored_texts" / digest_of(facts)


class ScoredStore:
    """The arrays of one cache folder; pickled as its name.

    Attributes:
        text_of_row: [N] int64, distinct text of each row; -1 = rejected.
        file_part: [N] int8, part of the file that the row comes from.
        labels: [N, W] float64, NaN = missing.
        keys: [N] uint64 hash of the row's group.
        digests: [D] uint64 hash of each distinct text.
        heads: name -> plain facts of its labels, classes included, in the order of the columns
            of `labels`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "facts.json").read_text("utf-8"))
        self.fingerprint: str = facts["fingerprint"]
        self.heads: dict[str, dict[str, Any]] = facts["heads"]
        self.files = [Path(name) for name in facts["files"]]
        for name in ("text_of_row", "file_part", "labels", "keys", "offsets", "digests"):
            setattr(self, name, mapped_array(folder / f"{name}.npy"))
        self._texts = np.memmap(folder / "texts.bin", np.uint8, "r")

    text_of_row: np.ndarray
    file_part: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray
    digests: np.ndarray

    def __reduce__(self) -> tuple[Any, ...]:
        return ScoredStore, (self.folder,)

    def text(self, number: int) -> str:
        """Return one distinct text."""
        start, end = self.offsets[number : number + 2]
        return self._texts[start:end].tobytes().decode()

    @property
    def num_texts(self) -> int:
        """D."""
        return len(self.offsets) - 1

    @property
    def num_bytes(self) -> np.ndarray:
        """[D] int64, length of each distinct text in UTF-8."""
        return np.diff(self.offsets)

    def columns_of(self, head: str) -> slice:
        """Return where the numbers of a head stand in a row of `labels`."""
        start = 0
        for name, facts in self.heads.items():
            width = len(facts["classes"]) if facts["kind"] == "multilabel" else 1
            if name == head:
                return slice(start, start + width)
            start += width
        raise KeyError(head)


def open_store(request: StoreRequest) -> ScoredStore:
    """Return the arrays of these files, made where the cache lacks them.

    Raises:
        ValueError: rows break a rule, or there is no sound row.
    """
    return ScoredStore(made_once(request.folder(), lambda folder: _write(request, folder)))


def _write(request: StoreRequest, folder: Path) -> None:
    bad_rows = BadRows(request.on_bad_rows)
    heads = [LabelReader(name, options) for name, options in request.heads.items()]
    reader = RowReader(request.columns, heads, bad_rows)
    with (folder / "texts.bin").open("wb") as texts:
        rows = _Rows(texts, sum(head.width for head in heads))
        for part, path in request.files:
            for row in reader.rows(path):
                rows.add(part, row)
    bad_rows.settle(folder)
    if not rows.number_of:
        raise ValueError(f"{', '.join(str(p) for _, p in request.files)}: no row can be used.")
    arrays = rows.arrays()
    facts = _finish(heads, arrays["labels"])
    rows.content.update(arrays["labels"].tobytes() + arrays["file_part"].tobytes())
    _save(folder, arrays, facts, rows.content.hexdigest()[:32], request)


class _Rows:
    """Takes rows one after the other.

    Args:
        texts: file of the distinct texts.
        width: W.
    """

    def __init__(self, texts: BinaryIO, width: int) -> None:
        self.texts, self.width = texts, width
        self.text_of, self.part_of = array("q"), array("b")
        self.labels, self.keys, self.offsets = array("d"), array("Q"), array("q", [0])
        self.number_of: dict[bytes, int] = {}
        self.content = hashlib.sha256()

    def add(self, part: int, row: ScoredRow | None) -> None:
        """Take a row of a file for a part; none is one that was rejected."""
        self.part_of.append(part)
        if row is None:
            self.text_of.append(REJECTED)
            self.keys.append(0)
            self.labels.extend([np.nan] * self.width)
            return
        encoded = row.text.encode()
        digest = hashlib.blake2b(encoded, digest_size=16).digest()
        number = self.number_of.setdefault(digest, len(self.number_of))
        if number == len(self.offsets) - 1:
            self.texts.write(encoded)
            self.offsets.append(self.offsets[-1] + len(encoded))
        self.text_of.append(number)
        self.keys.append(_key(row.group or stem_key(row.text)))
        self.labels.extend(value for values in row.labels for value in values)
        self.content.update(digest)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return what `ScoredStore` reads; classes are as they came."""
        digests = np.frombuffer(b"".join(self.number_of), "<u8")[::2]  # the first half of each
        return {
            "text_of_row": np.array(self.text_of, np.int64),
            "file_part": np.array(self.part_of, np.int8),
            "labels": np.array(self.labels, np.float64).reshape(len(self.part_of), self.width),
            "keys": np.array(self.keys, np.uint64),
            "offsets": np.array(self.offsets, np.int64),
            "digests": digests.astype(np.uint64),
        }


def _save(
    folder: Path,
    arrays: dict[str, np.ndarray],
    heads: dict[str, Any],
    fingerprint: str,
    request: StoreRequest,
) -> None:
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    files = [str(path) for _, path in request.files]
    facts = {"fingerprint": fingerprint, "heads": heads, "files": files}
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


def _finish(heads: list[LabelReader], numbers: np.ndarray) -> dict[str, Any]:
    """Put classes in their final order, in place, and return the facts of each head."""
    facts, start = {}, 0
    for head in heads:
        columns = slice(start, start + head.width)
        start += head.width
        numbers[:, columns], classes = head.finish(numbers[:, columns])
        facts[head.name] = {**head.options.facts(head.name), "classes": classes}
    return facts


def _key(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
