"""Texts found by byte offset in files of lines, and by id: a memory-mapped index, no copy.

Every line has a checksum in the index, so that a file that was changed since is never misread.
"""

import hashlib
import json
import os
import weakref
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.store import mapped
from datamodules.files.rows import HALF_RULE, half_character

LineKind = Literal["jsonl", "tsv"]
COLUMNS = {  # of the index, one value per text
    "starts": np.int64,  # byte at which its line begins
    "sizes": np.int64,  # bytes of the line, without its end
    "lengths": np.int64,  # bytes of title and text in UTF-8
    "lines": np.int64,  # number of the line or row in the user's file, from 1
    "files": np.int32,  # number of the user's file
    "checks": np.uint32,  # checksum of the line
    "high": np.uint64,  # the two halves of the hash of its id
    "low": np.uint64,
    "contents": np.uint64,  # hash of the words, without case and spacing
}


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

    @property
    def num_bytes(self) -> int:
        """Bytes of title and text in UTF-8."""
        return len(self.title.encode()) + len(self.text.encode())

    @property
    def content_hash(self) -> int:
        """A number of 64 bits, equal for texts that differ in case and spacing alone."""
        words = " ".join(f"{self.title} {self.text}".casefold().split())
        return int.from_bytes(hashlib.blake2b(words.encode(), digest_size=8).digest(), "little")


class LineError(Exception):
    """What is wrong with a line: the value and the rule."""

    def __init__(self, value: str, rule: str) -> None:
        super().__init__(rule)
        self.value, self.rule = value, rule


def parse_line(kind: LineKind, line: bytes) -> TextRecord:
    """Return the text of a line.

    Raises:
        LineError: it breaks a rule.
    """
    try:
        content = line.decode()
    except UnicodeDecodeError as error:
        raise LineError(
            line.decode(errors="replace"),
            f"byte 0x{line[error.start]:02X} at place {error.start + 1} of the line is not UTF-8, "
            "which every file must be; convert it, such as with iconv -f latin1 -t utf-8.",
        ) from error
    record = _json_record(content) if kind == "jsonl" else _tsv_record(content)
    if not record.id.strip():
        raise LineError(record.id, "the id is empty; give every document and query its own.")
    return record


def _json_record(content: str) -> TextRecord:
    try:
        values = json.loads(content)
    except json.JSONDecodeError as error:
        rule = f"the line is no JSON ({error.msg}); every line must be one JSON object."
        raise LineError(content, rule) from error
    if not isinstance(values, dict):
        raise LineError(content, 'every line must be an object such as {"_id": "1", "text": "…"}.')
    record = record_of(values)
    for text in record:
        if half := half_character(text):
            raise LineError(half, f"it {HALF_RULE}")
    return record


def record_of(values: dict[str, Any]) -> TextRecord:
    """Return the text of a row with _id (or id), text, and title where it has one.

    Raises:
        LineError: a value is missing or no text.
    """
    key = "_id" if "_id" in values else "id"
    id = values.get(key)
    if isinstance(id, int) and not isinstance(id, bool):
        id = str(id)
    title, address = values.get("title"), values.get("url")
    return TextRecord(
        _text_of(values, key, id),
        "" if title is None else _text_of(values, "title", title),
        _text_of(values, "text", values.get("text")),
        address if isinstance(address, str) else "",
    )


def _text_of(values: dict[str, Any], name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None and name == "text" and name in values:
        return ""
    shown = f'has no "{name}"' if value is None else f'has a "{name}" that is no text'
    names = ", ".join(map(str, values)) or "nothing"
    raise LineError(
        "" if value is None else str(value),
        f"the row {shown}; it must have _id and text, and may have title; it has {names}.",
    )


def _tsv_record(content: str) -> TextRecord:
    values = content.split("\t")
    if len(values) != 2:
        raise LineError(
            content,
            f"the line has {len(values)} columns, and must have 2, id and text, with one tab "
            "between them; replace tabs inside the text by blanks.",
        )
    return TextRecord(values[0], "", values[1])


def id_hashes(ids: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return both halves, [n] uint64 each, of a hash of 128 bits per id: none meet by chance."""
    digests = [hashlib.blake2b(i.encode(errors="replace"), digest_size=16).digest() for i in ids]
    halves = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    return halves[:, 0].astype(np.uint64), halves[:, 1].astype(np.uint64)


class TextTable:
    """The texts of one kind, such as documents, in the order of the files.

    It opens files and maps arrays at first use, in every process anew.

    Args:
        folder: of the index.
        name: of the table in it.
        facts: kind of the lines; files: the user's; sources: those whose lines are read.
    """

    def __init__(self, folder: Path, name: str, facts: dict[str, Any]) -> None:
        self.folder, self.name, self.facts = folder, name, facts
        self.count: int = facts["count"]
        self._arrays: dict[str, np.ndarray] = {}
        self._handles: dict[int, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_arrays": {}, "_handles": {}}

    def column(self, name: str) -> np.ndarray:
        """Return one of COLUMNS, [count]; or `order`, their numbers by ascending hash."""
        if name not in self._arrays:
            dtype = np.int64 if name == "order" else COLUMNS[name.removeprefix("sorted_")]
            self._arrays[name] = mapped(self.folder / f"{self.name}.{name}.bin", dtype)
        return self._arrays[name]

    def record(self, index: int) -> TextRecord:
        """Return one text, read from its file.

        Raises:
            IndexError: there is no such text.
            RuntimeError: the file has changed since it was indexed.
        """
        if not 0 <= index < self.count:
            raise IndexError(f"{self.name} has {self.count} texts, there is no number {index}.")
        size = int(self.column("sizes")[index])
        source = int(self.column("files")[index]) if len(self.facts["sources"]) > 1 else 0
        line = os.pread(self._handle(source), size, int(self.column("starts")[index]))
        if len(line) != size or zlib.crc32(line) != self.column("checks")[index]:
            raise RuntimeError(
                f"{self.facts['sources'][source]} has changed since it was indexed (line "
                f"{self.column('lines')[index]}); leave files alone while a run reads them, and "
                "start again, which indexes it anew (`touch` it where size and time are as before)."
            )
        return parse_line(self.facts["kind"], line)

    def place(self, index: int) -> tuple[str, int]:
        """Return the user's file and line of one text."""
        file = self.facts["files"][self.column("files")[index]]
        return file, int(self.column("lines")[index])

    def indices_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return [n] int64, the number of each id; -1 where there is none."""
        if not self.count or not len(ids):
            return np.full(len(ids), -1, np.int64)
        high, low = id_hashes(ids)
        sorted_high, sorted_low = self.column("sorted_high"), self.column("sorted_low")
        place = np.searchsorted(sorted_high, high)
        found = np.full(len(ids), -1, np.int64)
        for shift in (0, 1):  # two ids may share the first half
            near = np.minimum(place + shift, self.count - 1)
            hit = (sorted_high[near] == high) & (sorted_low[near] == low)
            found[hit] = self.column("order")[near[hit]]
        return found

    def index_of(self, id: str) -> int:
        """Return the number of an id.

        Raises:
            KeyError: there is none.
        """
        index = int(self.indices_of([id])[0])
        if index < 0:
            raise KeyError(f'the collection\'s {self.name} have no id "{id}".')
        return index

    def _handle(self, source: int) -> int:
        if source not in self._handles:
            handle = os.open(self.facts["sources"][source], os.O_RDONLY)
            weakref.finalize(self, os.close, handle)
            self._handles[source] = handle
        return self._handles[source]
