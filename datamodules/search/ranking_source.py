"""What queries are ranked from: texts, candidates, judgements, and pools to draw groups from.

Shapes: Q queries, P candidates of all their pools.
"""

from array import array
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from datamodules.core.store import cache_root, digest_of, made_once, mapped
from datamodules.search.bm25 import BM25_VERSION
from datamodules.search.candidates import FirstStage, Lists
from datamodules.search.collection import Collection
from datamodules.search.collection_tokens import CollectionTokens
from datamodules.search.groups import GroupOptions
from datamodules.search.judged_queries import Judged, JudgedQueries
from datamodules.search.queries import Queries
from datamodules.search.training_pairs import tokens_per_byte
from datamodules.text.encoding import Framed, TextEncoding

POOLS_VERSION = 2


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
        texts = map(self.tokens.documents.__getitem__, documents.tolist())
        return self.encoding.framing.pairs(self.tokens.query(place), texts)

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


class Candidates(NamedTuple):
    """Documents [n] int64, their grades and the scores of a first stage, both [n] float32."""

    documents: np.ndarray
    grades: np.ndarray
    scores: np.ndarray

    def taken(self, places: np.ndarray) -> "Candidates":
        """Return those at some places."""
        return Candidates(*(values[places] for values in self))


# The first three are those of `Candidates`; of the others there is one row to a query.
POOL_ARRAYS = {
    "documents": np.int64,
    "grades": np.float32,
    "scores": np.float32,
    "num_judged": np.int64,
    "moments": np.float32,
    "offsets": np.int64,
}


class Pools:
    """The candidates that groups of queries are drawn from: the judged ones, then minable ones.

    Attributes:
        candidates: of all queries, [P].
        offsets: [Q + 1] int64, first candidate of each query, and the end of the last.
        num_judged: [Q] int64.
        moments: [Q, 2] float32, mean and deviation of the first stage's scores.

    Args:
        folder: as `kept_pools` made it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        opened = {name: mapped(folder / f"{name}.bin", POOL_ARRAYS[name]) for name in POOL_ARRAYS}
        self.candidates = Candidates(*(opened[name] for name in Candidates._fields))
        self.offsets, self.num_judged = opened["offsets"], opened["num_judged"]
        self.moments = opened["moments"].reshape(-1, 2)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pools, (self.folder,)

    def of(self, place: int) -> Candidates:
        """Return the candidates of one query."""
        part = slice(self.offsets[place], self.offsets[place + 1])
        return Candidates(*(values[part] for values in self.candidates))


def kept_pools(source: RankingSource, groups: GroupOptions) -> Pools:
    """Return the pools of a source's queries, looked up once into the cache.

    Args:
        source: of queries and candidates.
        groups: which documents may be mined, and their grade.
    """
    folder = cache_root() / "pools" / digest_of(_pool_facts(source, groups))
    return Pools(made_once(folder, lambda folder: _write_pools(folder, source, groups)))


def _pool_facts(source: RankingSource, groups: GroupOptions) -> list[Any]:
    """Return all that pools depend on, and nothing else, as plain JSON: no token is in them."""
    lists, bm25 = source.first.lists, source.first.options.bm25
    return [
        *(POOLS_VERSION, BM25_VERSION),
        *(source.texts.collection.fingerprint, source.queries.digest),
        *(source.first.options.source, lists and lists.fingerprint, bm25 and asdict(bm25)),
        *(groups.mined > 0, groups.after_rank, groups.unjudged_as_negative),
    ]


def _write_pools(folder: Path, source: RankingSource, groups: GroupOptions) -> None:
    """Write the pools one after the other: no more than one of them is in memory."""
    offsets = array("q", [0])
    with ExitStack() as stack:
        opened = (folder / f"{name}.bin" for name in list(POOL_ARRAYS)[:-1])
        files = [stack.enter_context(path.open("wb")) for path in opened]
        for place in range(len(source.queries)):
            pool, moments, num_judged = _looked_up(source, groups, place)
            offsets.append(offsets[-1] + len(pool.documents))
            values = (*pool, np.array(num_judged), moments)
            for file, value, dtype in zip(files, values, POOL_ARRAYS.values(), strict=False):
                file.write(value.astype(dtype).tobytes())
    np.array(offsets, np.int64).tofile(folder / "offsets.bin")


def _looked_up(
    source: RankingSource, groups: GroupOptions, place: int
) -> tuple[Candidates, np.ndarray, int]:
    """Return the pool of a query, the moments of its first stage, and how many are judged."""
    judged, first = source.judged(place), source.first
    minable = groups.minable(first.listed(place), judged.documents)
    mined_grade = 0.0 if groups.unjudged_as_negative else np.nan
    grades = np.append(judged.grades, np.full(len(minable), mined_grade, np.float32))
    documents = np.append(judged.documents, minable)
    scores = first.scores(place, documents)
    moments = first.moments(place, judged.documents)
    return Candidates(documents, grades, scores), moments, len(judged.grades)
