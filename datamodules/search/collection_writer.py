"""Makes collections: texts are indexed, judgements resolved to numbers, checked and divided."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from datamodules.files.rows import BadRow, BadRows
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, keyed_hashes
from datamodules.search.request import CollectionRequest, QuerySplit
from datamodules.search.text_writer import TextTableWriter
from datamodules.search.texts import TextTable


class JudgementRows(NamedTuple):
    """Some judgements of one file and part, as ids, and grades as text or numbers."""

    part: int
    file: str
    lines: Sequence[int]
    queries: Sequence[str]
    documents: Sequence[str]
    grades: Sequence[str | float]


class CollectionReader(Protocol):
    """Reads the files of one format."""

    def files(self) -> dict[str, list[Path]]:
        """Return all files by their role; all are part of the fingerprint."""

    def index_documents(self, table: TextTableWriter) -> None:
        """Hand over every document."""

    def index_queries(self, table: TextTableWriter) -> None:
        """Hand over every query."""

    def judgements(self, bad_rows: BadRows) -> Iterator[JudgementRows]:
        """Yield every judgement that can be cut into its values."""

    def write_triples(
        self, path: Path, queries: TextTable, documents: TextTable, bad_rows: BadRows
    ) -> int:
        """Write [n, 3] int32 of query, positive, negative; return n, 0 where there are none."""


@dataclass
class _Part:
    """Judgements of one part as numbers, in the order of the files."""

    query: list[np.ndarray] = field(default_factory=list)
    document: list[np.ndarray] = field(default_factory=list)
    grade: list[np.ndarray] = field(default_factory=list)
    line: list[np.ndarray] = field(default_factory=list)
    file: list[np.ndarray] = field(default_factory=list)

    def joined(self) -> dict[str, np.ndarray]:
        kinds = {
            "query": np.int64,
            "document": np.int64,
            "grade": np.float32,
            "line": np.int64,
            "file": np.int32,
        }
        return {k: np.concatenate([np.zeros(0, t), *getattr(self, k)]) for k, t in kinds.items()}


class CollectionWriter:
    """Fills a folder with a collection.

    Args:
        request: what it is made of.
        reader: the one of the request.
        fingerprint: of its content.
    """

    def __init__(
        self, request: CollectionRequest, reader: CollectionReader, fingerprint: str
    ) -> None:
        self.request, self.reader, self.fingerprint = request, reader, fingerprint
        self.bad_rows = BadRows("reject")
        self.parts = [_Part() for _ in PART_NAMES]
        self.files: list[str] = []
        self.counts = {"num_merged_judgements": 0, "num_fractional_grades": 0}

    def write(self, folder: Path, final_folder: Path) -> None:
        """Fill the folder, which will be moved to its final place.

        Raises:
            ValueError: a file cannot be read at all, or no row of it is sound.
        """
        self.folder = folder
        with (
            TextTableWriter(folder, "documents", self.bad_rows) as documents,
            TextTableWriter(folder, "queries", self.bad_rows, are_queries=True) as queries,
        ):
            self.reader.index_documents(documents)
            self.reader.index_queries(queries)
            self.documents = documents.finish(final_folder)
            self.queries = queries.finish(final_folder)
        for table in (self.documents, self.queries):
            if not table.count:
                raise ValueError(self._nothing(table.name))
        for rows in self.reader.judgements(self.bad_rows):
            self._take(rows)
        for part, arrays in enumerate(self._divided([self._unique(part) for part in self.parts])):
            for name in ("query", "document", "grade"):
                np.save(folder / f"{PART_NAMES[part]}.{name}.npy", arrays[name])
        num_triples = self.reader.write_triples(
            folder / "triples.bin", self.queries, self.documents, self.bad_rows
        )
        self.bad_rows.settle(folder)
        facts: dict[str, Any] = {
            "fingerprint": self.fingerprint,
            "format": self.request.layout,
            "documents": documents.facts,
            "queries": queries.facts,
            "num_triples": num_triples,
            "num_bad_rows": self.bad_rows.count,
            **self.counts,
        }
        (folder / "facts.json").write_text(json.dumps(facts), "utf-8")

    def _nothing(self, name: str) -> str:
        if self.bad_rows.count:
            return self.bad_rows.message()
        return f"the files hold no {name}; check that they are those of the collection."

    def _take(self, rows: JudgementRows) -> None:
        """Resolve ids and grades; what is unknown or wrong is a bad row."""
        query = self.queries.indices_of(rows.queries)
        document = self.documents.indices_of(rows.documents)
        grade = np.fromiter(map(_grade, rows.grades), np.float64, len(rows.grades))
        if rows.file not in self.files:
            self.files.append(rows.file)
        is_sound = (query >= 0) & (document >= 0) & ~np.isnan(grade)
        for i in np.flatnonzero(~is_sound).tolist():
            self._refuse(rows, i, query[i] < 0, document[i] < 0)
        self.counts["num_fractional_grades"] += int((grade[is_sound] % 1 != 0).sum())
        part = self.parts[rows.part]
        part.query.append(query[is_sound])
        part.document.append(document[is_sound])
        part.grade.append(grade[is_sound].astype(np.float32))
        part.line.append(np.asarray(rows.lines, np.int64)[is_sound])
        number = self.files.index(rows.file)
        part.file.append(np.full(int(is_sound.sum()), number, np.int32))

    def _refuse(self, rows: JudgementRows, i: int, no_query: bool, no_document: bool) -> None:
        if no_query:
            value = rows.queries[i]
            rule = f'no query has the id "{value}"; take the judgement out or add the query.'
            kind = "unknown query"
        elif no_document:
            value = rows.documents[i]
            rule = f'no document has the id "{value}"; take the judgement out or add the document.'
            kind = "unknown document"
        else:
            value, kind = str(rows.grades[i]), "grade"
            rule = "a grade must be a number, 0 or more, higher for what is more relevant."
        self.bad_rows.add(BadRow(rows.file, rows.lines[i], value, rule, kind))

    def _unique(self, part: _Part) -> dict[str, np.ndarray]:
        """Sort by query and document, merge what is said twice; contradictions are bad rows."""
        arrays = part.joined()
        order = np.lexsort((arrays["document"], arrays["query"]))  # stable: the files' order
        arrays = {name: values[order] for name, values in arrays.items()}
        query, document = arrays["query"], arrays["document"]
        is_first = np.ones(len(query), bool)
        is_first[1:] = (query[1:] != query[:-1]) | (document[1:] != document[:-1])
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(query)), 0))
        differs = arrays["grade"] != arrays["grade"][first]
        self.counts["num_merged_judgements"] += int((~is_first & ~differs).sum())
        for i in np.flatnonzero(differs).tolist():
            self._contradict(arrays, i, int(first[i]))
        return {name: values[is_first] for name, values in arrays.items()}

    def _contradict(self, arrays: dict[str, np.ndarray], i: int, first: int) -> None:
        pair = (
            f"query {self.queries.record(int(arrays['query'][i])).id} and document "
            f"{self.documents.record(int(arrays['document'][i])).id}"
        )
        before = f"{self.files[arrays['file'][first]]}:{arrays['line'][first]}"
        rule = (
            f"{pair} have the grade {arrays['grade'][first]:g} at {before}; decide on one of the "
            "two."
        )
        place = self.files[arrays["file"][i]], int(arrays["line"][i])
        value = f"{arrays['grade'][i]:g}"
        self.bad_rows.add(BadRow(*place, value, rule, "contradiction"))

    def _divided(self, parts: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        """Move drawn training queries to the parts that no file names."""
        is_missing = [not part.query for part in self.parts]
        train = parts[TRAIN]
        if not len(train["query"]):
            return parts
        drawn = self._drawn(np.unique(train["query"]), self.request.split, is_missing)
        part_of = drawn[np.searchsorted(np.unique(train["query"]), train["query"])]
        for part in (TRAIN, *(p for p in (VALIDATION, TEST) if is_missing[p])):
            parts[part] = {name: values[part_of == part] for name, values in train.items()}
        return parts

    def _drawn(self, queries: np.ndarray, split: QuerySplit, is_missing: list[bool]) -> np.ndarray:
        """Return the part [n] of each query, by its lot."""
        ids = (self.queries.record(query).id for query in queries.tolist())
        lots = keyed_hashes(ids, split.seed) / 2.0**64
        test_share = split.test_share if is_missing[TEST] else 0.0
        validation_share = split.validation_share if is_missing[VALIDATION] else 0.0
        parts = np.where(lots < test_share + validation_share, VALIDATION, TRAIN)
        return np.where(lots < test_share, TEST, parts)


def _grade(value: str | float) -> float:
    """Return a grade as a number, nan where it is none."""
    try:
        number = float(value)
    except ValueError:
        return math.nan
    return number if 0 <= number < math.inf else math.nan
