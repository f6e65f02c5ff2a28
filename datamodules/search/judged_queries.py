"""The queries of one part with what people said of documents for them."""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from datamodules.search.collection import Judgements
from datamodules.search.tables import looked_up

RELEVANT_ABOVE = 0.0  # grades above it are relevant


class Judged(NamedTuple):
    """All judged documents of a query, ascending [J] int64, and their grades [J] float32."""

    documents: np.ndarray
    grades: np.ndarray

    def grades_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the grades of documents, [n] float32; NaN = unjudged."""
        return looked_up(documents, self.documents, self.grades)


class Relevant(NamedTuple):
    """The relevant documents of Q queries one after the other, [R] int64, their grades [R] float64,
    and where each query's begin, [Q + 1] int64."""

    documents: np.ndarray
    grades: np.ndarray
    offsets: np.ndarray


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
        found = np.unique(judged.query[judged.grade > RELEVANT_ABOVE])
        kept = np.isin(judged.query, found)
        return JudgedQueries(
            Judgements(judged.query[kept], judged.document[kept], judged.grade[kept])
        )

    @property
    def most(self) -> int:
        """Most judgements of one query."""
        return int(np.diff(self._offsets).max(initial=0))

    def judged(self, place: int) -> Judged:
        """Return what was judged for the query at this place in `queries`."""
        part = slice(*self._offsets[place : place + 2])
        return Judged(self.judgements.document[part], self.judgements.grade[part])

    def relevant(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the relevant documents and their grades, as float64."""
        documents, grades, offsets = self.relevant_ones
        part = slice(offsets[place], offsets[place + 1])
        return documents[part], grades[part]

    @cached_property
    def relevant_ones(self) -> Relevant:
        """The relevant documents of all queries."""
        is_relevant = self.judgements.grade > RELEVANT_ABOVE
        offsets = np.append(0, np.cumsum(is_relevant))[self._offsets]
        documents, grades = self.judgements.document, self.judgements.grade
        return Relevant(documents[is_relevant], grades[is_relevant].astype(np.float64), offsets)

    def all_relevant(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield `relevant` of every query."""
        return (self.relevant(place) for place in range(len(self.queries)))

    def relevant_of(self, query: int) -> np.ndarray:
        """Return the relevant documents of a query by its number; none where it is not judged."""
        place = int(np.searchsorted(self.queries, query))
        if place == len(self.queries) or self.queries[place] != query:
            return np.zeros(0, np.int64)
        return self.relevant(place)[0]

    def irrelevant_of(self, query: int) -> np.ndarray:
        """Return the documents that were judged and found not relevant."""
        place = int(np.searchsorted(self.queries, query))
        if place == len(self.queries) or self.queries[place] != query:
            return np.zeros(0, np.int64)
        documents, grades = self.judged(place)
        return documents[grades <= RELEVANT_ABOVE]


def shares_up_to(grades: np.ndarray) -> np.ndarray:
    """Return the share of the sum that positive grades [n] have up to each of them, [n] float64,
    as `rng.choice(n, p=grades / grades.sum())` sees them."""
    ends = (grades / grades.sum()).cumsum()
    return ends / ends[-1]
