"""Makes indices of texts: one pass over each file, memory bounded by a block of lines."""

import json
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from datamodules.core.store import mapped
from datamodules.files.rows import BadRow, BadRows
from datamodules.search.texts import (
    COLUMNS,
    LineError,
    LineKind,
    TextRecord,
    TextTable,
    id_hashes,
    parse_line,
)

LINES_PER_BLOCK = 65_536
BOM = b"\xef\xbb\xbf"


class TextTableWriter:
    """Indexes texts of one kind into a folder; use it in a `with` block.

    Args:
        folder: of the index.
        name: of the table.
        bad_rows: takes lines that break a rule.
        are_queries: a query must not be empty, and may come again with the same text, as in
            several files; an empty document is counted, since the field's own files have some.
    """

    def __init__(
        self, folder: Path, name: str, bad_rows: BadRows, are_queries: bool = False
    ) -> None:
        self.folder, self.name, self.bad_rows = folder, name, bad_rows
        self.are_queries = are_queries
        self.num_merged = 0
        self.kind: LineKind = "jsonl"
        self.files: list[str] = []
        self._numbers: dict[Path, int] = {}
        self._block: dict[str, list[int]] = {key: [] for key in COLUMNS}
        self._ids: list[str] = []
        self._columns = {key: (folder / f"{name}.{key}.bin").open("wb") for key in COLUMNS}
        self._copy: BinaryIO | None = None  # of texts whose own file has no lines

    def __enter__(self) -> "TextTableWriter":
        return self

    def __exit__(self, *error: object) -> None:
        for file in (*self._columns.values(), *([self._copy] if self._copy else [])):
            file.close()

    def add_file(self, path: Path, kind: LineKind) -> None:
        """Index the lines of a file, which must stay where it is."""
        self.kind, number = kind, self._number(path)
        start = 0
        with path.open("rb") as file:
            for line, raw in enumerate(file, start=1):
                content = raw.removesuffix(b"\n").removesuffix(b"\r")
                begins = start
                start += len(raw)
                if line == 1 and content.startswith(BOM):
                    content, begins = content[len(BOM) :], begins + len(BOM)
                if not content.strip():
                    continue
                try:
                    record = self._sound(parse_line(kind, content))
                except LineError as error:
                    self.refuse(str(path), line, error)
                    continue
                self._append(record, content, begins, line, number)

    def add_record(self, record: TextRecord, path: Path, row: int) -> None:
        """Take a row of a file without lines, such as parquet; its text is copied to the index."""
        try:
            self._sound(record)
        except LineError as error:
            self.refuse(str(path), row, error)
            return
        if self._copy is None:
            self._copy = (self.folder / f"{self.name}.jsonl").open("wb")
        values = {"_id": record.id, "title": record.title, "text": record.text}
        values |= {"url": record.address} if record.address else {}
        content = json.dumps(values, ensure_ascii=False).encode()
        self._append(record, content, self._copy.tell(), row, self._number(path))
        self._copy.write(content + b"\n")

    def refuse(self, file: str, line: int, error: LineError) -> None:
        """Take a row that breaks a rule."""
        self.bad_rows.add(BadRow(file, line, error.value, error.rule, self.name))

    def finish(self, final_folder: Path) -> TextTable:
        """Close the index, refuse repeated ids and return the table; `facts` are its final ones.

        Args:
            final_folder: where the folder will be in the end.
        """
        self._flush()
        self.__exit__()
        order, is_repeated = self._sorted()
        if is_repeated.any():
            self._leave_out(self._repeated(order, is_repeated))
            order, _ = self._sorted()
        order.astype(np.int64).tofile(self._path("order"))
        for half in ("high", "low"):
            self._column(half)[order].tofile(self._path(f"sorted_{half}"))
            self._path(half).unlink()
        copy = self._path("jsonl", "")
        facts = {
            "count": len(order),
            "num_merged": self.num_merged,
            "kind": self.kind,
            "files": self.files,
            "sources": [str(copy)] if self._copy else self.files,
        }
        self.facts = facts | ({"sources": [str(final_folder / copy.name)]} if self._copy else {})
        return TextTable(self.folder, self.name, facts)

    def _sound(self, record: TextRecord) -> TextRecord:
        if record.is_empty and self.are_queries:
            rule = "the query is empty; write what was asked, or take it out."
            raise LineError(record.id, rule)
        return record

    def _append(self, record: TextRecord, content: bytes, start: int, line: int, file: int) -> None:
        block = self._block
        block["starts"].append(start)
        block["sizes"].append(len(content))
        block["lengths"].append(record.num_bytes)
        block["lines"].append(line)
        block["files"].append(file)
        block["checks"].append(zlib.crc32(content))
        block["contents"].append(record.content_hash)
        self._ids.append(record.id)
        if len(self._ids) == LINES_PER_BLOCK:
            self._flush()

    def _flush(self) -> None:
        if not self._ids:
            return
        high, low = id_hashes(self._ids)
        high.tofile(self._columns["high"])
        low.tofile(self._columns["low"])
        for key, values in self._block.items():
            if values:
                np.array(values, COLUMNS[key]).tofile(self._columns[key])
                values.clear()
        self._ids.clear()

    def _sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers by ascending hash, and which of them repeat the one before."""
        high, low = self._column("high"), self._column("low")
        order = np.argsort(high, kind="stable")
        is_tied = np.zeros(len(order), bool)
        is_tied[1:] = high[order[1:]] == high[order[:-1]]
        if is_tied.any():  # only then may the other half decide
            order = np.lexsort((low, high))
            is_tied[1:] = high[order[1:]] == high[order[:-1]]
            is_tied[1:] &= low[order[1:]] == low[order[:-1]]
        return order, is_tied

    def _repeated(self, order: np.ndarray, is_repeated: np.ndarray) -> np.ndarray:
        """Return the numbers of repeated texts; they are bad rows where they may not repeat."""
        first_of = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(order))))
        table = self._unfinished_table(len(order))
        repeated = []
        for place in np.flatnonzero(is_repeated).tolist():
            index, first = int(order[place]), int(order[first_of[place]])
            repeated.append((index, first))
        for index, first in sorted(repeated):
            record, known = table.record(index), table.record(first)
            if self.are_queries and record == known:
                self.num_merged += 1
                continue
            file, line = table.place(index)
            before = "{}:{}".format(*table.place(first))
            rule = f"this id stands at {before} already; every id must be there once."
            self.bad_rows.add(BadRow(file, line, record.id, rule, "repeated id"))
        return np.array([index for index, _ in repeated], np.int64)

    def _unfinished_table(self, count: int) -> TextTable:
        sources = [str(self._path("jsonl", ""))] if self._copy else self.files
        facts = {"count": count, "kind": self.kind, "files": self.files, "sources": sources}
        return TextTable(self.folder, self.name, facts)

    def _leave_out(self, indices: np.ndarray) -> None:
        for key in COLUMNS:
            kept = np.delete(self._column(key), indices)
            temporary = self._path(key).with_suffix(".kept")
            kept.tofile(temporary)
            os.replace(temporary, self._path(key))

    def _column(self, key: str) -> np.ndarray:
        return mapped(self._path(key), COLUMNS[key])

    def _path(self, key: str, suffix: str = ".bin") -> Path:
        return self.folder / f"{self.name}.{key}{suffix}"

    def _number(self, path: Path) -> int:
        if path not in self._numbers:  # asked for every row
            self._numbers[path] = len(self.files)
            self.files.append(str(path.resolve()))
        return self._numbers[path]
