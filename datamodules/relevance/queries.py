"""Queries to rank for: those of a part of a collection, or of a file of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from datamodules.cache import digest_of
from datamodules.files.bad_rows import BadRow
from datamodules.plan import hash_ids
from datamodules.relevance.collection import Collection
from datamodules.relevance.texts import LineError, TextRecord, parse_line

QUERY_SUFFIXES = (".jsonl", ".tsv")


class Queries(Protocol):
    """Texts with ids, by their place 0 … len - 1.

    Attributes:
        indices: [Q] int64, their numbers where they are from.
    """

    indices: np.ndarray

    @property
    def digest(self) -> str:
        """Tells these queries from others of the same collection."""
        ...

    def __len__(self) -> int: ...

    def id(self, place: int) -> str:
        """Return the id of a query."""
        ...

    def text(self, place: int) -> str:
        """Return the text of a query."""
        ...


class CollectionQueries:
    """Some queries of a collection.

    Args:
        collection: that has them.
        indices: [Q] int64, their numbers in it.
    """

    def __init__(self, collection: Collection, indices: np.ndarray) -> None:
        self.collection, self.indices = collection, indices

    @property
    def digest(self) -> str:
        return hash_digest(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def id(self, place: int) -> str:
        return self.collection.query_id(int(self.indices[place]))

    def text(self, place: int) -> str:
        return self.collection.query(int(self.indices[place]))


class FileQueries:
    """The queries of a file, in its order: jsonl with _id and text, or tsv with id and text.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its name ends otherwise, a line breaks a rule, an id comes twice, or it has
            no query.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in QUERY_SUFFIXES:
            raise ValueError(
                f"data.predict_queries {path} must end with {' or '.join(QUERY_SUFFIXES)}: one "
                "query in each line, with its id."
            )
        if not path.is_file():
            raise FileNotFoundError(f"data.predict_queries: there is no file {path}.")
        self.records: list[TextRecord] = []
        lines: dict[str, int] = {}
        for line, record in _records(path):
            if record.id in lines:
                rule = f"the id stands in line {lines[record.id]} too; give each query its own."
                raise ValueError(str(BadRow(str(path), line, record.id, rule)))
            lines[record.id] = line
            self.records.append(record)
        if not self.records:
            raise ValueError(f"data.predict_queries {path} holds no query.")
        self.indices = np.arange(len(self.records))

    @property
    def digest(self) -> str:
        return digest_of([[record.id, record.text] for record in self.records])

    def __len__(self) -> int:
        return len(self.records)

    def id(self, place: int) -> str:
        return self.records[place].id

    def text(self, place: int) -> str:
        return self.records[place].text


def hash_digest(numbers: np.ndarray) -> str:
    """Return a digest of numbers in their order."""
    return digest_of([len(numbers), int(hash_ids(numbers).sum(dtype=np.uint64))])


def _records(path: Path) -> Iterator[tuple[int, TextRecord]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                kind = "jsonl" if path.suffix == ".jsonl" else "tsv"
                yield line, parse_line(kind, raw.rstrip(b"\r\n"))  # type: ignore[arg-type]
            except LineError as error:
                raise ValueError(str(BadRow(str(path), line, error.value, error.rule))) from error
