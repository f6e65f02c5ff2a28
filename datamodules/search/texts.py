"""Texts with ids, copied once into the cache: found by number and by id, memory-mapped."""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.store import mapped
from datamodules.files.rows import BadRow, BadRows

COLUMNS: dict[str, type | str] = {  # one value per text
    "starts": np.int64,  # byte at which it begins in the copy
    "sizes": np.int64,  # bytes that it takes there
    "lengths": np.int64,  # bytes of title and text in UTF-8
    "lines": np.int64,  # number of the line or row in the user's file, from 1
    "files": np.int64,  # number of the user's file
}
KEY = "S16"  # hash of an id; two of 128 bits never meet by chance


class TextRecord(NamedTuple):
    """One text with its id; title and address (a url) are "" where a format has none."""

    id: str
    title: str
    text: str
    address: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read in it."""
        return not (self.text.strip() or self.title.strip())


class LineError(Exception):
    """Fault of a line: the value and the rule."""

    def __init__(self, value: str, rule: str) -> None:
        super().__init__(rule)
        self.value, self.rule = value, rule


def id_keys(ids: Iterable[str]) -> np.ndarray:
    """Return a hash of each id, [n] S16."""
    digests = [hashlib.blake2b(i.encode(errors="replace"), digest_size=16).digest() for i in ids]
    return np.frombuffer(b"".join(digests), KEY)


class TextTable:
    """The texts of one kind, such as documents, in the order of the files.

    Opening is cheap, pickling keeps only the place, and several processes may read at once.

    Args:
        folder: in which `TextTableWriter` wrote it.
        name: of the table in it.
        files: of the user, for messages.
    """

    def __init__(self, folder: Path, name: str, files: list[str]) -> None:
        self.folder, self.name, self.files = folder, name, files
        self._arrays = {
            key: mapped(folder / f"{name}.{key}.bin", np.dtype(dtype))
            for key, dtype in {**COLUMNS, "order": np.int64, "keys": KEY}.items()
        }
        self.lengths = self._arrays["lengths"]
        self._handle: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTable, (self.folder, self.name, self.files)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> TextRecord:
        """Return one text by its number.

        Raises:
            IndexError: there is no such text.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} texts, there is no number {index}.")
        if self._handle is None:  # read, not mapped: the pages of a large file would count as ours
            self._handle = os.open(self.folder / f"{self.name}.jsonl", os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
        size, start = int(self._arrays["sizes"][index]), int(self._arrays["starts"][index])
        return TextRecord(*json.loads(os.pread(self._handle, size, start)))

    def place(self, index: int) -> tuple[str, int]:
        """Return the user's file and line of one text."""
        return self.files[self._arrays["files"][index]], int(self._arrays["lines"][index])

    def indices_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the number of each id, [n] int64; -1 where there is none."""
        if not len(self) or not len(ids):
            return np.full(len(ids), -1, np.int64)
        wanted, keys = id_keys(ids), self._arrays["keys"]
        place = np.minimum(np.searchsorted(keys, wanted), len(self) - 1)
        return np.where(keys[place] == wanted, self._arrays["order"][place], -1)

    def index_of(self, id: str) -> int:
        """Return the number of an id.

        Raises:
            KeyError: there is none.
        """
        index = int(self.indices_of([id])[0])
        if index < 0:
            raise KeyError(f'the collection\'s {self.name} have no id "{id}".')
        return index


class TextTableWriter:
    """Copies texts of one kind into a folder.

    Args:
        folder: of the table.
        name: of the table.
        bad_rows: takes texts that break a rule.
        are_queries: a query must not be empty, and may come again with the same text, as in
            several files; an empty document is taken, since the field's own files have some.
    """

    def __init__(
        self, folder: Path, name: str, bad_rows: BadRows, are_queries: bool = False
    ) -> None:
        self.folder, self.name, self.bad_rows = folder, name, bad_rows
        self.are_queries, self.num_merged = are_queries, 0
        self.files: dict[str, int] = {}
        self._columns = {key: array("q") for key in COLUMNS}
        self._keys = bytearray()
        self._copy = (folder / f"{name}.jsonl").open("wb")

    def add(self, record: TextRecord, path: Path, line: int) -> None:
        """Take a text that stands in this line or row of a file."""
        if self.are_queries and record.is_empty:
            rule = "the query is empty; write what was asked, or take it out."
            self.refuse(path, line, LineError(record.id, rule))
            return
        content = json.dumps(record, ensure_ascii=False).encode()
        number = self.files.setdefault(str(path), len(self.files))
        length = len(record.title.encode()) + len(record.text.encode())
        values = (self._copy.tell(), len(content), length, line, number)
        for column, value in zip(self._columns.values(), values, strict=True):
            column.append(value)
        self._keys += id_keys([record.id]).tobytes()
        self._copy.write(content)

    def refuse(self, path: Path, line: int, error: LineError) -> None:
        """Take a line that breaks a rule."""
        self.bad_rows.add(BadRow(str(path), line, error.value, error.rule, self.name))

    def finish(self) -> TextTable:
        """Return the table, in which every id is there once."""
        self._copy.close()
        columns = {key: np.array(values, COLUMNS[key]) for key, values in self._columns.items()}
        table = self._written(columns, np.frombuffer(self._keys, KEY))
        keys, order = table._arrays["keys"], table._arrays["order"]
        is_repeated = np.append(False, keys[1:] == keys[:-1])[: len(keys)]
        if not is_repeated.any():
            return table
        first_of = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(keys))))
        repeated = order[is_repeated]
        pairs = zip(repeated.tolist(), order[first_of[is_repeated]].tolist(), strict=True)
        for index, first in sorted(pairs):
            record = table[index]
            if self.are_queries and record == table[first]:
                self.num_merged += 1
                continue
            before = "{}:{}".format(*table.place(first))
            rule = f"this id stands at {before} already; every id must be there once."
            self.bad_rows.add(BadRow(*table.place(index), record.id, rule, "repeated id"))
        kept = np.delete(np.arange(len(keys)), repeated)
        columns = {key: values[kept] for key, values in columns.items()}
        return self._written(columns, np.frombuffer(self._keys, KEY)[kept])

    def _written(self, columns: dict[str, np.ndarray], keys: np.ndarray) -> TextTable:
        order = np.argsort(keys, kind="stable")
        for key, values in {**columns, "order": order, "keys": keys[order]}.items():
            (self.folder / f"{self.name}.{key}.new").write_bytes(values.tobytes())
            # Renamed, since the file before it may be mapped.
            os.replace(
                self.folder / f"{self.name}.{key}.new", self.folder / f"{self.name}.{key}.bin"
            )
        return TextTable(self.folder, self.name, list(self.files))
