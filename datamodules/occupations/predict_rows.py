"""Tables to code, larger than memory: which row holds which distinct input.

The first pass writes each distinct (text, language) once, and the number of its input for every
row. After prediction `rows_with_inputs` reads the tables again, so that a writer can add columns.
Shapes: N rows, D distinct inputs, P characters of all inputs.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import blake2b, sha256
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.rows import BadRows, OnBadRows
from datamodules.files.tables import RowBatch, Table, TableOptions, read_rows, same_columns
from datamodules.occupations.rows import Columns, RowRules
from datamodules.tokenizers.characters import TextNormalisation
from datamodules.tokenizers.codes import CodeSystem

INDEX_VERSION = 2
NO_TEXT = -1
FILES = {
    "code_points": "<u4",  # [P], the texts one behind the other
    "text_lengths": "<i8",  # [D]
    "language_ids": "<i2",  # [D], index in the recipe's languages, 0 = unknown
    "is_truncated": "|b1",  # [D]
    "input_of_row": "<i8",  # [N], the number of the row's input, -1 = a row without text
}


class PredictIndex:
    """The distinct inputs of some tables, memory-mapped; pickled as the name of the folder.

    Args:
        folder: in the cache, made by `open_index`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.files = [Path(name) for name in facts["files"]]
        self.fingerprint: str = facts["fingerprint"]
        self.notes: list[str] = facts["notes"]
        self.table = TableOptions(**facts["table"])
        self.code_points = _mapped(folder, "code_points")
        self.language_ids = _mapped(folder, "language_ids")
        self.is_truncated = _mapped(folder, "is_truncated")
        self.input_of_row = _mapped(folder, "input_of_row")
        lengths = _mapped(folder, "text_lengths")
        self.text_offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    def __reduce__(self) -> tuple[Any, ...]:
        return PredictIndex, (self.folder,)

    @property
    def num_rows(self) -> int:
        """N, rows without text included."""
        return len(self.input_of_row)

    @property
    def num_inputs(self) -> int:
        """D."""
        return len(self.language_ids)

    @property
    def language_known(self) -> np.ndarray:
        """[D] bool: whether training had this language."""
        return np.asarray(self.language_ids) != 0


class CodedRows(NamedTuple):
    """Some rows of a table to code: all its columns, and input_ids [rows] int64, -1 = no text."""

    batch: RowBatch
    input_ids: np.ndarray


def open_index(
    files: Sequence[Path],
    columns: Columns,
    recipe: dict[str, Any],
    on_bad_rows: OnBadRows = "error",
    table: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> PredictIndex:
    """The index of these tables, made where the cache lacks it.

    Args:
        files: tables with a text column; code columns are not needed.
        columns: which column holds text and language.
        recipe: of the checkpoint that will code them.
        on_bad_rows: `error` names the lines that cannot be cut into columns, `reject` leaves them
            out.
        table: how the tables are written.

    Raises:
        ValueError: tables differ in their columns, or rows break a rule.
    """
    _check_columns(files, columns, table)
    root = cache_root()
    encoding = {key: recipe[key] for key in ("normalisation", "max_length", "languages")}
    key = {
        "version": INDEX_VERSION,
        "files": [[str(path.resolve()), file_digest(path, root)] for path in files],
        "columns": [columns.text, columns.language, columns.default_language],
        "encoding": encoding,
        "on_bad_rows": on_bad_rows,
        "table": asdict(table),
    }
    folder = root / "predict" / digest_of(key)

    def make(target: Path) -> None:
        bad_rows = BadRows(on_bad_rows)
        normalisation = TextNormalisation.from_dict(recipe["normalisation"])
        system = CodeSystem()
        rules = RowRules(columns, normalisation, system, bad_rows, None, table, is_prediction=True)
        _IndexWriter(target, recipe).write(files, rules)
        bad_rows.settle(target)

    return PredictIndex(made_once(folder, make))


def _check_columns(files: Sequence[Path], columns: Columns, options: TableOptions) -> None:
    tables = [Table(path, options) for path in files]
    for table in tables:
        columns.text_columns(table)
    same_columns(tables, "coded")


def rows_with_inputs(index: PredictIndex) -> Iterator[CodedRows]:
    """Yields all rows of the tables again, with every column, in order.

    Raises:
        RuntimeError: a table has changed since the index was made.
    """
    position, unreadable = 0, BadRows("collect")
    for batch in read_rows(index.files, None, unreadable.add, index.table):
        ids = np.array(index.input_of_row[position : position + len(batch.line)])
        position += len(batch.line)
        if len(ids) == len(batch.line):
            yield CodedRows(batch, ids)
    if position != index.num_rows:
        raise RuntimeError(
            f"the tables hold {position} rows, the index {index.num_rows}: a table changed while "
            "it was coded; start the prediction again."
        )


def _mapped(folder: Path, name: str) -> np.ndarray:
    path, kind = folder / f"{name}.bin", np.dtype(FILES[name])
    if path.stat().st_size == 0:
        return np.empty(0, dtype=kind)  # an empty file cannot be mapped
    return np.memmap(path, dtype=kind, mode="r")


class _IndexWriter:
    """Appends to the files of an index; keeps one 128-bit key per distinct input in memory."""

    def __init__(self, folder: Path, recipe: dict[str, Any]) -> None:
        self.folder = folder
        self.max_length: int = recipe["max_length"]
        self.language_id = {name: i for i, name in enumerate(recipe["languages"])}
        self.input_of_key: dict[bytes, int] = {}
        self.content = sha256()

    def write(self, files: Sequence[Path], rules: RowRules) -> None:
        handles: dict[str, IO[bytes]] = {
            name: (self.folder / f"{name}.bin").open("wb") for name in FILES
        }
        try:
            for path in files:
                for batch in rules.input_batches(path):
                    self._take(batch, rules, handles)
        finally:
            for handle in handles.values():
                handle.close()
        if not self.input_of_key and not (rules.bad_rows.count and rules.bad_rows.mode == "error"):
            why = [*rules.bad_rows.rows[:1], *rules.notes()][0]
            raise ValueError(f"{', '.join(map(str, files))}: no row can be coded. {why}")
        facts = {
            "files": [str(path) for path in files],
            "fingerprint": self.content.hexdigest(),
            "notes": rules.notes(),
            "table": asdict(rules.table),
        }
        (self.folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    def _take(self, batch: RowBatch, rules: RowRules, handles: dict[str, IO[bytes]]) -> None:
        seen: dict[tuple[str, str], int] = {}
        inputs = np.empty(len(batch.line), dtype="<i8")
        for i, (text, language) in enumerate(rules.inputs(batch)):
            if text is None:
                inputs[i] = NO_TEXT
                continue
            number = seen.get((text, language))
            if number is None:
                number = seen[text, language] = self._input(text, language, handles)
            inputs[i] = number
        handles["input_of_row"].write(inputs.tobytes())

    def _input(self, text: str, language: str, handles: dict[str, IO[bytes]]) -> int:
        """The number of this input; a new one is appended."""
        kept = text[: self.max_length]
        points = kept.encode("utf-32-le")
        truncated = b"\1" if len(text) > self.max_length else b"\0"
        language_id = self.language_id.get(language, 0).to_bytes(2, "little")
        key = blake2b(points + truncated + language_id, digest_size=16).digest()
        number = self.input_of_key.get(key)
        if number is None:
            number = self.input_of_key[key] = len(self.input_of_key)
            handles["code_points"].write(points)
            handles["text_lengths"].write(len(kept).to_bytes(8, "little"))
            handles["language_ids"].write(language_id)
            handles["is_truncated"].write(truncated)
            self.content.update(key)
        return number
