"""Rows of nested values in: jsonl, json and parquet become dicts with the place they stand at."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.files.tables import PARQUET_SUFFIXES

JSON_SUFFIXES = (".jsonl", ".ndjson")
LIST_SUFFIX = ".json"  # one list of all rows, as ShareGPT and Alpaca came
SUFFIXES = (*JSON_SUFFIXES, LIST_SUFFIX, *PARQUET_SUFFIXES)
ROWS_PER_BATCH = 1024
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark and spaces
HALF_RULE = (
    "is half of a surrogate pair, which no text in UTF-8 can hold; write the whole character."
)


class JsonRow(NamedTuple):
    """One row: the file, its line (jsonl) or row (json, parquet) from 1, its values by name."""

    file: Path
    line: int
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"


def read_json_rows(
    path: Path,
    start: int = 0,
    end: int | None = None,
    first_line: int = 1,
    columns: Sequence[str] = (),
) -> Iterator[JsonRow]:
    """Yield the rows of one file, or of a part of it; blank lines of jsonl are passed over.

    Args:
        path: jsonl, parquet, or json with a list of all rows.
        start: byte at which a line begins, or first row group.
        end: byte behind the last line, or row group behind the last; none is all.
        first_line: number of the line or row at the start.
        columns: enough of a parquet file, if it has them; none is all.

    Raises:
        ValueError: a line is no JSON object or not UTF-8, or the parquet file is damaged.
    """
    if path.suffix.lower() in PARQUET_SUFFIXES:
        groups = None if end is None else range(start, end)
        yield from _parquet_rows(path, groups, first_line, columns)
        return
    with path.open("rb") as file:
        if path.suffix.lower() == LIST_SUFFIX and file.read(4096).lstrip(BLANK)[:1] == b"[":
            yield from _listed_rows(path)
            return
        file.seek(start)
        position = start
        for line, content in enumerate(file, start=first_line):
            if end is not None and position >= end:
                return
            position += len(content)
            if content.strip():
                yield JsonRow(path, line, _parsed(path, line, content))


def half_character(text: str) -> str | None:
    r"""Return the first lone surrogate of a text, written as \ud83d; none where there is none.

    JSON can name such halves of a character, and Python's texts hold them.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return ascii(text[error.start])[1:-1]
    return None


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a parquet file.

    Raises:
        ValueError: it is damaged.
    """
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{path} is no readable parquet file ({reason}); write it again."
        ) from error


def _listed_rows(path: Path) -> Iterator[JsonRow]:
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no JSON list ({error}); write it again, in UTF-8.") from error
    for number, values in enumerate(rows, start=1):
        if not isinstance(values, dict):
            raise ValueError(
                f"{path}: row {number} is a JSON {type(values).__name__}; every row of the list "
                "must be an object."
            )
        yield JsonRow(path, number, values)


def _parsed(path: Path, line: int, content: bytes) -> dict[str, Any]:
    try:
        values = json.loads(content.decode("utf-8-sig" if line == 1 else "utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        what = "not UTF-8" if isinstance(error, UnicodeDecodeError) else f"no JSON ({error.msg})"
        raise ValueError(
            f"{path}:{line}: the line is {what}; every line of a jsonl file must be one JSON "
            "object, written in UTF-8."
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{path}:{line}: the line is a JSON {type(values).__name__}; every line must be an "
            'object such as {"text": "…"}.'
        )
    return values


def _parquet_rows(
    path: Path, groups: range | None, first_row: int, columns: Sequence[str]
) -> Iterator[JsonRow]:
    with open_parquet(path) as file:
        has_them = bool(columns) and set(columns) <= set(file.schema_arrow.names)
        batches = file.iter_batches(
            ROWS_PER_BATCH,
            row_groups=list(range(file.num_row_groups) if groups is None else groups),
            columns=list(columns) if has_them else None,
        )
        rows = (values for batch in batches for values in batch.to_pylist())
        for row, values in enumerate(rows, start=first_row):
            yield JsonRow(path, row, values)
