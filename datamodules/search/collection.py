"""A collection: documents, queries and judgements, indexed once into the cache."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.rows import BadRow, BadRows, OnBadRows, read_rejected
from datamodules.files.splitting import (
    MAX_SHARE,
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    keyed_hashes,
)
from datamodules.search.demo import demo_collection
from datamodules.search.formats import (
    LAYOUTS,
    PAGE_SUFFIXES,
    CollectionFiles,
    JudgementRows,
    LinesReader,
    PagesReader,
)
from datamodules.search.texts import TextTable, TextTableWriter

COLLECTION_VERSION = 4
Format = Literal["demo", "beir", "msmarco", "pages"]
SIGNS: dict[Format, tuple[str, ...]] = {  # files that tell a folder's format
    "beir": ("corpus.jsonl*",),
    "msmarco": ("collection.tsv*", "qrels*.tsv", "queries*.tsv"),
    "pages": tuple(f"**/*{suffix}" for suffix in PAGE_SUFFIXES),
}


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
        for name in ("validation_share", "test_share"):
            if not 0 <= getattr(self, name) <= MAX_SHARE:
                raise ValueError(f"{name} must be 0 to {MAX_SHARE}, got {getattr(self, name)}.")
        if self.validation_share + self.test_share > MAX_SHARE:
            raise ValueError(
                f"validation_share + test_share must be at most {MAX_SHARE}, got "
                f"{self.validation_share + self.test_share:g}: too little is left for training."
            )


@dataclass(frozen=True)
class CollectionRequest:
    """All that a collection depends on.

    Args:
        format: of the files; None finds it from the folder, and without files it is `demo`.
        folder: where they lie.
        files: those that lie elsewhere or have other names.
        split: how training queries are divided where a part is missing.
    """

    format: Format | None = None
    folder: str | None = None
    files: CollectionFiles = field(default_factory=CollectionFiles)
    split: QuerySplit = field(default_factory=QuerySplit)

    def __post_init__(self) -> None:
        names = get_args(Format)
        if self.format is not None and self.format not in names:
            raise ValueError(f'format must be one of {", ".join(names)}, got "{self.format}".')
        has_files = bool(self.folder) or any(asdict(self.files).values())
        if self.format == "demo" and has_files:
            raise ValueError(
                'format "demo" reads no files, and some are named; leave the format out, or say '
                f"how they are laid out: {', '.join(names[1:])}."
            )
        if self.format not in (None, "demo") and not has_files:
            raise ValueError(
                f'format "{self.format}" needs files; name their folder with '
                "data.collection.folder, or each with data.collection.files."
            )

    @property
    def layout(self) -> Format:
        """The format, which is found from the folder where it is not given.

        Raises:
            FileNotFoundError: the folder is not there.
            ValueError: nothing tells the format.
        """
        if self.format is not None:
            return self.format
        if self.folder is None:
            documents = self.files.documents
            if not any(asdict(self.files).values()):
                return "demo"
            first = documents[0] if isinstance(documents, list) and documents else documents
            return "msmarco" if str(first).endswith(".tsv") else "beir"
        folder = Path(self.folder).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"data.collection.folder {folder} is no folder; name that of the collection."
            )
        for layout, patterns in SIGNS.items():
            if any(any(folder.glob(pattern)) for pattern in patterns):
                return layout
        signs = "; ".join(f"{name}: {', '.join(patterns)}" for name, patterns in SIGNS.items())
        raise ValueError(
            f"data.collection.folder {folder} holds none of the files that tell a format "
            f"({signs}); check the folder, or give data.collection.format and "
            "data.collection.files."
        )

    def reader(self) -> LinesReader | PagesReader:
        """Return what reads these files.

        Raises:
            FileNotFoundError: a file or folder is not there.
            ValueError: a file cannot be assigned to a part.
        """
        layout = self.layout
        if layout == "pages":
            return PagesReader(self.folder, self.files)
        if layout == "demo":
            return LinesReader(LAYOUTS["beir"], str(demo_collection(cache_root())), self.files)
        return LinesReader(LAYOUTS[layout], self.folder, self.files)


class Document(NamedTuple):
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


class Collection:
    """A folder of an indexed collection, as `open_collection` makes it.

    Args:
        folder: of the index.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = json.loads((folder / "facts.json").read_text("utf-8"))
        self.fingerprint: str = self.facts["fingerprint"]
        self.documents = TextTable(folder, "documents", self.facts["documents"]["files"])
        self.queries = TextTable(folder, "queries", self.facts["queries"]["files"])
        self.num_documents, self.num_queries = len(self.documents), len(self.queries)
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
        return self.documents.lengths

    @property
    def query_lengths(self) -> np.ndarray:
        """[queries] int64, bytes in UTF-8."""
        return self.queries.lengths

    def document(self, index: int) -> Document:
        """Return a document by its number."""
        record = self.documents[index]
        return Document(record.title if self.has_titles else "", record.text)

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

    def document_index(self, id: str) -> int:
        """Return the number of a document; KeyError where there is none."""
        return self.documents.index_of(id)

    def query_index(self, id: str) -> int:
        """Return the number of a query; KeyError where there is none."""
        return self.queries.index_of(id)

    def judgements(self, part: int) -> Judgements:
        """Return the judgements of one part: 0 train, 1 validation, 2 test."""
        path = f"{self.folder}/{PART_NAMES[part]}"
        return Judgements(*(np.load(f"{path}.{name}.npy") for name in Judgements._fields))

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
    folder = root / "collections" / digest_of([fingerprint, places])
    writer = _CollectionWriter(request, reader, fingerprint)
    collection = Collection(made_once(folder, writer.write))
    if collection.facts["num_bad_rows"] and refused.mode == "error":
        for row in collection.bad_rows:
            refused.add(row)
        raise ValueError(refused.message())
    return collection


class _CollectionWriter:
    """Fills a folder: texts are copied, judgements resolved to numbers, checked and divided.

    Args:
        request: of the collection.
        reader: of its files.
        fingerprint: of its content.
    """

    def __init__(
        self, request: CollectionRequest, reader: LinesReader | PagesReader, fingerprint: str
    ) -> None:
        self.request, self.reader, self.fingerprint = request, reader, fingerprint
        self.bad_rows = BadRows("reject")
        self.num_merged, self.num_fractional = 0, 0
        self.files: dict[str, int] = {}

    def write(self, folder: Path) -> None:
        """Fill the folder.

        Raises:
            ValueError: a file cannot be read at all, or no row of it is sound.
        """
        documents = TextTableWriter(folder, "documents", self.bad_rows)
        queries = TextTableWriter(folder, "queries", self.bad_rows, are_queries=True)
        try:
            self.reader.add_documents(documents)
            self.reader.add_queries(queries)
        finally:
            self.documents, self.queries = documents.finish(), queries.finish()
        for table in (self.documents, self.queries):
            if not len(table) and self.bad_rows.count:
                raise ValueError(self.bad_rows.message())
            if not len(table):
                raise ValueError(
                    f"the files hold no {table.name}; check that they are those of the collection."
                )
        columns: list[list[np.ndarray]] = [[] for _ in PART_NAMES]
        for rows in self.reader.judgements(self.bad_rows):
            if rows.lines:
                columns[rows.part].append(self._resolved(rows))
        is_missing = [not blocks for blocks in columns]
        parts = [self._unique(np.concatenate([np.zeros((5, 0)), *b], axis=1)) for b in columns]
        for part, (query, document, grade) in enumerate(self._divided(parts, is_missing)):
            np.save(folder / f"{PART_NAMES[part]}.query.npy", query.astype(np.int64))
            np.save(folder / f"{PART_NAMES[part]}.document.npy", document.astype(np.int64))
            np.save(folder / f"{PART_NAMES[part]}.grade.npy", grade.astype(np.float32))
        self.bad_rows.settle(folder)
        facts: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "format": self.request.layout,
            "documents": {"files": self.documents.files},
            "queries": {"files": self.queries.files, "num_merged": queries.num_merged},
            "num_bad_rows": self.bad_rows.count,
            "num_merged_judgements": self.num_merged,
            "num_fractional_grades": self.num_fractional,
        }
        (folder / "facts.json").write_text(json.dumps(facts), "utf-8")

    def _resolved(self, rows: JudgementRows) -> np.ndarray:
        """Return query, document, grade, line and file, [5, n] float64, which holds any number of
        them; what is unknown or wrong is a bad row."""
        query = self.queries.indices_of(rows.queries)
        document = self.documents.indices_of(rows.documents)
        grade = np.fromiter(map(_grade, rows.grades), np.float64, len(rows.grades))
        is_sound = (query >= 0) & (document >= 0) & ~np.isnan(grade)
        for i in np.flatnonzero(~is_sound).tolist():
            value, kind = str(rows.grades[i]), "grade"
            rule = "a grade must be a number, 0 or more, higher for what is more relevant."
            for name, ids, found in (
                ("document", rows.documents, document),
                ("query", rows.queries, query),
            ):
                if found[i] < 0:
                    value, kind = ids[i], f"unknown {name}"
                    rule = f'no {name} has the id "{value}"; take the judgement out or add the '
                    rule += f"{name}."
            self.bad_rows.add(BadRow(rows.file, rows.lines[i], value, rule, kind))
        self.num_fractional += int((grade[is_sound] % 1 != 0).sum())
        file = np.full(len(grade), self.files.setdefault(rows.file, len(self.files)))
        values = (query, document, grade.astype(np.float32), np.asarray(rows.lines), file)
        return np.stack([np.asarray(value, np.float64) for value in values])[:, is_sound]

    def _unique(self, rows: np.ndarray) -> np.ndarray:
        """Return query, document and grade, [3, n], sorted, and pairs with one grade merged;
        contradictions are bad rows."""
        rows = rows[:, np.lexsort((rows[1], rows[0]))]  # stable: the order of the files
        is_first = np.ones(rows.shape[1], bool)
        is_first[1:] = (rows[:2, 1:] != rows[:2, :-1]).any(0)
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))
        differs = rows[2] != rows[2, first]
        self.num_merged += int((~is_first & ~differs).sum())
        names = list(self.files)
        for i in np.flatnonzero(differs).tolist():
            query, document, before, before_line, before_file = rows[:, first[i]].tolist()
            grade, line, file = rows[2:, i].tolist()
            rule = (
                f"query {self.queries[int(query)].id} and document "
                f"{self.documents[int(document)].id} have the grade {before:g} at "
                f"{names[int(before_file)]}:{int(before_line)}; decide on one of the two."
            )
            self.bad_rows.add(
                BadRow(names[int(file)], int(line), f"{grade:g}", rule, "contradiction")
            )
        return rows[:3, is_first]

    def _divided(self, parts: list[np.ndarray], is_missing: list[bool]) -> list[np.ndarray]:
        """Move drawn training queries, each by its lot, to the parts that no file names."""
        split, train = self.request.split, parts[TRAIN]
        queries, place = np.unique(train[0], return_inverse=True)
        if not len(queries):
            return parts
        ids = (self.queries[int(query)].id for query in queries)
        lots = (keyed_hashes(ids, split.seed) / 2.0**64)[place]
        test_share = split.test_share if is_missing[TEST] else 0.0
        validation_share = split.validation_share if is_missing[VALIDATION] else 0.0
        part_of = np.where(lots < test_share + validation_share, VALIDATION, TRAIN)
        part_of = np.where(lots < test_share, TEST, part_of)
        return [
            train[:, part_of == part] if part == TRAIN or is_missing[part] else parts[part]
            for part in range(len(PART_NAMES))
        ]


def _grade(value: str | float) -> float:
    """Return a grade as a number, NaN where it is none."""
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number if 0 <= number < math.inf else math.nan
