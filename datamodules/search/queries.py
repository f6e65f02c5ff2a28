"""Queries with their judgements, queries of a file, and TREC's files of rankings.

A line of a run is `query Q0 document rank score tag`. trec_eval orders by score, never by rank, and
equal scores by document id, the last first.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.core.store import cache_root, digest_of, file_digest, made_once, new_file
from datamodules.files.documents import read_documents
from datamodules.files.rows import HALF_RULE, BadRow, BadRows, half_character
from datamodules.files.tables import check_file, value_rows
from datamodules.search.collection import (
    COLLECTION_VERSION,
    Judgements,
    TextTable,
    write_texts,
)
from datamodules.search.formats import (
    QUERY_COLUMNS,
    QUERY_TABLES,
    TextRecord,
    TextRow,
    value_of,
)

NO_DOCUMENT = -1  # where a row has fewer
NO_SCORE, NO_GRADE = np.float32(0), np.float32(np.nan)
RELEVANT_ABOVE = 0.0  # grades above it are relevant
RUN_COLUMNS = ("query", "Q0", "document", "rank", "score", "tag")
TAG = "unisono"  # of our runs


def looked_up(wanted: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each wanted number, [n] float32; NaN = not known.

    Args:
        wanted: [n] int64.
        known: [m] int64, in any order.
        values: [m].
    """
    found = np.full(len(wanted), np.nan, np.float32)
    if len(known):
        order = np.argsort(known)
        near = order[np.minimum(np.searchsorted(known, wanted, sorter=order), len(known) - 1)]
        hit = known[near] == wanted
        found[hit] = values[near[hit]]
    return found


class QueryJudgements(NamedTuple):
    """All judged documents of a query, ascending [J] int64, and their grades [J] float32."""

    documents: np.ndarray
    grades: np.ndarray


class JudgedQueries:
    """Judgements grouped by query.

    Args:
        judgements: sorted by query.

    Attributes:
        queries: [Q] int64, numbers of the queries, ascending.
        most: most judgements of one query.
    """

    def __init__(self, judgements: Judgements) -> None:
        self.judgements = judgements
        self.queries, starts = np.unique(judgements.query, return_index=True)
        self._offsets = np.append(starts, len(judgements.query))
        self.most = int(np.diff(self._offsets).max(initial=0))

    def with_relevant(self) -> "JudgedQueries":
        """Return those that have a relevant document, with all their judgements."""
        judged = self.judgements
        kept = np.isin(judged.query, judged.query[judged.grade > RELEVANT_ABOVE])
        return JudgedQueries(Judgements(*(values[kept] for values in judged)))

    def part(self, place: int) -> slice:
        """Return which judgements are those of the query at this place in `queries`."""
        return slice(self._offsets[place], self._offsets[place + 1])

    def judged(self, place: int) -> QueryJudgements:
        """Return the judgements of the query at this place in `queries`."""
        part = self.part(place)
        return QueryJudgements(self.judgements.document[part], self.judgements.grade[part])


@dataclass(frozen=True)
class Queries:
    """Some queries of a table, by their place 0 … len - 1.

    Args:
        table: that has them.
        numbers: [Q] int64, their numbers in it.
        source: digest of the table's content.
    """

    table: TextTable
    numbers: np.ndarray
    source: str

    @property
    def digest(self) -> str:
        """Hex digest that tells these queries from others."""
        return digest_of([self.source, numbers_digest(self.numbers)])

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[TextRecord]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> TextRecord:
        return self.table[int(self.numbers[place])]


def file_queries(path: Path) -> Queries:
    """Return the queries of a file, in its order: lines of text (.txt), or a table or jsonl with
    query and perhaps id; without ids by their number.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: its name ends otherwise, a row breaks a rule, an id comes twice, or it has
            no query.
    """
    check_file(path, "data.predict_queries", (*QUERY_TABLES, ".txt"))
    source = digest_of([COLLECTION_VERSION, path.suffix, file_digest(path)])

    def rows() -> Iterator[TextRow]:
        if path.suffix.lower() == ".txt":
            text = next(read_documents(path)).text
            for line, query in enumerate(text.split("\n"), start=1):
                if query.strip():
                    yield TextRow(TextRecord(str(line), "", query.strip()), path, line)
            return
        known: set[str] = set()  # a table of queries and pages names a query several times
        for line, row in value_rows(path):
            query, id = value_of(row, QUERY_COLUMNS), value_of(row, ("_id", "id"))
            if not isinstance(query, str) or not query.strip():
                raise ValueError(
                    f"{path}:{line}: the row has no {' or '.join(QUERY_COLUMNS)} "
                    f"(data.predict_queries); it has {', '.join(map(str, row))}."
                )
            if half := half_character(f"{query}{id}"):
                raise ValueError(f'{path}:{line}: "{half}" {HALF_RULE}')
            if id is not None or query not in known:
                known.add(query)
                record = TextRecord(str(line if id is None else id), "", query.strip())
                yield TextRow(record, path, line)

    def write(folder: Path) -> None:
        repeated = BadRows("collect")
        if not len(write_texts(folder, "queries", rows(), repeated)):
            raise ValueError(f"data.predict_queries {path} holds no query.")
        if repeated.rows:
            raise ValueError(f"data.predict_queries: {repeated.rows[0]}")

    folder = made_once(cache_root() / "queries" / source, write)
    table = TextTable(folder, "queries")
    return Queries(table, np.arange(len(table)), source)


def numbers_digest(numbers: np.ndarray) -> str:
    """Return a digest of different numbers."""
    return digest_of([len(numbers), int(hash_ids(numbers).sum(dtype=np.uint64))])


class Ranking(NamedTuple):
    """The documents of one query, best first, and their scores, descending."""

    query: str
    documents: list[str]
    scores: list[float]


def write_run(path: Path, rankings: Iterable[Ranking]) -> None:
    """Write rankings, each query once, whole or not at all.

    Raises:
        FileExistsError: the file exists.
        ValueError: an id holds a blank, or scores are not descending numbers.
    """
    with new_file(path) as file:
        for ranking in rankings:
            last = math.inf
            pairs = zip(ranking.documents, ranking.scores, strict=True)
            for rank, (document, score) in enumerate(pairs, start=1):
                for id in (ranking.query, document):
                    if id.split() != [id]:
                        raise ValueError(
                            f'the id "{id}" must be one word, since blanks divide the columns of '
                            "TREC's files; replace them."
                        )
                if not -math.inf < score <= last:
                    raise ValueError(
                        f"query {ranking.query}: the score of rank {rank} is {score}, and the one "
                        f"before it {last}; scores must be numbers and never rise."
                    )
                last = score
                file.write(f"{ranking.query} Q0 {document} {rank} {float(score)!r} {TAG}\n")


def read_run(path: Path) -> Iterator[Ranking]:
    """Yield the rankings of a run, ordered by score, equal scores by rank.

    Raises:
        ValueError: a line breaks a rule, or a query or document comes again.
    """
    query, rows = "", dict[str, tuple[float, int]]()  # document -> score and rank, negative
    done: set[str] = set()

    def ranking() -> Ranking:
        documents = sorted(rows, key=rows.__getitem__)
        return Ranking(query, documents, [-rows[document][0] for document in documents])

    def bad(line: int, value: str, rule: str) -> ValueError:
        return ValueError(str(BadRow(str(path), line, value, rule)))

    # What is not UTF-8 becomes an id that no text has.
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line, text in enumerate(file, start=1):
            values = text.split()
            if not values:
                continue
            if len(values) != len(RUN_COLUMNS):
                rule = f"the line has {len(values)} columns, and must have {len(RUN_COLUMNS)} with "
                rule += f"blanks between them: {', '.join(RUN_COLUMNS)}."
                raise bad(line, text.strip(), rule)
            own, _, document, rank, score, _ = values
            try:
                place, number = int(rank), float(score)
            except ValueError:
                place, number = 0, math.nan
            if not math.isfinite(number):
                rule = "rank must be a whole number and score a number; correct the line."
                raise bad(line, f"{rank} {score}", rule)
            if own != query:
                if rows:
                    yield ranking()
                if own in done:
                    raise bad(line, own, "this query stands further up; sort the run.")
                query, rows = own, {}
                done.add(query)
            if document in rows:
                rule = f"the document is ranked twice for query {query}; keep one of the lines."
                raise bad(line, document, rule)
            rows[document] = (-number, place)
    if rows:
        yield ranking()
