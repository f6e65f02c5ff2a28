"""Rows of nested values in: jsonl and parquet files become dicts with the place where they stand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.sources import PARQUET_SUFFIXES

JSON_SUFFIXES = (".jsonl", ".ndjson")
SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES)
ROWS_PER_BATCH = 4096


class JsonRow(NamedTuple):
    """One row: the file, its line (jsonl) or row (parquet) from 1, and its values by name."""

    file: Path
    line: int
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"


def read_json_rows(path: Path) -> Iterator[JsonRow]:
    """Yield the rows of one file; blank lines of a jsonl file are passed over.

    Raises:
        ValueError: a line is no JSON object or not UTF-8, or the parquet file is damaged.
    """
    if path.suffix.lower() in PARQUET_SUFFIXES:
        yield from _parquet_rows(path)
        return
    with path.open("rb") as file:
        for line, content in enumerate(file, start=1):
            if content.strip():
                yield JsonRow(path, line, _parsed(path, line, content))


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


def _parquet_rows(path: Path) -> Iterator[JsonRow]:
    try:
        with pq.ParquetFile(path) as file:
            line = 0
            for batch in file.iter_batches(ROWS_PER_BATCH):
                for values in batch.to_pylist():
                    line += 1
                    yield JsonRow(path, line, values)
    except (pa.ArrowInvalid, OSError) as error:
        raise ValueError(
            f"{path} is no readable parquet file ({error}); write it again."
        ) from error
