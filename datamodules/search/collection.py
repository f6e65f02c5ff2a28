"""A collection: documents, queries and judgements, on disk and memory-mapped, by number and id."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.core.store import digest_of, made_once, mapped
from datamodules.files.rows import BadRow, BadRows, OnBadRows, read_rejected
from datamodules.files.splitting import PART_NAMES
from datamodules.search.collection_writer import CollectionWriter
from datamodules.search.request import CollectionRequest
from datamodules.search.texts import TextTable


class Document(NamedTuple):
    """One document; the title is "" where a format has none."""

    title: str
    text: str

    @property
    def whole(self) -> str:
        """The document as an encoder reads it: its title, and its text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True)
class Judgements:
    """What people said of pairs, sorted by query and document, each pair once.

    Args:
        query: [J] int64, number of the query in the collection.
        document: [J] int64, number of the document.
        grade: [J] float32, 0 or more.
    """

    query: np.ndarray
    document: np.ndarray
    grade: np.ndarray


class Triples(NamedTuple):
    """Queries with a relevant and another document, [n] int32 numbers each."""

    query: np.ndarray
    positive: np.ndarray
    negative: np.ndarray


class Collection:
    """A folder of an indexed collection, as `open_collection` makes it.

    Texts stay in the user's files and are read by number. Opening is cheap, pickling keeps only
    the place, and several processes may read at once.

    Args:
        folder: of the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = json.loads((folder / "facts.json").read_text("utf-8"))
        self.fingerprint: str = self.facts["fingerprint"]
        self.documents = TextTable(folder, "documents", self.facts["documents"])
        self.queries = TextTable(folder, "queries", self.facts["queries"])
        self.num_documents, self.num_queries = self.documents.count, self.queries.count
        self.has_titles = True

    def without_leak(self) -> "Collection":
        """Return the collection as training and evaluation may see it: where the queries are the
        titles of the documents, without these."""
        if self.facts["queries"]["files"] != self.facts["documents"]["files"]:
            return self
        other = Collection(self.folder)
        other.has_titles, other.fingerprint = False, f"{self.fingerprint}-untitled"
        return other

    @property
    def document_lengths(self) -> np.ndarray:
        """[documents] int64, bytes of title and text in UTF-8."""
        return self.documents.column("lengths")

    @property
    def query_lengths(self) -> np.ndarray:
        """[queries] int64, bytes in UTF-8."""
        return self.queries.column("lengths")

    def document(self, index: int) -> Document:
        """Return a document by its number.

        Raises:
            RuntimeError: its file has changed since it was indexed.
        """
        record = self.documents.record(index)
        return Document(record.title if self.has_titles else "", record.text)

    def address(self, index: int) -> str:
        """Return where a document is to be found: its address on the web, else its id."""
        record = self.documents.record(index)
        return record.address or record.id

    def document_text(self, index: int) -> str:
        """Return a document as an encoder reads it: its title, and its text."""
        return self.document(index).whole

    def query(self, index: int) -> str:
        """Return a query by its number, as `document`."""
        return self.queries.record(index).text

    def document_id(self, index: int) -> str:
        """Return the id of a document."""
        return self.documents.record(index).id

    def query_id(self, index: int) -> str:
        """Return the id of a query."""
        return self.queries.record(index).id

    def document_index(self, id: str) -> int:
        """Return the number of a document; KeyError where there is none."""
        return self.documents.index_of(id)

    def query_index(self, id: str) -> int:
        """Return the number of a query; KeyError where there is none."""
        return self.queries.index_of(id)

    def judgements(self, part: int) -> Judgements:
        """Return the judgements of one part: 0 train, 1 validation, 2 test."""
        path = f"{self.folder}/{PART_NAMES[part]}"
        arrays = (np.load(f"{path}.{name}.npy") for name in ("query", "document", "grade"))
        return Judgements(*arrays)

    @property
    def triples(self) -> Triples | None:
        """The triples that come with the collection, memory-mapped."""
        if not self.facts["num_triples"]:
            return None
        return Triples(*mapped(self.folder / "triples.bin", np.int32).reshape(-1, 3).T)

    @property
    def bad_rows(self) -> list[BadRow]:
        """The rows that are left out because they break a rule."""
        return read_rejected(self.folder)


def open_collection(request: CollectionRequest, on_bad_rows: OnBadRows = "error") -> Collection:
    """Return the collection of a request, indexed into the cache at first use.

    Args:
        request: its files and options.
        on_bad_rows: `error` names the first 20; `reject` leaves them out, listed in the folder.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file cannot be read at all, or rows break a rule.
    """
    found = BadRows(on_bad_rows)
    reader = request.reader()
    fingerprint = digest_of(request.facts(reader))
    final = request.cache_folder(reader, fingerprint)
    writer = CollectionWriter(request, reader, fingerprint)
    collection = Collection(made_once(final, lambda folder: writer.write(folder, final)))
    if collection.facts["num_bad_rows"] and found.mode == "error":
        for row in collection.bad_rows:
            found.add(row)
        raise ValueError(found.message())
    return collection
