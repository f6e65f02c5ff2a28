"""Queries to rank for: those of a part of a collection, or of a file of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.core.store import digest_of
from datamodules.files.rows import BadRow
from datamodules.files.tables import Table
from datamodules.search.collection import Collection
from datamodules.search.texts import LineError, LineKind, TextRecord, parse_line

QUERY_SUFFIXES = (".jsonl", ".tsv", ".csv", ".txt", ".xlsx")
QUERY_COLUMNS = ("query", "question", "search")


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
    """The queries of a file, in its order: jsonl with _id and text, tsv with id and text, a table
    (.csv, .xlsx) with query and perhaps id, or lines of text (.txt); without ids by their number.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its name ends otherwise, a line breaks a rule, an id comes twice, or it has
            no query.
    """

    def __init__(self, path: Path) -> None:
        if path.suffix not in QUERY_SUFFIXES:
            raise ValueError(
                f"data.predict_queries {path} must end with {' or '.join(QUERY_SUFFIXES)}: one "
                "query in each line."
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
    if path.suffix in (".csv", ".xlsx"):
        yield from _table_records(path)
        return
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                if path.suffix == ".txt":
                    raw = f"{line}\t".encode() + raw.removeprefix(b"\xef\xbb\xbf").strip()
                kind: LineKind = "jsonl" if path.suffix == ".jsonl" else "tsv"
                yield line, parse_line(kind, raw.rstrip(b"\r\n"))
            except LineError as error:
                raise ValueError(str(BadRow(str(path), line, error.value, error.rule))) from error


def _table_records(path: Path) -> Iterator[tuple[int, TextRecord]]:
    table = Table(path)
    column = next((name for name in QUERY_COLUMNS if name in table.names), QUERY_COLUMNS[0])
    table.check([column], "data.predict_queries")
    own = next((name for name in ("id", "_id") if name in table.names), None)
    known: set[str] = set()  # a table of queries and pages names a query several times
    for batch in table.rows():
        ids = batch.texts(own) if own else map(str, batch.line.tolist())
        for line, id, query in zip(batch.line.tolist(), ids, batch.texts(column), strict=True):
            if query.strip() and (own or query not in known):
                known.add(query)
                yield line, TextRecord(id, "", query.strip())
