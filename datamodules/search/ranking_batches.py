"""Queries with their candidates, as examples and batches for the ranker.

Shapes: B queries in the micro-batch, K candidates of one, P pairs, J judgements of one.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.core.plan import rng_for
from datamodules.core.planned import PlannedDataset
from datamodules.search.groups import GroupOptions
from datamodules.search.ranking_source import Candidates, RankingSource, kept_pools
from datamodules.search.tables import NO_DOCUMENT, looked_up, rows_of
from datamodules.text.encoding import Framed, padded

TERM = "queries"
ROWS_OF_PART = 64  # with fewer, what is saved of padding is lost by smaller matrix products


class RankingExample(NamedTuple):
    """One query: rows of its K pairs, and arrays [K] but for `all_relevance` [J]."""

    pairs: list[Framed]
    document: np.ndarray
    relevance: np.ndarray
    prior: np.ndarray
    first_stage: np.ndarray
    bm25: np.ndarray
    teacher: np.ndarray
    all_relevance: np.ndarray


class RankingDataset(PlannedDataset):
    """Queries, each with all its candidates: for evaluation and prediction.

    Args:
        source: of queries and candidates.
        with_baselines: whether BM25's scores come along.
        is_even: whether all batches are as wide as the longest list, so that results join.
    """

    def __init__(
        self, source: RankingSource, with_baselines: bool = False, is_even: bool = False
    ) -> None:
        self.source, self.with_baselines = source, with_baselines
        self.lengths = self._lengths(len(source.queries))
        self.fingerprint = source.fingerprint(*self._facts())
        self.target_counts = {TERM: None}
        places = range(len(source.queries)) if is_even else ()
        self.width = max((len(self.candidates(place)) for place in places), default=1)

    def candidates(self, place: int) -> np.ndarray:
        """Return the documents that are ranked for a query, ascending."""
        if self.source.first.lists is None:
            return self.source.judged(place).documents
        return np.sort(self.source.first.listed(place))

    def example(self, sample_id: int, epoch: int) -> RankingExample:
        """Return one query with its candidates of this epoch."""
        source, found = self.source, self.graded(sample_id, epoch)
        mean, deviation = self.moments(sample_id)
        documents, scores = found.documents, found.scores
        bm25 = source.first.bm25_scores(sample_id, documents) if self.with_baselines else scores
        return RankingExample(
            pairs=source.texts.pairs(sample_id, documents),
            document=documents,
            relevance=found.grades,
            prior=(scores - mean) / deviation,
            first_stage=scores,
            bm25=bm25,
            teacher=self._teacher(sample_id, documents),
            all_relevance=source.judged(sample_id).grades,
        )

    def graded(self, sample_id: int, epoch: int) -> Candidates:
        """Return the candidates of this epoch, ascending."""
        documents = self.candidates(sample_id)
        grades = self.source.judged(sample_id).grades_of(documents)
        return Candidates(documents, grades, self.source.first.scores(sample_id, documents))

    def moments(self, sample_id: int) -> np.ndarray:
        """Return mean and deviation of the first stage's scores, [2] float32."""
        return self.source.first.moments(sample_id, self.source.judged(sample_id).documents)

    def collate(self, examples: list[RankingExample]) -> dict[str, Any]:
        """Return the padded batch."""
        sizes = np.array([len(example.pairs) for example in examples])
        index = np.full((len(examples), max(self.width, *sizes)), NO_DOCUMENT)
        width = index.shape[1]
        rows, row_of = self._rows_by_length([pair for e in examples for pair in e.pairs])
        index[np.arange(width) < sizes[:, None]] = row_of
        batch = {
            **rows,
            "pair_lengths": rows["attention_mask"].sum(1).numpy(),
            "num_parts": self.num_parts(len(examples)),
            "pair_index": torch.from_numpy(index),
            "document": _rows([e.document for e in examples], NO_DOCUMENT, width),
            "relevance": _rows([e.relevance for e in examples], np.nan, width),
            "prior": _rows([e.prior for e in examples], 0.0, width),
            "all_relevance": _rows([e.all_relevance for e in examples], np.nan, 1),
        }
        if self.source.teacher is not None:
            batch["teacher"] = _rows([e.teacher for e in examples], np.nan, width)
        if self.with_baselines:
            found = {"first": [e.first_stage for e in examples], "bm25": [e.bm25 for e in examples]}
            batch["baselines"] = {
                name: _rows(found[name], 0.0, width) for name in self.source.first.names
            }
        return batch

    def num_parts(self, num_queries: int) -> int:
        """Return in how many parts a training step computes the rows of so many queries."""
        return 1

    def _rows_by_length(self, pairs: list[Framed]) -> tuple[dict[str, torch.Tensor], np.ndarray]:
        """Return the rows, the longest first, and which of them each pair is."""
        if not pairs:  # no query has a candidate
            empty = self.source.texts.encoding.framing.single(np.zeros(0, np.int64))
            return padded([empty]), np.zeros(0, np.int64)
        lengths = np.array([sum(map(len, pair.texts)) for pair in pairs])
        order = np.argsort(-lengths, kind="stable")
        row_of = np.empty_like(order)
        row_of[order] = np.arange(len(order))
        return padded([pairs[place] for place in order.tolist()]), row_of

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the query, and the grades of its candidates of this epoch."""
        documents, grades, _ = self.graded(sample_id, epoch)
        names = [self.source.texts.collection.document_id(int(i)) for i in documents]
        graded = zip(names, grades.tolist(), strict=True)
        return {
            "query": self.source.queries.text(sample_id),
            "candidates": " ".join(f"{name}:{grade:g}" for name, grade in graded),
        }

    def _facts(self) -> list[Any]:
        return [len(self.source.queries)]

    def _lengths(self, count: int) -> np.ndarray:
        """Return about how many positions the rows of each query have together, [N] int64."""
        found = (self.source.texts.lengths(self.candidates(place)).sum() for place in range(count))
        return np.maximum(1, np.fromiter(found, np.int64, count))

    def _teacher(self, place: int, documents: np.ndarray) -> np.ndarray:
        if self.source.teacher is None:
            return np.full(len(documents), np.nan, np.float32)
        listed, scores = self.source.teacher.of(place)
        order = np.argsort(listed)
        return looked_up(documents, listed[order], scores[order])


class GroupDataset(RankingDataset):
    """Queries, each with a group of candidates that is drawn anew in every epoch: for training.

    Args:
        source: of queries and candidates.
        groups: how they are drawn.
        seed: key of the draw, together with epoch and sample id.
    """

    def __init__(self, source: RankingSource, groups: GroupOptions, seed: int) -> None:
        self.groups, self.seed = groups, seed
        self.pools = kept_pools(source, groups)
        super().__init__(source)

    def graded(self, sample_id: int, epoch: int) -> Candidates:
        """Return the group of this epoch, ascending."""
        pool, num_judged = self.pools.of(sample_id), int(self.pools.num_judged[sample_id])
        rng = rng_for(self.seed, epoch, sample_id)
        num_minable = len(pool.documents) - num_judged
        chosen = self.groups.drawn(pool.grades[:num_judged], num_minable, rng)
        return pool.taken(chosen[np.argsort(pool.documents[chosen])])

    def num_parts(self, num_queries: int) -> int:
        # By the size that groups may have, which is the same on all replicas; each has a pair.
        return _parts(num_queries, self.groups.size)

    def moments(self, sample_id: int) -> np.ndarray:
        return self.pools.moments[sample_id]

    def _facts(self) -> list[Any]:
        return [len(self.source.queries), asdict(self.groups)]

    def _lengths(self, count: int) -> np.ndarray:
        """Return the expected length: that of a mean document, times the size of the group."""
        lengths = np.ones(count, np.int64)
        sizes = np.diff(self.pools.offsets).tolist()
        for place, num_judged in enumerate(self.pools.num_judged.tolist()):
            size = self.groups.num_judged(num_judged)
            size += self.groups.num_mined(num_judged, sizes[place] - num_judged)
            documents = self.pools.of(place).documents
            lengths[place] = size * self.source.texts.lengths(documents).mean()
        return np.maximum(1, lengths)


class TripleDataset(RankingDataset):
    """The collection's triples, each a group of a relevant document and another: for training.

    Args:
        source: of texts, whose queries are those of the triples in their order.
    """

    def __init__(self, source: RankingSource) -> None:
        assert source.texts.collection.triples is not None
        self.triples = source.texts.collection.triples
        super().__init__(source)

    def graded(self, sample_id: int, epoch: int) -> Candidates:
        """Return the two documents, ascending, with grades 1 and 0."""
        pair = [int(side[sample_id]) for side in (self.triples.positive, self.triples.negative)]
        documents, grades = np.array(pair), np.array([1.0, 0.0], np.float32)
        scores = self.source.first.scores(sample_id, documents)
        return Candidates(documents, grades, scores).taken(np.argsort(documents))

    def num_parts(self, num_queries: int) -> int:
        return _parts(num_queries, 2)

    def _facts(self) -> list[Any]:
        return ["triples"]

    def _lengths(self, count: int) -> np.ndarray:
        of, sides = self.source.texts.lengths, (self.triples.positive, self.triples.negative)
        return sum((of(side) for side in sides), np.zeros(count, np.int64))


def _parts(num_queries: int, size: int) -> int:
    return max(1, min(num_queries, num_queries * size // ROWS_OF_PART))


def _rows(values: Sequence[np.ndarray], filler: float, width: int) -> torch.Tensor:
    return torch.from_numpy(rows_of(values, filler, width))
