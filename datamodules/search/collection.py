"""A collection: documents, queries and judgements, indexed once into the cache."""

import hashlib
import json
import math
import os
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from datamodules.core.store import cache_folder, digest_of, file_digest, made_once, mapped_array
from datamodules.demo import demo_collection
from datamodules.files.rows import BadRow, BadRows, OnBadRows, read_rejected, refuse
from datamodules.files.splitting import (
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    Split,
)
from datamodules.search.formats import (
    PAGE_SUFFIXES,
    BeirReader,
    CollectionFiles,
    JudgementRow,
    PagesReader,
    Reader,
    TextRecord,
    TextRow,
)

COLLECTION_VERSION = 5
JUDGEMENTS_AT_ONCE = 65_536
Format = Literal["demo", "beir", "pages"]
KEY = "S16"  # hash of an id; two of 128 bits never meet by chance


@dataclass(frozen=True)
class CollectionRequest:
    """All that a collection depends on.

    Args:
        folder: where the files lie; `None` is the demo.
        files: those that lie elsewhere or have other names.
        split: how training queries are divided where a part is missing.
        format: of the files; `None` finds it from the folder.
    """

    folder: str | None = None
    files: CollectionFiles = field(default_factory=CollectionFiles)
    split: Split = Split()  # noqa: RUF009 - frozen
    format: Format | None = None

    def __post_init__(self) -> None:
        has_files = self.folder is not None or self.files != CollectionFiles()
        if self.format == "demo" and has_files:
            raise ValueError("data.collection.format demo reads no files; leave it out.")
        if self.folder is None and (has_files or self.format not in (None, "demo")):
            raise ValueError("data.collection.folder is missing; name that of the documents.")

    @property
    def layout(self) -> Format:
        """The format, by the files of the folder where it is not given.

        Raises:
            FileNotFoundError: the folder is not there.
            ValueError: no file tells the format.
        """
        if self.folder is None:
            return "demo"
        folder = Path(self.folder).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"data.collection.folder {folder} is no folder.")
        if self.format is not None:
            return self.format
        if any(folder.glob("corpus.jsonl*")):
            return "beir"
        if any(any(folder.glob(f"**/*{suffix}")) for suffix in PAGE_SUFFIXES):
            return "pages"
        raise ValueError(
            f"data.collection.folder {folder} holds none of the files that tell a format "
            f"(corpus.jsonl of BEIR, or pages: {', '.join(PAGE_SUFFIXES)}); name the folder that "
            "holds them."
        )

    def reader(self) -> Reader:
        """Return the reader of these files.

        Raises:
            FileNotFoundError: a file or folder is not there.
            ValueError: a file cannot be assigned to a part.
        """
        if (layout := self.layout) == "demo":
            return BeirReader(demo_collection(), self.files)
        make = BeirReader if layout == "beir" else PagesReader
        return make(Path(self.folder or "").expanduser(), self.files)


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
        has_titles: whether texts are read with their titles.

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
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} texts, there is no number {index}.")
        if self._handle is None:  # read, not mapped: the pages of a large file would count as ours
            self._handle = os.open(self.folder / f"{self.name}.jsonl", os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
        start, end = int(self._starts[index]), int(self._starts[index + 1])
        record = TextRecord(*json.loads(os.pread(self._handle, end - start, start)))
        return record if self.has_titles else record._replace(title="")

    def indices_of(self, ids: Sequence[str]) -> np.ndarray:
        """Return the number of each id, [n] int64; -1 where there is none."""
        if not len(self) or not len(ids):
            return np.full(len(ids), -1, np.int64)
        wanted = np.frombuffer(b"".join(map(_key, ids)), KEY)
        place = np.minimum(np.searchsorted(self._keys, wanted), len(self) - 1)
        return np.where(self._keys[place] == wanted, self._order[place], -1)


def _key(id: str) -> bytes:
    return hashlib.blake2b(id.encode(errors="replace"), digest_size=16).digest()


def write_texts(folder: Path, name: str, rows: Iterable[TextRow], bad_rows: BadRows) -> TextTable:
    """Copy texts into a folder, as a table.

    Args:
        name: `documents` may be empty, as some of the field's own files are; `queries` may not.
        rows: all texts, each with its place.
        bad_rows: takes empty queries, and texts whose id an earlier one has.
    """
    numbers: dict[bytes, int] = {}
    starts, lengths, lines, files = array("q", [0]), array("q"), array("q"), array("q")
    paths: dict[str, int] = {}
    with (folder / f"{name}.jsonl").open("wb") as copy:
        for record, path, line in rows:
            key = _key(record.id)
            if (number := numbers.get(key)) is not None:
                before = f"{list(paths)[files[number]]}:{lines[number]}"
                rule = f"this id stands at {before} already; every id must be there once."
                bad_rows.add(BadRow(str(path), line, record.id, rule, "repeated id"))
                continue
            if name == "queries" and not record.text.strip():
                rule = "the query is empty; write what was asked, or take it out."
                bad_rows.add(BadRow(str(path), line, record.id, rule, name))
                continue
            numbers[key] = len(numbers)
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
        self.documents = TextTable(folder, "documents", has_titles)
        self.queries = TextTable(folder, "queries")

    def without_leak(self) -> "Collection":
        """Return the collection as training and evaluation may see it: where the queries are the
        titles of the documents, without these."""
        return Collection(self.folder, has_titles=False) if self.facts["asks_titles"] else self

    def judgements(self, part: int) -> Judgements:
        """Return the judgements of one part: 0 train, 1 validation, 2 test."""
        query, document, grade = np.load(self.folder / f"{PART_NAMES[part]}.npy")
        return Judgements(query.astype(np.int64), document.astype(np.int64), grade.astype("f4"))

    @cached_property
    def bad_rows(self) -> list[BadRow]:
        """The rows that are left out because they break a rule."""
        return read_rejected(self.folder)


def open_collection(request: CollectionRequest, on_bad_rows: OnBadRows = "error") -> Collection:
    """Return the collection of a request, indexed into the cache at first use.

    Args:
        request: its files and options.
        on_bad_rows: `error` names the first; `reject` leaves them out, listed in the folder.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file cannot be read at all, or rows break a rule.
    """
    reader = request.reader()
    files = reader.files()
    fingerprint = digest_of(
        {
            "version": COLLECTION_VERSION,
            "format": request.layout,
            "files": {role: [file_digest(p) for p in paths] for role, paths in files.items()},
            "split": asdict(request.split),
        }
    )
    # Messages name the files, so that the same ones elsewhere are another folder.
    places = {role: [str(path.resolve()) for path in paths] for role, paths in files.items()}
    home = str(Path(request.folder).resolve()) if request.folder else None  # ids of pages are in it
    folder = cache_folder("collections", [fingerprint, places, home])
    facts = {"fingerprint": fingerprint, "format": request.layout}
    made_once(folder, lambda unfinished: _write(unfinished, reader, request.split, facts))
    collection = Collection(folder)
    refuse(collection.bad_rows, on_bad_rows)
    return collection


def _write(folder: Path, reader: Reader, split: Split, facts: dict[str, Any]) -> None:
    """Fill a folder: texts are copied, judgements resolved to numbers, checked and divided."""
    bad_rows = BadRows("reject")
    documents, queries = (
        write_texts(folder, name, reader.rows(name, bad_rows), bad_rows)
        for name in ("documents", "queries")
    )
    for texts in (documents, queries):
        if not len(texts):
            refuse(bad_rows.rows)
            raise ValueError(
                f"the files hold no {texts.name}; check that they are those of the collection."
            )
    files: dict[str, int] = {}
    blocks, known_parts = [np.zeros((6, 0))], set[int]()
    rows = reader.judgements(bad_rows)
    while some := list(islice(rows, JUDGEMENTS_AT_ONCE)):
        known_parts.update(row.part for row in some)
        blocks.append(_resolved(some, files, documents, queries, bad_rows))
    table = np.concatenate(blocks, axis=1)
    parts = []
    for part in (TRAIN, VALIDATION, TEST):
        own = table[1:, table[0] == part]
        parts.append(_unique(own, list(files), documents, queries, bad_rows))
    # Drawn training queries, each by its lot, are moved to the parts that no file names.
    numbers, place = np.unique(parts[TRAIN][0], return_inverse=True)
    part_of = split.without(known_parts).by_lot(queries[int(n)].id for n in numbers)[place]
    for part, name in enumerate(PART_NAMES):
        is_drawn = part == TRAIN or part not in known_parts
        own = parts[TRAIN][:, part_of == part] if is_drawn else parts[part]
        np.save(folder / f"{name}.npy", own)
    bad_rows.settle(folder)
    facts = {**facts, "asks_titles": not reader.files()["queries"]}
    (folder / "facts.json").write_text(json.dumps(facts), "utf-8")


def _resolved(
    rows: Sequence[JudgementRow],
    files: dict[str, int],
    documents: TextTable,
    queries: TextTable,
    bad_rows: BadRows,
) -> np.ndarray:
    """Return part, query, document, grade, line and file of sound judgements, [6, n] float64, which
    holds any number of them; what is unknown or wrong is a bad row."""
    query = queries.indices_of([row.query for row in rows])
    document = documents.indices_of([row.document for row in rows])
    grade = np.array([_grade(row.grade) for row in rows])
    is_sound = (query >= 0) & (document >= 0) & ~np.isnan(grade)
    for i in np.flatnonzero(~is_sound).tolist():
        row, value, kind = rows[i], str(rows[i].grade), "grade"
        rule = "a grade must be a number, 0 or more, higher for what is more relevant."
        for name, id, number in (("document", row.document, document), ("query", row.query, query)):
            if number[i] < 0:
                value, kind = id, f"unknown {name}"
                rule = f'no {name} has the id "{value}"; take the judgement out or add the {name}.'
        bad_rows.add(BadRow(row.file, row.line, value, rule, kind))
    file = [files.setdefault(row.file, len(files)) for row in rows]
    part, line = [row.part for row in rows], [row.line for row in rows]
    columns = (part, query, document, grade.astype(np.float32), line, file)
    return np.stack([np.asarray(column, np.float64) for column in columns])[:, is_sound]


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
