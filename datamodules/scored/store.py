"""Scored texts: rows of files in memory-mapped arrays, and scored files.

Shapes: N rows, D distinct texts, W numbers per row.
"""

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped_array
from datamodules.files.rows import (
    HALF_RULE,
    JSON_SUFFIXES,
    BadRow,
    BadRows,
    OnBadRows,
    half_character,
    read_json_rows,
)
from datamodules.files.splitting import stem_key
from datamodules.files.tables import SUFFIXES as TABLES
from datamodules.files.tables import (
    Table,
    TableOptions,
    dialect_for,
    free_names,
    new_table,
    new_text_file,
    read_rows,
    same_columns,
)
from datamodules.scored.labels import LabelError, LabelOptions, LabelReader, scores_of

SUFFIXES = (*TABLES, *JSON_SUFFIXES)
STORE_VERSION = 2
REJECTED = -1
ARRAYS = ("text_of_row", "file_part", "labels", "keys", "offsets", "digests")


@dataclass(frozen=True)
class TextColumns:
    """Which columns hold what, besides the labels.

    Args:
        text: of the text; several are joined by line breaks, such as title and body.
        group: rows of one group are never on two sides of a split, such as pages of one site;
            `None` groups texts of the same words.
    """

    text: str | list[str] = "text"
    group: str | None = None

    @property
    def texts(self) -> list[str]:
        """The text columns."""
        return [self.text] if isinstance(self.text, str) else list(self.text)


class ScoredRow(NamedTuple):
    """One sound row: labels are one list of numbers per head."""

    text: str
    group: str
    labels: list[list[float]]


@dataclass
class RowReader:
    """Reads rows of csv, tsv, jsonl and parquet files.

    Args:
        columns: of text and group.
        heads: readers of the labels; none where there is nothing to learn (prediction).
        bad_rows: takes the rows that break a rule.
        table: how tables are written, where their bytes do not say.
    """

    columns: TextColumns
    heads: Sequence[LabelReader]
    bad_rows: BadRows
    table: TableOptions = TableOptions()  # noqa: RUF009 - frozen

    def rows(self, path: Path) -> Iterator[ScoredRow | None]:
        """Yield the rows of a file in order, `None` for each that breaks a rule.

        Raises:
            ValueError: the file lacks a column, or is damaged.
        """
        wanted = dict.fromkeys(self.columns.texts)
        if self.columns.group and self.heads:
            wanted[self.columns.group] = None
        wanted |= dict.fromkeys(column for head in self.heads for column in head.columns)
        for line, cells in self._cells(path, list(wanted)):
            try:
                yield self._row(cells)
            except LabelError as error:
                self.bad_rows.add(BadRow(str(path), line, error.value, str(error), "label"))
                yield None

    def _cells(self, path: Path, wanted: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        if path.suffix.lower() in JSON_SUFFIXES:
            separators = {
                column: head.options.separator for head in self.heads for column in head.columns
            }
            for row in read_json_rows(path):
                cells = {c: _cell_text(row.values.get(c), separators.get(c)) for c in wanted}
                yield row.line, cells
            return
        table = Table(path, self.table)
        table.check(self.columns.texts, "columns.text")
        for head in self.heads:
            table.check(head.columns, f"heads.{head.name}.columns")
        for batch in table.rows(wanted, self.bad_rows.add):
            columns = [batch.texts(name) for name in wanted]
            for line, *values in zip(batch.line.tolist(), *columns, strict=True):
                yield line, dict(zip(wanted, values, strict=True))

    def _row(self, cells: dict[str, str]) -> ScoredRow:
        parts = [cells[name] for name in self.columns.texts]
        text = "\n".join(part for part in parts if part.strip())
        if not text:
            names = " or ".join(self.columns.texts)
            raise LabelError("", f"the column {names} holds no text; fill it or drop the row.")
        if (half := half_character(text)) is not None:
            raise LabelError(half, HALF_RULE)
        group = cells.get(self.columns.group or "", "") if self.heads else ""
        if self.columns.group and self.heads and not group.strip():
            raise LabelError(
                "", f'the column "{self.columns.group}" holds no group; fill it or drop the row.'
            )
        labels = [head.parse([cells[c] for c in head.columns]) for head in self.heads]
        return ScoredRow(text, group.strip(), labels)


def _cell_text(value: Any, separator: str | None) -> str:
    """Return a JSON value as the cell of a table: null is empty, a list is joined."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        if separator is None:
            raise LabelError(str(value), "a list must be joined: name a separator for this head.")
        return separator.join(map(str, value)) or separator
    return str(value)


@dataclass(frozen=True)
class ScoredRequest:
    """All that the arrays depend on.

    Args:
        files: (part, file) in order; the part is 0, 1 or 2.
        columns: of text and group.
        heads: name -> labels; empty for texts to predict.
        on_bad_rows: `error` names them, `reject` leaves them out.
        table: how tables are written, where their bytes do not say.
    """

    files: tuple[tuple[int, Path], ...]
    columns: TextColumns
    heads: dict[str, LabelOptions]
    on_bad_rows: OnBadRows = "error"
    table: TableOptions = TableOptions()  # noqa: RUF009 - frozen

    def folder(self) -> Path:
        """The cache folder of these arrays; reads the files' digests."""
        root = cache_root()
        facts = {
            "version": STORE_VERSION,
            "files": [[part, str(p.resolve()), file_digest(p, root)] for part, p in self.files],
            "columns": asdict(self.columns),
            "heads": {name: head.facts(name) for name, head in self.heads.items()},
            "on_bad_rows": self.on_bad_rows,
            "table": asdict(self.table),
        }
        return root / "scored_texts" / digest_of(facts)


class ScoredStore:
    """The arrays of one cache folder; pickled as its name.

    Attributes:
        text_of_row: [N] int64, distinct text of each row; -1 = rejected.
        file_part: [N] int8, part of the file that the row comes from.
        labels: [N, W] float64, NaN = missing.
        keys: [N] uint64 hash of the row's group.
        offsets: [D + 1] int64, first byte of each distinct text, and the end of the last.
        digests: [D] uint64 hash of each distinct text.
        heads: name -> plain facts of its labels, classes included, in the order of the columns
            of `labels`.
    """

    text_of_row: np.ndarray
    file_part: np.ndarray
    labels: np.ndarray
    keys: np.ndarray
    offsets: np.ndarray
    digests: np.ndarray

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "facts.json").read_text("utf-8"))
        self.fingerprint: str = facts["fingerprint"]
        self.heads: dict[str, dict[str, Any]] = facts["heads"]
        self.files = [Path(name) for name in facts["files"]]
        for name in ARRAYS:
            setattr(self, name, mapped_array(folder / f"{name}.npy"))
        self._texts = np.memmap(folder / "texts.bin", np.uint8, "r")

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


def open_store(request: ScoredRequest) -> ScoredStore:
    """Return the arrays of these files, made where the cache lacks them.

    Raises:
        ValueError: rows break a rule, or there is no sound row.
    """
    return ScoredStore(made_once(request.folder(), lambda folder: _write(request, folder)))


def _write(request: ScoredRequest, folder: Path) -> None:
    bad_rows = BadRows(request.on_bad_rows)
    heads = [LabelReader(name, options) for name, options in request.heads.items()]
    reader, width = (
        RowReader(request.columns, heads, bad_rows, request.table),
        sum(head.width for head in heads),
    )
    text_of, part_of = array("q"), array("b")
    labels, keys, offsets = array("d"), array("Q"), array("q", [0])
    number_of: dict[bytes, int] = {}
    content = hashlib.sha256()
    with (folder / "texts.bin").open("wb") as texts:
        for part, path in request.files:
            for row in reader.rows(path):
                part_of.append(part)
                if row is None:
                    text_of.append(REJECTED)
                    keys.append(0)
                    labels.extend([np.nan] * width)
                    continue
                encoded = row.text.encode()
                digest = hashlib.blake2b(encoded, digest_size=16).digest()
                number = number_of.setdefault(digest, len(number_of))
                if number == len(offsets) - 1:
                    texts.write(encoded)
                    offsets.append(offsets[-1] + len(encoded))
                text_of.append(number)
                group = hashlib.blake2b((row.group or stem_key(row.text)).encode(), digest_size=8)
                keys.append(int.from_bytes(group.digest(), "little"))
                labels.extend(value for values in row.labels for value in values)
                content.update(digest)
    bad_rows.settle(folder)
    if not number_of:
        raise ValueError(f"{', '.join(str(p) for _, p in request.files)}: no row can be used.")
    numbers = np.array(labels, np.float64).reshape(len(part_of), width)
    facts, start = {}, 0
    for head in heads:  # classes get their final order
        columns = slice(start, start + head.width)
        start += head.width
        numbers[:, columns], classes = head.finish(numbers[:, columns])
        facts[head.name] = {**head.options.facts(head.name), "classes": classes}
    arrays: dict[str, np.ndarray] = {
        "text_of_row": np.array(text_of, np.int64),
        "file_part": np.array(part_of, np.int8),
        "labels": numbers,
        "keys": np.array(keys, np.uint64),
        "offsets": np.array(offsets, np.int64),
        "digests": np.frombuffer(b"".join(number_of), "<u8")[::2].astype(np.uint64),  # first halves
    }
    for name, values in arrays.items():
        np.save(folder / f"{name}.npy", values)
    content.update(numbers.tobytes() + arrays["file_part"].tobytes())
    described = {
        "fingerprint": content.hexdigest()[:32],
        "heads": facts,
        "files": [str(path) for _, path in request.files],
    }
    (folder / "facts.json").write_text(json.dumps(described), "utf-8")


def check_output(
    files: list[Path],
    path: Path,
    options: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> None:
    """Raise ValueError unless these files can become one of this kind.

    jsonl stays jsonl, and tables need the same columns.
    """
    are_json = {f.suffix.lower() in JSON_SUFFIXES for f in [*files, path]}
    if len(are_json) > 1:
        raise ValueError(
            f"{path} cannot hold {files[0]}: lines of JSON are written as .jsonl, tables as .csv, "
            ".tsv or .parquet; name another data.predict_output, or predict the files one by one."
        )
    if are_json == {False}:
        same_columns([Table(file, options) for file in files], "scored")


def write_scored(
    store: ScoredStore,
    heads: dict[str, Any],
    results: dict[str, np.ndarray],
    path: Path,
    options: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> None:
    """Write the input's rows in order with the scores, whole or not at all.

    Args:
        store: of the texts that were predicted.
        heads: name -> facts, from the recipe.
        results: head -> [D, P] numbers, as the scorer's `predict_step` returns them.
        path: .csv, .tsv, .parquet or .jsonl.
        options: how the input's tables are written.

    Raises:
        FileExistsError: the file exists.
        ValueError: a result is missing.
        RuntimeError: a file has changed since it was read.
    """
    for name in heads:
        if name not in results or len(results[name]) != store.num_texts:
            raise ValueError(f'the prediction has no "{name}" for each of {store.num_texts} texts.')
    position, num_rows = 0, len(store.text_of_row)

    def check(is_right: bool) -> None:
        if not is_right:
            raise RuntimeError(
                f"the files hold {position} rows, {num_rows} were read before: a file changed "
                "while it was scored; start the prediction again."
            )

    def added(count: int) -> dict[str, list[Any]]:
        """Return the columns of the next rows; a rejected row has none of the values."""
        nonlocal position
        texts = store.text_of_row[position : position + count]
        position += count
        check(position <= num_rows)
        columns: dict[str, list[Any]] = {}
        for name, facts in heads.items():
            scores = scores_of(name, facts, results[name][np.maximum(texts, 0)])
            for column, values in scores.items():
                pairs = zip(values, texts.tolist(), strict=True)
                columns[column] = [None if text < 0 else value for value, text in pairs]
        return columns

    if path.suffix.lower() in JSON_SUFFIXES:
        with new_text_file(path) as file:
            for row in (row for source in store.files for row in read_json_rows(source)):
                own = added(1)
                names = free_names(list(row.values), list(own))
                values = dict(zip(names, row.values.values(), strict=True))
                values |= {name: column[0] for name, column in own.items()}
                file.write(json.dumps(values, ensure_ascii=False) + "\n")
            check(position == num_rows)
        return
    classes = [str(name) for facts in heads.values() for name in facts.get("classes") or ()]
    like = dialect_for([Table(file, options) for file in store.files], classes)
    with new_table(path, like=like) as table:
        for batch in read_rows(store.files, on_bad_row=lambda bad: None, options=options):
            own = added(len(batch.line))
            names = [*free_names(batch.rows.schema.names, list(own)), *own]
            arrays = [*batch.rows.columns, *(pa.array(values) for values in own.values())]
            table.write(pa.RecordBatch.from_arrays(arrays, names=names))
        check(position == num_rows)
