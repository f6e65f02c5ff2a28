"""Rankings and judgements in TREC's files, which trec_eval and its kind read.

A line of a run is `query Q0 document rank score tag`, one of qrels `query 0 document grade`.
trec_eval orders by score, never by rank, and equal scores by document id, the last first.
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from datamodules.files.rows import BadRow
from datamodules.files.tables import new_text_file
from datamodules.search.layouts import cut_trec, decoded
from datamodules.search.texts import LineError

RUN_COLUMNS = ("query", "Q0", "document", "rank", "score", "tag")


class Ranking(NamedTuple):
    """The documents of one query, best first, and their scores, descending."""

    query: str
    documents: list[str]
    scores: list[float]


class Judgement(NamedTuple):
    """The grade of one document for one query, as ids."""

    query: str
    document: str
    grade: float


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
    query, rows = "", dict[str, _RunEntry]()
    done: set[str] = set()
    for line, text in _lines(path):
        entry = _run_entry(path, line, text)
        if entry.query != query:
            if rows:
                yield _ranked(query, rows)
            if entry.query in done:
                raise _bad(path, line, entry.query, "this query stands further up; sort the run.")
            query, rows = entry.query, {}
            done.add(query)
        if entry.document in rows:
            rule = f"the document is ranked twice for query {query}; keep one of the lines."
            raise _bad(path, line, entry.document, rule)
        rows[entry.document] = entry
    if rows:
        yield _ranked(query, rows)


def write_qrels(path: Path, judgements: Iterable[Judgement]) -> None:
    """Write judgements, whole or not at all; a whole grade without a point.

    Raises:
        FileExistsError: the file exists.
        ValueError: an id holds a blank.
    """
    with new_text_file(path) as file:
        for query, document, grade in judgements:
            _check_word(query, "the query's id")
            _check_word(document, "the document's id")
            number = int(grade) if grade == int(grade) else float(grade)
            file.write(f"{query} 0 {document} {number}\n")


def read_qrels(path: Path) -> Iterator[Judgement]:
    """Yield the judgements of a file.

    Raises:
        ValueError: a line breaks a rule.
    """
    for line, text in _lines(path):
        try:
            values = cut_trec(text)
        except LineError as error:
            raise _bad(path, line, error.value, error.rule) from error
        grade = _number(path, line, values.grade, "grade")
        yield Judgement(values.query, values.document, grade)


class _RunEntry(NamedTuple):
    query: str
    document: str
    rank: int
    score: float


def _run_entry(path: Path, line: int, text: str) -> _RunEntry:
    values = text.split()
    if len(values) != len(RUN_COLUMNS):
        rule = (
            f"the line has {len(values)} columns, and must have {len(RUN_COLUMNS)} with blanks "
            f"between them: {', '.join(RUN_COLUMNS)}."
        )
        raise _bad(path, line, text, rule)
    query, _, document, rank, score, _ = values
    if not rank.isdecimal():
        raise _bad(path, line, rank, "the rank must be a whole number; write 1 for the best.")
    return _RunEntry(query, document, int(rank), _number(path, line, score, "score"))


def _ranked(query: str, rows: dict[str, _RunEntry]) -> Ranking:
    ordered = sorted(rows.values(), key=lambda entry: (-entry.score, entry.rank))
    return Ranking(query, [e.document for e in ordered], [e.score for e in ordered])


def _number(path: Path, line: int, value: str, name: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _bad(path, line, value, f"the {name} must be a number; correct the line.")
    return number


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                yield line, decoded(raw, line)
            except LineError as error:
                raise _bad(path, line, error.value, error.rule) from error


def _bad(path: Path, line: int, value: str, rule: str) -> ValueError:
    return ValueError(str(BadRow(str(path), line, value, rule)))


def _check_word(value: str, name: str) -> None:
    if len(value.split()) != 1 or value != value.strip():
        raise ValueError(
            f'{name} is "{value}", and must be one word, since blanks divide the columns of '
            "TREC's files; replace them."
        )
