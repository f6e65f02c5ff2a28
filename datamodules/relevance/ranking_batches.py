"""Queries with their candidates, as examples and batches for the ranker.

Shapes: B queries in the micro-batch, K candidates of one, P pairs, J judgements of one.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.cache import digest_of
from datamodules.encoded_texts import TextEncoding
from datamodules.framing import Framed, padded
from datamodules.plan import rng_for
from datamodules.planned import PlannedDataset
from datamodules.relevance.candidates import FirstStage, Lists
from datamodules.relevance.collection import Collection
from datamodules.relevance.collection_tokens import CollectionTokens
from datamodules.relevance.groups import GroupOptions
from datamodules.relevance.judged_queries import Judged, JudgedQueries
from datamodules.relevance.queries import Queries
from datamodules.relevance.tables import NO_DOCUMENT, looked_up, rows_of
from datamodules.relevance.training_pairs import tokens_per_byte

TERM = "queries"
NO_PAIR = Framed((np.zeros(1, np.int64),), (0,))  # where no query has a candidate


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


@dataclass(frozen=True)
class PairTexts:
    """Makes rows of a query and a document.

    Args:
        collection: of the documents.
        encoding: of the texts.
        tokens: of the documents, and of the queries that are ranked for.
    """

    collection: Collection
    encoding: TextEncoding
    tokens: CollectionTokens

    def pairs(self, place: int, documents: np.ndarray) -> list[Framed]:
        """Return the rows of a query, by its place, and of documents, by their numbers."""
        query, tokens = self.tokens.query(place), self.tokens.documents
        frame = self.encoding.framing.pair
        return [frame(query, tokens[number]) for number in documents.tolist()]

    def lengths(self, documents: np.ndarray) -> np.ndarray:
        """Return about how many positions the rows of documents have, [n] int64."""
        limits = self.encoding.limits
        num_bytes = self.collection.document_lengths[documents] * self._tokens_per_byte
        longest = limits.max_length - limits.max_query_length
        return np.minimum(num_bytes.astype(np.int64), longest) + limits.max_query_length // 2

    @cached_property
    def _tokens_per_byte(self) -> float:
        return tokens_per_byte(self.encoding, self.collection)


@dataclass(frozen=True)
class RankingSource:
    """What the queries of one stage are ranked from.

    Args:
        texts: that make rows.
        queries: that are ranked for.
        first: their first stage.
        judgements: of these queries; none in prediction for a file of queries.
        teacher: scores of a teacher.
    """

    texts: PairTexts
    queries: Queries
    first: FirstStage
    judgements: JudgedQueries | None = None
    teacher: Lists | None = None

    def judged(self, place: int) -> Judged:
        """Return the judgements of a query."""
        if self.judgements is None:
            return Judged(np.zeros(0, np.int64), np.zeros(0, np.float32))
        return self.judgements.judged(place)

    def fingerprint(self, *options: Any) -> str:
        """Return the hex digest of all this and of the options of a dataset."""
        lists = [found.fingerprint for found in (self.first.lists, self.teacher) if found]
        facts = [self.texts.collection.fingerprint, self.texts.encoding.digest, lists, *options]
        return digest_of([*facts, self.first.options.bm25 and asdict(self.first.options.bm25)])


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
        source, (documents, relevance) = self.source, self.graded(sample_id, epoch)
        first, judged = source.first, source.judged(sample_id)
        mean, deviation = first.moments(sample_id, judged.documents)
        scores = first.scores(sample_id, documents)
        bm25 = first.bm25_scores(sample_id, documents) if self.with_baselines else scores
        return RankingExample(
            pairs=source.texts.pairs(sample_id, documents),
            document=documents,
            relevance=relevance,
            prior=(scores - mean) / deviation,
            first_stage=scores,
            bm25=bm25,
            teacher=self._teacher(sample_id, documents),
            all_relevance=judged.grades,
        )

    def graded(self, sample_id: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the candidates of this epoch, ascending, and their grades."""
        documents = self.candidates(sample_id)
        return documents, self.source.judged(sample_id).grades_of(documents)

    def collate(self, examples: list[RankingExample]) -> dict[str, Any]:
        """Return the padded batch."""
        sizes = np.array([len(example.pairs) for example in examples])
        index = np.full((len(examples), max(self.width, *sizes)), NO_DOCUMENT)
        index[np.arange(index.shape[1]) < sizes[:, None]] = np.arange(sizes.sum())
        width = index.shape[1]
        batch = {
            **padded([pair for example in examples for pair in example.pairs] or [NO_PAIR]),
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

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the query, and the grades of its candidates of this epoch."""
        documents, grades = self.graded(sample_id, epoch)
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
        super().__init__(source)

    def graded(self, sample_id: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the group of this epoch, ascending, and its grades."""
        judged, minable = self._pool(sample_id)
        rng = rng_for(self.seed, epoch, sample_id)
        chosen = self.groups.drawn(judged.grades, len(minable), rng)
        mined_grade = 0.0 if self.groups.unjudged_as_negative else np.nan
        grades = np.append(judged.grades, np.full(len(minable), mined_grade, np.float32))
        documents = np.append(judged.documents, minable)[chosen]
        order = np.argsort(documents)
        return documents[order], grades[chosen][order]

    def _pool(self, place: int) -> tuple[Judged, np.ndarray]:
        judged = self.source.judged(place)
        return judged, self.groups.minable(self.source.first.listed(place), judged.documents)

    def _facts(self) -> list[Any]:
        return [len(self.source.queries), asdict(self.groups)]

    def _lengths(self, count: int) -> np.ndarray:
        """Return the expected length: that of a mean document, times the size of the group."""
        lengths = np.ones(count, np.int64)
        for place in range(count):
            judged, minable = self._pool(place)
            size = self.groups.num_judged(len(judged.grades))
            size += self.groups.num_mined(len(judged.grades), len(minable))
            pool = np.append(judged.documents, minable)
            lengths[place] = size * self.source.texts.lengths(pool).mean()
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

    def graded(self, sample_id: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the two documents, ascending, and grades 1 and 0."""
        pair = [int(side[sample_id]) for side in (self.triples.positive, self.triples.negative)]
        order = np.argsort(pair)
        return np.array(pair)[order], np.array([1.0, 0.0], np.float32)[order]

    def _facts(self) -> list[Any]:
        return ["triples"]

    def _lengths(self, count: int) -> np.ndarray:
        of, sides = self.source.texts.lengths, (self.triples.positive, self.triples.negative)
        return sum((of(side) for side in sides), np.zeros(count, np.int64))


def _rows(values: Sequence[np.ndarray], filler: float, width: int) -> torch.Tensor:
    return torch.from_numpy(rows_of(values, filler, width))
