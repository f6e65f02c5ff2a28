"""Queries with their judgements, queries of a file, and runs, TREC's files of rankings.

A line of a run is `query Q0 document rank score tag`. trec_eval ignores the rank: it sorts by
score, and equal scores by document id, in descending order.
"""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.core.store import cache_root, digest_of, file_digest, made_once, new_file
from datamodules.files.rows import BadRow, BadRows, OnBadRows, accepted, kind_of, refuse
from datamodules.files.tables import check_file, raise_bad_row
from datamodules.search.collection import COLLECTION_VERSION, Judgements, TextTable, write_texts
from datamodules.search.formats import NO_DOCUMENT, QUERY_TABLES, TextRecord, TextRow, query_rows

NO_SCORE, NO_GRADE = np.float32(0), np.float32(np.nan)
RELEVANT_ABOVE = 0.0  # grades above it are relevant
TAG = "unisono"  # last column of runs written here
NO_JUDGEMENTS = Judgements(*(np.zeros(0, dtype) for dtype in (np.int64, np.int64, np.float32)))


def values_of(numbers: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each number, [n] float32, NaN for unknown ones; `numbers` [n] and
    `known` [m] int64 hold each number at most once."""
    result = np.full(len(numbers), np.nan, np.float32)
    _, place, there = np.intersect1d(numbers, known, assume_unique=True, return_indices=True)
    result[place] = values[there]
    return result


class QueryJudgements(NamedTuple):
    """Judged documents of a query, ascending [J] int64, and their grades [J] float32."""

    documents: np.ndarray
    grades: np.ndarray


class Queries:
    """Some queries of a table, indexed by place 0 … Q - 1, with any judgements they have.

    Args:
        table: texts of the queries.
        source: digest of the table's content.
        judgements: judgements of these queries; none by default.
        numbers: [Q] int64, their numbers in the table, ascending; by default the judged ones.
    """

    def __init__(
        self,
        table: TextTable,
        source: str,
        judgements: Judgements = NO_JUDGEMENTS,
        numbers: np.ndarray | None = None,
    ) -> None:
        self.table, self.source, self.judgements = table, source, judgements
        self.numbers = np.unique(judgements.query) if numbers is None else numbers
        self._starts = np.searchsorted(judgements.query, self.numbers)
        self._ends = np.searchsorted(judgements.query, self.numbers, side="right")
        # The most judgements of one query.
        self.most = int((self._ends - self._starts).max(initial=0))

    @property
    def digest(self) -> str:
        """Hex digest that identifies these queries."""
        return digest_of([self.source, numbers_digest(self.numbers)])

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[TextRecord]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> TextRecord:
        return self.table[int(self.numbers[place])]

    def of(self, judgements: Judgements) -> "Queries":
        """Return the queries of these judgements."""
        return Queries(self.table, self.source, judgements)

    def with_relevant(self) -> "Queries":
        """Return the queries that have a relevant document, with all their judgements."""
        judged = self.judgements
        is_kept = np.isin(judged.query, judged.query[judged.grade > RELEVANT_ABOVE])
        return self.of(Judgements(*(values[is_kept] for values in judged)))

    def part(self, place: int) -> slice:
        """Return the slice of a query's judgements."""
        return slice(self._starts[place], self._ends[place])

    def judged(self, place: int) -> QueryJudgements:
        """Return the judgements of a query."""
        part = self.part(place)
        return QueryJudgements(self.judgements.document[part], self.judgements.grade[part])

    def padded(self, places: np.ndarray, width: int = 0) -> QueryJudgements:
        """Return documents and grades [n, W] of several queries [n], padded on the right with
        `NO_DOCUMENT` and `NO_GRADE`; W is at least `width`."""
        first, end = self._starts[places], self._ends[places]
        index = first[:, None] + np.arange((end - first).max(initial=width))
        is_there = index < end[:, None]
        index = np.minimum(index, len(self.judgements.query) - 1)
        documents = np.where(is_there, self.judgements.document[index], NO_DOCUMENT)
        return QueryJudgements(
            documents, np.where(is_there, self.judgements.grade[index], NO_GRADE)
        )


def file_queries(path: Path, on_bad_rows: OnBadRows = "error") -> Queries:
    """Return the queries of a file in order: lines of a .txt, or rows of a table or jsonl with
    query and optionally id, by default the line. The store's folder lists rejected rows.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: unknown file suffix, a row that breaks a rule, a repeated id, or no query.
    """
    check_file(path, "data.predict_queries", (*QUERY_TABLES, ".txt"))
    source = digest_of([COLLECTION_VERSION, kind_of(path), file_digest(path)])
    bad_rows = BadRows(on_bad_rows)

    def rows() -> Iterator[TextRow]:
        ids: dict[str, Any] = {}  # a table of queries and pages repeats queries
        for row in query_rows(path, bad_rows):
            id = ids.setdefault(row.query, row.line) if row.id is None else row.id
            yield TextRow(TextRecord(str(id), "", row.query), path, row.line)

    def write(folder: Path) -> None:
        if not len(write_texts(folder, "queries", rows(), bad_rows)):
            refuse(bad_rows.rows)
            raise ValueError(f"data.predict_queries {path} holds no query.")
        bad_rows.settle(folder)

    folder = accepted(made_once(cache_root() / "queries" / source, write), on_bad_rows)
    table = TextTable(folder, "queries")
    return Queries(table, source, numbers=np.arange(len(table)))


def numbers_digest(numbers: np.ndarray) -> str:
    """Return the hex digest of a set of numbers."""
    return digest_of([len(numbers), int(hash_ids(numbers).sum(dtype=np.uint64))])


class Ranking(NamedTuple):
    """Documents of one query, best first, and their scores, descending."""

    query: str
    documents: list[str]
    scores: list[float]


def write_run(path: Path, rankings: Iterable[Ranking]) -> None:
    """Write rankings to a new file, atomically, each query once.

    Raises:
        FileExistsError: the file exists.
        ValueError: a score is not finite.
    """
    with new_file(path) as file:
        for ranking in rankings:
            pairs = zip(ranking.documents, ranking.scores, strict=True)
            for rank, (document, score) in enumerate(pairs, start=1):
                if not math.isfinite(score):
                    raise ValueError(f"query {ranking.query}: the score of {document} is {score}.")
                file.write(f"{ranking.query} Q0 {document} {rank} {float(score)!r} {TAG}\n")


def read_run(path: Path) -> Iterator[Ranking]:
    """Yield the rankings of a run, sorted by score, ties by rank.

    Raises:
        ValueError: a line breaks a rule, or a query or a query's document is repeated.
    """
    earlier: set[str] = set()
    for query, lines in groupby(_run_lines(path), key=itemgetter(1)):
        keys: dict[str, tuple[float, int]] = {}  # document -> sort key
        for number, _, document, rank, score in lines:
            if query in earlier:
                rule = "this query stands further up; sort the run."
                raise_bad_row(BadRow(str(path), number, query, rule))
            if document in keys:
                rule = f"the document is ranked twice for query {query}; keep one of the lines."
                raise_bad_row(BadRow(str(path), number, document, rule))
            keys[document] = (-score, rank)
        earlier.add(query)
        ordered = sorted(keys, key=keys.__getitem__)
        yield Ranking(query, ordered, [-keys[document][0] for document in ordered])


def _run_lines(path: Path) -> Iterator[tuple[int, str, str, int, float]]:
    """Yield number, query, document, rank and score of each line."""
    # Bytes that are not UTF-8 become an id that no text has.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                query, _, document, rank, score, _ = text.split()
                line = (number, query, document, int(rank), float(score))
            except ValueError:
                line = None
            if line is None or not math.isfinite(line[-1]):
                rule = (
                    "a line has 6 columns with blanks between them (query, Q0, document, rank, "
                    "score, tag), rank a whole number and score a number; correct it."
                )
                raise_bad_row(BadRow(str(path), number, text.strip(), rule))
            yield line
