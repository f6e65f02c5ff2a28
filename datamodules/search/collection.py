"""A collection: documents, queries and judgements, indexed once into the cache."""

import hashlib
import json
import math
import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped_array
from datamodules.demo import demo_collection
from datamodules.files.rows import BadRow, BadRows, OnBadRows, read_rejected
from datamodules.files.splitting import (
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    check_shares,
    keyed_hashes,
)
from datamodules.search.formats import (
    PAGE_SUFFIXES,
    READERS,
    CollectionFiles,
    JudgementRows,
    Reader,
    TextRecord,
    TextRow,
)

COLLECTION_VERSION = 5
Format = Literal["demo", "beir", "pages"]
SIGNS: dict[Format, tuple[str, ...]] = {  # files that tell a folder's format
    "beir": ("corpus.jsonl*",),
    "pages": tuple(f"**/*{suffix}" for suffix in PAGE_SUFFIXES),
}
KEY = "S16"  # hash of an id; two of 128 bits never meet by chance


@dataclass(frozen=True)
class QuerySplit:
    """How training queries are divided where a collection has no such part.

    The lot of a query depends on the seed and its id alone.

    Args:
        validation_share: of the training queries, where nothing names validation, 0 to 0.9.
        test_share: where nothing names a test; both together at most 0.9.
        seed: another seed draws another split.
    """

    validation_share: float = 0.1
    test_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_shares(self.validation_share, self.test_share)


@dataclass(frozen=True)
class CollectionRequest:
    """All that a collection depends on.

    Args:
        format: of the files; `None` finds it from the folder, and without a folder it is `demo`.
        folder: where they lie.
        files: those that lie elsewhere or have other names.
        split: how training queries are divided where a part is missing.
    """

    format: Format | None = None
    folder: str | None = None
    files: CollectionFiles = field(default_factory=CollectionFiles)
    split: QuerySplit = field(default_factory=QuerySplit)

    def __post_init__(self) -> None:
        is_demo = self.format == "demo" or (self.format is None and self.folder is None)
        if is_demo and (self.folder or any(asdict(self.files).values())):
            raise ValueError(
                "the demo reads no files, and data.collection.files or .folder names some; name "
                "the folder of the collection, and no format demo."
            )
        if not is_demo and not self.folder:
            raise ValueError(
                f'format "{self.format}" needs files; name their folder with '
                "data.collection.folder."
            )

    @property
    def layout(self) -> Format:
        """The format, which is found from the folder where it is not given.

        Raises:
            FileNotFoundError: the folder is not there.
            ValueError: nothing tells the format.
        """
        if self.format is not None or self.folder is None:
            return self.format or "demo"
        folder = Path(self.folder).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"data.collection.folder {folder} is no folder.")
        for layout, patterns in SIGNS.items():
            if any(any(folder.glob(pattern)) for pattern in patterns):
                return layout
        signs = "; ".join(f"{name}: {', '.join(patterns)}" for name, patterns in SIGNS.items())
        raise ValueError(
            f"data.collection.folder {folder} holds none of the files that tell a format "
            f"({signs}); name the folder that holds them."
        )

    def reader(self) -> Reader:
        """Return what reads these files.

        Raises:
            FileNotFoundError: a file or folder is not there.
            ValueError: a file cannot be assigned to a part.
        """
        if (layout := self.layout) == "demo":
            return READERS["beir"](demo_collection(cache_root()), self.files)
        return READERS[layout](Path(self.folder or "").expanduser(), self.files)


class CollectionDocument(NamedTuple):
    """One document; the title is "" where a format has none."""

    title: str
    text: str

    @property
    def whole(self) -> str:
        """The document as an encoder reads it: its title, and its text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


class Judgements(NamedTuple):
    """Grades of pairs, sorted by query and document, each pair once.

    Args:
        query: [J] int64, number of the query in the collection.
        document: [J] int64, number of the document.
        grade: [J] float32, 0 or more.
    """

    query: np.ndarray
    document: np.ndarray
    grade: np.ndarray


class TextTable:
    """Texts with ids, such as documents, in the order of the files, found by number and by id.

    Opening is cheap, pickling keeps only the place, and several processes may read at once.

    Args:
        folder: in which `write_texts` wrote it.

    Attributes:
        lengths: [n] int64, bytes of title and text in UTF-8.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.lengths, self._starts, self._keys, self._order = (
            mapped_array(folder / f"{name}.{kind}.npy")
            for kind in ("lengths", "starts", "keys", "order")
        )
        self._handle: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return TextTable, (self.folder, self.name)

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
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        return TextRecord(*json.loads(os.pread(self._handle, end - start, start)))

    def indices_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the number of each id, [n] int64; -1 where there is none."""
        if not len(self) or not len(ids):
            return np.full(len(ids), -1, np.int64)
        wanted = np.frombuffer(b"".join(map(_key, ids)), KEY)
        place = np.minimum(np.searchsorted(self._keys, wanted), len(self) - 1)
        return np.where(self._keys[place] == wanted, self._order[place], -1)

    def index_of(self, id: str) -> int:
        """Return the number of an id.

        Raises:
            KeyError: there is none.
        """
        index = int(self.indices_of([id])[0])
        if index < 0:
            raise KeyError(f'the collection\'s {self.name} have no id "{id}".')
        return index


def _key(id: str) -> bytes:
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=16).digest()


def write_texts(
    folder: Path, name: str, rows: Iterable[TextRow], bad_rows: BadRows, may_be_empty: bool = True
) -> TextTable:
    """Copy texts into a folder, as a table; every id must be there once.

    Args:
        rows: all texts, each with its place.
        bad_rows: takes texts that break a rule.
        may_be_empty: whether a text of no word is taken, as a document; the field's own files
            have some.
    """
    numbers: dict[bytes, int] = {}
    starts, lengths, lines, files = array("q", [0]), array("q"), array("q"), array("q")
    paths: dict[str, int] = {}
    with (folder / f"{name}.jsonl").open("wb") as copy:
        for record, path, line in rows:
            number = numbers.setdefault(_key(record.id), len(numbers))
            if number < len(lengths):
                before = f"{list(paths)[files[number]]}:{lines[number]}"
                rule = f"this id stands at {before} already; every id must be there once."
                bad_rows.add(BadRow(str(path), line, record.id, rule, "repeated id"))
                continue
            if not (may_be_empty or record.text.strip()):
                del numbers[_key(record.id)]
                rule = "the query is empty; write what was asked, or take it out."
                bad_rows.add(BadRow(str(path), line, record.id, rule, name))
                continue
            content = json.dumps(record, ensure_ascii=False).encode()
            copy.write(content)
            starts.append(starts[-1] + len(content))
            lengths.append(len(record.title.encode()) + len(record.text.encode()))
            lines.append(line)
            files.append(paths.setdefault(str(path), len(paths)))
    keys = np.frombuffer(b"".join(numbers), KEY)
    order = np.argsort(keys, kind="stable")
    arrays = {"starts": starts, "lengths": lengths, "keys": keys[order], "order": order}
    for kind, values in arrays.items():
        np.save(folder / f"{name}.{kind}.npy", np.asarray(values))
    return TextTable(folder, name)


class Collection:
    """A folder of an indexed collection, as `open_collection` makes it.

    Args:
        has_titles: whether documents are read with their titles.
    """

    def __init__(self, folder: Path, has_titles: bool = True) -> None:
        self.folder, self.has_titles = folder, has_titles
        self.facts = json.loads((folder / "facts.json").read_text("utf-8"))
        self.fingerprint: str = self.facts["fingerprint"] + "-untitled" * (not has_titles)
        self.documents = TextTable(folder, "documents")
        self.queries = TextTable(folder, "queries")
        self.num_documents, self.num_queries = len(self.documents), len(self.queries)
        self.document_lengths, self.query_lengths = self.documents.lengths, self.queries.lengths
        self.document_index, self.query_index = self.documents.index_of, self.queries.index_of

    def without_leak(self) -> "Collection":
        """Return the collection as training and evaluation may see it: where the queries are the
        titles of the documents, without these."""
        if not (self.has_titles and self.facts["asks_titles"]):
            return self
        return Collection(self.folder, has_titles=False)

    def document(self, index: int) -> CollectionDocument:
        """Return a document by its number."""
        record = self.documents[index]
        return CollectionDocument(record.title if self.has_titles else "", record.text)

    def address(self, index: int) -> str:
        """Return where a document is to be found: its address on the web, else its id."""
        record = self.documents[index]
        return record.address or record.id

    def document_text(self, index: int) -> str:
        """Return a document as an encoder reads it: its title, and its text."""
        return self.document(index).whole

    def query(self, index: int) -> str:
        """Return a query by its number."""
        return self.queries[index].text

    def document_id(self, index: int) -> str:
        """Return the id of a document."""
        return self.documents[index].id

    def query_id(self, index: int) -> str:
        """Return the id of a query."""
        return self.queries[index].id

    def judgements(self, part: int) -> Judgements:
        """Return the judgements of one part: 0 train, 1 validation, 2 test."""
        query, document, grade = np.load(self.folder / f"{PART_NAMES[part]}.npy")
        return Judgements(*(query.astype(np.int64), document.astype(np.int64), grade.astype("f4")))

    @cached_property
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
    refused, reader, root = BadRows(on_bad_rows), request.reader(), cache_root()
    files = reader.files()
    fingerprint = digest_of(
        {
            "version": COLLECTION_VERSION,
            "format": request.layout,
            "files": {role: [file_digest(p, root) for p in paths] for role, paths in files.items()},
            "split": asdict(request.split),
        }
    )
    # Messages name the files, so that the same ones elsewhere are another folder.
    places = {role: [str(path.resolve()) for path in paths] for role, paths in files.items()}
    home = str(Path(request.folder).resolve()) if request.folder else None  # ids of pages are in it
    folder = root / "collections" / digest_of([fingerprint, places, home])
    facts = {"fingerprint": fingerprint, "format": request.layout}
    made_once(folder, lambda unfinished: _write(unfinished, reader, request.split, facts))
    collection = Collection(folder)
    if refused.mode == "error" and collection.bad_rows:
        for row in collection.bad_rows:
            refused.add(row)
        raise ValueError(refused.message())
    return collection


def _write(folder: Path, reader: Reader, split: QuerySplit, facts: dict[str, Any]) -> None:
    """Fill a folder: texts are copied, judgements resolved to numbers, checked and divided."""
    bad_rows = BadRows("reject")
    documents, queries = (
        write_texts(folder, name, reader.rows(name, bad_rows), bad_rows, name == "documents")
        for name in ("documents", "queries")
    )
    for table in (documents, queries):
        if not len(table):
            empty = f"the files hold no {table.name}; check that they are those of the collection."
            raise ValueError(bad_rows.message() if bad_rows.count else empty)
    files: dict[str, int] = {}
    columns: list[list[np.ndarray]] = [[] for _ in PART_NAMES]
    for rows in reader.judgements(bad_rows):
        if rows.lines:
            file = files.setdefault(rows.file, len(files))
            columns[rows.part].append(_resolved(rows, file, documents, queries, bad_rows))
    is_missing = [not blocks for blocks in columns]
    parts = [np.concatenate([np.zeros((5, 0)), *blocks], axis=1) for blocks in columns]
    parts = [_unique(part, list(files), documents, queries, bad_rows) for part in parts]
    for name, part in zip(PART_NAMES, _divided(parts, is_missing, queries, split), strict=True):
        np.save(folder / f"{name}.npy", part)
    bad_rows.settle(folder)
    facts = {**facts, "asks_titles": not reader.files()["queries"]}
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


def _resolved(
    rows: JudgementRows, file: int, documents: TextTable, queries: TextTable, bad_rows: BadRows
) -> np.ndarray:
    """Return query, document, grade, line and file, [5, n] float64, which holds any number of
    them; what is unknown or wrong is a bad row."""
    query, document = queries.indices_of(rows.queries), documents.indices_of(rows.documents)
    grade = np.fromiter(map(_grade, rows.grades), np.float64, len(rows.grades))
    is_sound = (query >= 0) & (document >= 0) & ~np.isnan(grade)
    for i in np.flatnonzero(~is_sound).tolist():
        value, kind = str(rows.grades[i]), "grade"
        rule = "a grade must be a number, 0 or more, higher for what is more relevant."
        for name, ids, numbers in (
            ("document", rows.documents, document),
            ("query", rows.queries, query),
        ):
            if numbers[i] < 0:
                value, kind = ids[i], f"unknown {name}"
                rule = f'no {name} has the id "{value}"; take the judgement out or add the {name}.'
        bad_rows.add(BadRow(rows.file, rows.lines[i], value, rule, kind))
    values = (query, document, grade.astype(np.float32), rows.lines, np.full(len(grade), file))
    return np.stack([np.asarray(value, np.float64) for value in values])[:, is_sound]


def _grade(value: Any) -> float:
    """Return a grade as a number, NaN where it is none."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return math.nan
    return number if 0 <= number < math.inf else math.nan


def _unique(
    rows: np.ndarray, files: list[str], documents: TextTable, queries: TextTable, bad_rows: BadRows
) -> np.ndarray:
    """Return query, document and grade, [3, n], sorted, each pair once; a pair with two grades is
    a bad row."""
    rows = rows[:, np.lexsort((rows[1], rows[0]))]  # stable: the order of the files
    is_first = np.ones(rows.shape[1], bool)
    is_first[1:] = (rows[:2, 1:] != rows[:2, :-1]).any(0)
    first = np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))
    for i in np.flatnonzero(rows[2] != rows[2, first]).tolist():
        query, document, before, before_line, before_file = rows[:, first[i]].tolist()
        grade, line, file = rows[2:, i].tolist()
        rule = (
            f"query {queries[int(query)].id} and document {documents[int(document)].id} have the "
            f"grade {before:g} at {files[int(before_file)]}:{int(before_line)}; decide on one."
        )
        bad_rows.add(BadRow(files[int(file)], int(line), f"{grade:g}", rule, "contradiction"))
    return rows[:3, is_first]


def _divided(
    parts: list[np.ndarray], is_missing: list[bool], queries: TextTable, split: QuerySplit
) -> list[np.ndarray]:
    """Move drawn training queries, each by its lot, to the parts that no file names."""
    numbers, place = np.unique(parts[TRAIN][0], return_inverse=True)
    lots = (keyed_hashes((queries[int(n)].id for n in numbers), split.seed) / 2.0**64)[place]
    test_share = split.test_share if is_missing[TEST] else 0.0
    validation_share = split.validation_share if is_missing[VALIDATION] else 0.0
    part_of = np.where(lots < test_share + validation_share, VALIDATION, TRAIN)
    part_of = np.where(lots < test_share, TEST, part_of)
    return [
        parts[TRAIN][:, part_of == part] if part == TRAIN or is_missing[part] else own
        for part, own in enumerate(parts)
    ]
