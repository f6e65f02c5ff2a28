"""Collections: documents, queries and judgements, indexed into the cache once."""

import hashlib
import json
import math
import os
import re
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.store import cache_folder, digest_of, file_digest, made_once, mapped_array
from datamodules.demo import demo_collection
from datamodules.files.rows import BadRow, BadRows, OnBadRows, accepted, kind_of, refuse
from datamodules.files.splitting import PART_NAMES, TRAIN, Split
from datamodules.search.cleaning import Cleaning
from datamodules.search.formats import (
    PAGE_SUFFIXES,
    PASSAGES,
    PRODUCTS,
    BeirReader,
    CollectionFiles,
    EsciReader,
    JudgementRow,
    MsMarcoReader,
    PagesReader,
    TextRecord,
    TextRow,
)

COLLECTION_VERSION = 5
READ_ANEW = {"pages": 7, "msmarco": 6, "esci": 6}  # versions of formats whose reader has changed
CACHE_VERSION = 3  # of the cache folder only, so that a change does not stop runs from resuming
JUDGEMENTS_AT_ONCE = 65_536
Reader = BeirReader | EsciReader | PagesReader
READERS: dict[str, tuple[str, Callable[[Path, CollectionFiles], Reader]]] = {
    "beir": ("corpus.jsonl", BeirReader),  # the file that identifies a format, and its reader
    "msmarco": (PASSAGES, MsMarcoReader),
    "esci": (PRODUCTS, EsciReader),
}
KEY = "S16"  # 128-bit hash of an id, without collisions in practice


@dataclass(frozen=True)
class CollectionRequest:
    """The files and options of a collection.

    Args:
        folder: folder of the files; `None` is the demo.
        files: files with other names or in other places.
        split: how training queries are divided if a part has no judgements.
        cleaning: which text of pages and which documents are left out.
    """

    folder: str | None = None
    files: CollectionFiles = field(default_factory=CollectionFiles)
    split: Split = Split()  # noqa: RUF009 - frozen
    cleaning: Cleaning = Cleaning()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if self.folder is None and self.files != CollectionFiles():
            raise ValueError("data.collection.folder is missing; name that of the documents.")

    def reader(self) -> tuple[str, Reader]:
        """Return the format (`demo`, `pages` or a key of `READERS`) and the reader of these files.

        Raises:
            FileNotFoundError: a file or folder does not exist.
            ValueError: no file identifies the format, or a file belongs to no part.
        """
        folder = demo_collection() if self.folder is None else Path(self.folder).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"data.collection.folder {folder} is no folder.")
        found = (format for format, (name, _) in READERS.items() if (folder / name).exists())
        if format := next(found, ""):
            if self.cleaning.main_text:
                raise ValueError(
                    "collection.cleaning.main_text is for a folder of pages; leave it out."
                )
            return "demo" if self.folder is None else format, READERS[format][1](folder, self.files)
        if any(kind_of(path) in PAGE_SUFFIXES for path in folder.rglob("*")):
            return "pages", PagesReader(folder, self.files, self.cleaning.main_text)
        raise ValueError(
            f"data.collection.folder {folder} holds none of the files that tell a format "
            f"(corpus.jsonl of BEIR, {PASSAGES} of MS MARCO, {PRODUCTS}, or pages: "
            f"{', '.join(PAGE_SUFFIXES)}); name the folder that holds them."
        )


class Judgements(NamedTuple):
    """Grades of distinct (query, document) pairs, sorted by query and document."""

    query: np.ndarray  # [J] int64, number of the query in the collection
    document: np.ndarray  # [J] int64, number of the document
    grade: np.ndarray  # [J] float32, 0 or more


class TextTable:
    """Texts with ids, such as documents, in file order, looked up by number or by id in a folder
    of `write_texts`; `has_titles` False hides their titles.

    Opening is cheap, pickling keeps only the path, and several processes may read at once.

    Attributes:
        lengths: [n] int64, bytes of title and text in UTF-8.
    """

    def __init__(self, folder: Path, name: str, has_titles: bool = True) -> None:
        self.folder, self.name, self.has_titles = folder, name, has_titles
        self.lengths, self._starts, self._keys, self._order = (
            mapped_array(folder / f"{name}.{kind}.npy")
            for kind in ("lengths", "starts", "keys", "order")
        )
        self._handle: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTable, (self.folder, self.name, self.has_titles)

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[TextRecord]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> TextRecord:
        if self._handle is None:  # not mapped: pages would count as our memory
            self._handle = os.open(self.folder / f"{self.name}.jsonl", os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        record = TextRecord(*json.loads(os.pread(self._handle, end - start, start)))
        return record if self.has_titles else record._replace(title="")

    def indices_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the number of each id, [n] int64; -1 for unknown ids."""
        if not len(self) or not len(ids):
            return np.full(len(ids), -1, np.int64)
        keys = np.frombuffer(b"".join(map(_key, ids)), KEY)
        place = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        return np.where(self._keys[place] == keys, self._order[place], -1)


def _one_word(id: str) -> str:
    """Return an id with its blanks as %20, since blanks separate the columns of TREC's files."""
    return re.sub(r"\s", "%20", id)


def _key(id: str) -> bytes:
    return hashlib.blake2b(_one_word(id).encode(errors="replace"), digest_size=16).digest()


def write_texts(folder: Path, name: str, rows: Iterable[TextRow], bad_rows: BadRows) -> TextTable:
    """Copy texts into a folder, as a table; exact repetitions of a row are dropped.

    Args:
        name: texts of `documents` may be empty, as in some standard collections, `queries` not.
        rows: all texts, each with its place.
        bad_rows: collects empty queries, and texts with the id of a different earlier text.
    """
    known: dict[bytes, int] = {}  # hash of the text of each id
    starts, lengths = array("q", [0]), array("q")
    with (folder / f"{name}.jsonl").open("wb") as copy:
        for record, path, line in rows:
            rule, kind, key = "", name, _key(record.id)
            own = record._replace(id=_one_word(record.id))
            content = json.dumps(own, ensure_ascii=False).encode()
            if known.get(key) == hash(content):
                continue
            if key in known:
                kind = "repeated id"
                rule = "a row further up has this id; every id must be there once."
            elif name == "queries" and not record.text.strip():
                rule = "the query is empty; write what was asked, or take it out."
            if rule:
                bad_rows.add(BadRow(str(path), line, record.id, rule, kind))
                continue
            known[key] = hash(content)
            copy.write(content)
            starts.append(starts[-1] + len(content))
            lengths.append(len(record.title.encode()) + len(record.text.encode()))
    keys = np.frombuffer(b"".join(known), KEY)
    order = np.argsort(keys, kind="stable")
    arrays = {"starts": starts, "lengths": lengths, "keys": keys[order], "order": order}
    for kind, values in arrays.items():
        np.save(folder / f"{name}.{kind}.npy", np.asarray(values))
    return TextTable(folder, name)


class Collection:
    """An indexed collection, as made by `open_collection`; `has_titles` False hides the titles of
    documents."""

    def __init__(self, folder: Path, has_titles: bool = True) -> None:
        self.folder = folder
        self.facts = json.loads((folder / "facts.json").read_text("utf-8"))
        self.fingerprint: str = self.facts["fingerprint"] + "-untitled" * (not has_titles)
        self.documents = TextTable(folder, "documents", has_titles)
        self.queries = TextTable(folder, "queries")

    def without_leak(self) -> "Collection":
        """Return the collection for training and evaluation: if the queries are the documents'
        titles, the documents lack them."""
        return Collection(self.folder, has_titles=False) if self.facts["asks_titles"] else self

    def judgements(self, part: int) -> Judgements:
        """Return the judgements of one part: 0 train, 1 validation, 2 test."""
        query, document, grade = np.load(self.folder / f"{PART_NAMES[part]}.npy")
        return Judgements(query.astype(np.int64), document.astype(np.int64), grade.astype("f4"))


def open_collection(request: CollectionRequest, on_bad_rows: OnBadRows = "error") -> Collection:
    """Return the collection of a request, indexed into the cache at first use.

    Args:
        request: its files and options.
        on_bad_rows: `error` raises; `reject` leaves bad rows out and lists them in the folder.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: a file cannot be read at all, or rows break a rule.
    """
    format, reader = request.reader()
    files = reader.files()
    content: dict[str, Any] = {
        "version": READ_ANEW.get(format, COLLECTION_VERSION),
        "format": format,
        "files": {role: [file_digest(p) for p in paths] for role, paths in files.items()},
        "split": asdict(request.split),
        **request.cleaning.facts(),
    }
    if isinstance(reader, PagesReader):  # paths are ids, and titles of untitled pages
        content["names"] = [str(path.relative_to(reader.folder)) for path in reader.pages]
    fingerprint = digest_of(content)
    # Stored messages name the files, so equal files in another place need another folder.
    places = {role: [str(path) for path in paths] for role, paths in files.items()}
    folder = cache_folder("collections", [fingerprint, places, CACHE_VERSION])
    facts = {"fingerprint": fingerprint, "format": format}
    make = partial(_write, reader, request, facts, BadRows(on_bad_rows))
    return Collection(accepted(made_once(folder, make), on_bad_rows))


def _write(
    reader: Reader,
    request: CollectionRequest,
    facts: dict[str, Any],
    bad_rows: BadRows,
    folder: Path,
) -> None:
    """Fill a folder: copy texts; resolve judgements to numbers, check and split them."""
    split = request.split
    distinct = request.cleaning.distinct(reader.rows("documents", bad_rows), bad_rows)
    documents = write_texts(folder, "documents", distinct, bad_rows)
    queries = write_texts(folder, "queries", reader.rows("queries", bad_rows), bad_rows)
    for texts in (documents, queries):
        if not len(texts):
            refuse(bad_rows.rows)
            raise ValueError(
                f"the files hold no {texts.name}; check that they are those of the collection."
            )
    grades = _grades(reader.judgements(bad_rows), documents, queries, bad_rows)
    shares = split.without(grades)  # parts without files get training queries
    training = grades.get(TRAIN, {})
    numbers = sorted({query for query, _ in training})
    lots = shares.by_lot(queries[number].id for number in numbers)
    part_of = dict(zip(numbers, lots.tolist(), strict=True))
    for part, name in enumerate(PART_NAMES):
        own = grades.get(part, {}) if part != TRAIN else {}
        own |= {pair: grade for pair, grade in training.items() if part_of[pair[0]] == part}
        rows = [(*pair, grade) for pair, grade in sorted(own.items())]
        np.save(folder / f"{name}.npy", np.array(rows, np.float64).reshape(-1, 3).T)
    bad_rows.settle(folder)
    facts = {**facts, "asks_titles": not reader.files()["queries"]}
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


def _grades(
    rows: Iterator[JudgementRow], documents: TextTable, queries: TextTable, bad_rows: BadRows
) -> dict[int, dict[tuple[int, int], float]]:
    """Return part -> numbers of query and document -> grade. Unknown ids, invalid grades and
    contradictions of an earlier grade are bad rows."""
    grades: dict[int, dict[tuple[int, int], float]] = {}
    while some := list(islice(rows, JUDGEMENTS_AT_ONCE)):
        of_query = queries.indices_of([row.query for row in some]).tolist()
        of_document = documents.indices_of([row.document for row in some]).tolist()
        for row, query, document in zip(some, of_query, of_document, strict=True):
            try:
                grade = float(np.float32(float(row.grade)))
            except (TypeError, ValueError):
                grade = math.nan
            own = grades.setdefault(row.part, {})
            value, kind, rule = str(row.grade), "grade", ""
            if query < 0:
                value, kind = row.query, "unknown query"
                rule = f'no query has the id "{value}"; take the judgement out or add the query.'
            elif document < 0:
                value, kind = row.document, "unknown document"
                rule = f'no document has the id "{value}"; take the judgement out or add it.'
            elif not 0 <= grade < math.inf:
                rule = "a grade must be a number, 0 or more, higher for what is more relevant."
            elif (before := own.setdefault((query, document), grade)) != grade:
                kind = "contradiction"
                rule = (
                    f"query {row.query} and document {row.document} have the grade {before:g} "
                    "further up; decide on one."
                )
            if rule:
                bad_rows.add(BadRow(row.file, row.line, value, rule, kind))
    return grades
