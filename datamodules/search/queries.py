"""Queries with their judgements, queries of a file, and TREC's files of rankings.

A line of a run is `query Q0 document rank score tag`. trec_eval orders by score, never by rank, and
equal scores by document id, the last first.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.core.store import digest_of
from datamodules.files.rows import BadRow
from datamodules.files.tables import Table, new_text_file
from datamodules.search.collection import Collection, Judgements
from datamodules.search.formats import BOM, QUERY_COLUMNS, LineKind, decoded, parse_line
from datamodules.search.texts import LineError, TextRecord

NO_DOCUMENT = -1  # where a row has fewer
RELEVANT_ABOVE = 0.0  # grades above it are relevant
QUERY_SUFFIXES = (".jsonl", ".tsv", ".csv", ".txt", ".xlsx")
RUN_COLUMNS = ("query", "Q0", "document", "rank", "score", "tag")


def rows_of(values: Sequence[np.ndarray], filler: float, width: int = 0) -> np.ndarray:
    """Return arrays of several lengths as the rows of one, at least `width` wide."""
    rows = np.full((len(values), max(width, *map(len, values))), filler, values[0].dtype)
    for row, value in zip(rows, values, strict=True):
        row[: len(value)] = value
    return rows


def looked_up(wanted: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each wanted number, [n] float32; NaN = not known.

    Args:
        wanted: [n] int64.
        known: [m] int64, ascending.
        values: [m].
    """
    found = np.full(len(wanted), np.nan, np.float32)
    if len(known):
        near = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        hit = known[near] == wanted
        found[hit] = values[near[hit]]
    return found


class QueryJudgements(NamedTuple):
    """All judged documents of a query, ascending [J] int64, and their grades [J] float32."""

    documents: np.ndarray
    grades: np.ndarray

    def grades_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the grades of documents, [n] float32; NaN = unjudged."""
        return looked_up(documents, self.documents, self.grades)


class JudgedQueries:
    """Judgements grouped by query.

    Args:
        judgements: sorted by query.

    Attributes:
        queries: [Q] int64, numbers of the queries, ascending.
    """

    def __init__(self, judgements: Judgements) -> None:
        self.judgements = judgements
        self.queries, starts = np.unique(judgements.query, return_index=True)
        self._offsets = np.append(starts, len(judgements.query))

    def with_relevant(self) -> "JudgedQueries":
        """Return those that have a relevant document, with all their judgements."""
        judged = self.judgements
        kept = np.isin(judged.query, judged.query[judged.grade > RELEVANT_ABOVE])
        return JudgedQueries(Judgements(*(values[kept] for values in judged)))

    @property
    def most(self) -> int:
        """Most judgements of one query."""
        return int(np.diff(self._offsets).max(initial=0))

    def judged(self, place: int) -> QueryJudgements:
        """Return the judgements of the query at this place in `queries`."""
        part = slice(*self._offsets[place : place + 2])
        return QueryJudgements(self.judgements.document[part], self.judgements.grade[part])

    def relevant(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the relevant documents and their grades, as float64."""
        documents, grades = self.judged(place)
        is_relevant = grades > RELEVANT_ABOVE
        return documents[is_relevant], grades[is_relevant].astype(np.float64)

    def documents_of(self, query: int, are_relevant: bool) -> np.ndarray:
        """Return the documents of a query, by its number, that were found relevant, or those that
        were found not to be; none of a query that is not judged."""
        place = int(np.searchsorted(self.queries, query))
        if place == len(self.queries) or self.queries[place] != query:
            return np.zeros(0, np.int64)
        documents, grades = self.judged(place)
        return documents[(grades > RELEVANT_ABOVE) == are_relevant]


class CollectionQueries:
    """Some queries of a collection, by their place 0 … len - 1.

    Args:
        collection: that has them.
        indices: [Q] int64, their numbers in it.
    """

    def __init__(self, collection: Collection, indices: np.ndarray) -> None:
        self.collection, self.indices = collection, indices

    @property
    def digest(self) -> str:
        """Tells these queries from others of the same collection."""
        return numbers_digest(self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def id(self, place: int) -> str:
        """Return the id of a query."""
        return self.collection.query_id(int(self.indices[place]))

    def text(self, place: int) -> str:
        """Return the text of a query."""
        return self.collection.query(int(self.indices[place]))


class FileQueries:
    """The queries of a file, in its order: jsonl with _id and text, tsv with id and text, a table
    (.csv, .xlsx) with query and perhaps id, or lines of text (.txt); without ids by their number.
    They are asked for as those of `CollectionQueries`.

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
        is_table = path.suffix in (".csv", ".xlsx")
        for line, record in (_table_records if is_table else _line_records)(path):
            if record.id in lines:
                rule = f"the id stands in line {lines[record.id]} too; give each query its own."
                raise _bad(path, line, record.id, rule)
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


Queries = CollectionQueries | FileQueries


def numbers_digest(numbers: np.ndarray) -> str:
    """Return a digest of different numbers."""
    return digest_of([len(numbers), int(hash_ids(numbers).sum(dtype=np.uint64))])


def _line_records(path: Path) -> Iterator[tuple[int, TextRecord]]:
    kind: LineKind = "jsonl" if path.suffix == ".jsonl" else "tsv"
    for line, raw in _lines(path):
        numbered = f"{line}\t".encode() + raw.strip() if path.suffix == ".txt" else raw
        try:
            yield line, parse_line(kind, numbered)
        except LineError as error:
            raise _bad(path, line, error.value, error.rule) from error


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


class Ranking(NamedTuple):
    """The documents of one query, best first, and their scores, descending."""

    query: str
    documents: list[str]
    scores: list[float]


def write_run(path: Path, rankings: Iterable[Ranking], tag: str) -> None:
    """Write rankings, whole or not at all.

    Args:
        path: of the run; an existing file is never overwritten.
        rankings: each query once.
        tag: name of the run, one word.

    Raises:
        FileExistsError: the file exists.
        ValueError: an id or the tag holds a blank, or scores are not descending numbers.
    """
    with new_text_file(path) as file:
        _check_word(tag, "the tag")
        for ranking in rankings:
            _check_word(ranking.query, "the query's id")
            last = math.inf
            pairs = zip(ranking.documents, ranking.scores, strict=True)
            for rank, (document, score) in enumerate(pairs, start=1):
                _check_word(document, "the document's id")
                if not -math.inf < score <= last:
                    raise ValueError(
                        f"query {ranking.query}: the score of rank {rank} is {score}, and the one "
                        f"before it {last}; scores must be numbers and never rise."
                    )
                last = score
                file.write(f"{ranking.query} Q0 {document} {rank} {float(score)!r} {tag}\n")


def read_run(path: Path) -> Iterator[Ranking]:
    """Yield the rankings of a run, ordered by score, equal scores by rank.

    Raises:
        ValueError: a line breaks a rule, or a query or document comes again.
    """
    query, rows = "", dict[str, tuple[float, int]]()  # document -> score and rank, negative
    done: set[str] = set()
    for line, raw in _lines(path):
        try:
            text = decoded(raw)
        except LineError as error:
            raise _bad(path, line, error.value, error.rule) from error
        values = text.split()
        if len(values) != len(RUN_COLUMNS):
            rule = (
                f"the line has {len(values)} columns, and must have {len(RUN_COLUMNS)} with blanks "
                f"between them: {', '.join(RUN_COLUMNS)}."
            )
            raise _bad(path, line, text, rule)
        own, _, document, rank, score, _ = values
        if not rank.isdecimal():
            raise _bad(path, line, rank, "the rank must be a whole number; write 1 for the best.")
        try:
            number = float(score)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise _bad(path, line, score, "the score must be a number; correct the line.")
        if own != query:
            if rows:
                yield _ranking(query, rows)
            if own in done:
                raise _bad(path, line, own, "this query stands further up; sort the run.")
            query, rows = own, {}
            done.add(query)
        if document in rows:
            rule = f"the document is ranked twice for query {query}; keep one of the lines."
            raise _bad(path, line, document, rule)
        rows[document] = (-number, int(rank))
    if rows:
        yield _ranking(query, rows)


def _ranking(query: str, rows: dict[str, tuple[float, int]]) -> Ranking:
    documents = sorted(rows, key=rows.__getitem__)
    return Ranking(query, documents, [-rows[document][0] for document in documents])


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers from 1."""
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if raw.strip():
                yield line, raw.removeprefix(BOM) if line == 1 else raw


def _bad(path: Path, line: int, value: str, rule: str) -> ValueError:
    return ValueError(str(BadRow(str(path), line, value, rule)))


def _check_word(value: str, name: str) -> None:
    if len(value.split()) != 1 or value != value.strip():
        raise ValueError(
            f'{name} is "{value}", and must be one word, since blanks divide the columns of '
            "TREC's files; replace them."
        )
