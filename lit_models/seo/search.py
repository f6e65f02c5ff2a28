"""Exact search, its fusion with BM25, and how well it finds.

Shapes: Q queries, D documents, W width of vectors, k documents found of each, B texts of a batch,
A and F documents of a retriever's and a first stage's rankings, J most judgements of one query.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.core.batches import EncodeBatch
from datamodules.search.queries import NO_DOCUMENT
from lit_models.blocks import rounds_to_float32
from lit_models.seo.metrics import RankedQueries, RankingMetrics, rank_queries

DOCUMENTS_AT_ONCE = 8_192
QUERIES_AT_ONCE = 256
PAIRS_AT_ONCE = 8_192  # of a query and a document
MOST_NEAR = 4  # times k: where more documents of a chunk come near, all are computed exactly
Vectors: TypeAlias = Tensor | np.ndarray


class Found(NamedTuple):
    """The best documents of each query, best first; equal scores in the order of documents.

    Args:
        documents: [Q, k] int64, rows of the searched matrix; -1 = there are fewer.
        scores: [Q, k] float32, -inf where there is none.
    """

    documents: Tensor
    scores: Tensor


def search(
    queries: Vectors,
    documents: Vectors,
    k: int,
    device: torch.device | str = "cpu",
    documents_at_once: int = DOCUMENTS_AT_ONCE,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> Found:
    """Return the k best documents of each query by inner product.

    Scores are taken in float64, pair by pair, and rounded to float32: the size of the chunks does
    not decide between documents, and equal documents have equal scores. Which pairs to look at, a
    product of matrices tells: of the first chunk in float64, of later ones on a CPU in float32, by
    the bound of whose error most documents cannot be among the best (N. Higham, Accuracy and
    Stability of Numerical Algorithms, 3.1).

    Args:
        queries: [Q, W].
        documents: [D, W]; a memory-mapped matrix is read in chunks.
        k: documents per query, at most D are found.
        device: where it is computed.
        documents_at_once: rows of a chunk, which bounds the memory together with the next.
        queries_at_once: the same for queries.

    Raises:
        ValueError: k below 1, or widths that differ.
    """
    _check(queries, documents, k)
    kept, num_queries = min(k, documents.shape[0]), queries.shape[0]
    best = Found(
        torch.full((num_queries, kept), -1, dtype=torch.int64),
        torch.full((num_queries, kept), -torch.inf, dtype=torch.float32),
    )
    for start in range(0, documents.shape[0], documents_at_once):
        part = _on(documents[start : start + documents_at_once], device)
        for first in range(0, num_queries, queries_at_once):
            rows = slice(first, first + queries_at_once)
            some = _on(queries[rows], device)
            top = _better(some, part, best.scores[rows, -1:], MOST_NEAR * kept)
            if top is None:
                top = _scored_alike(some, part, _best((some @ part.T).float(), kept))
            found = Found(top.documents.cpu() + start, top.scores.cpu())
            merged = _merged(Found(best.documents[rows], best.scores[rows]), found, kept)
            best.documents[rows], best.scores[rows] = merged
    return best


def _check(queries: Vectors, documents: Vectors, k: int) -> None:
    if k < 1:
        raise ValueError(f"k must be 1 or more, got {k}.")
    if queries.shape[1] != documents.shape[1]:
        raise ValueError(
            f"queries have {queries.shape[1]} dimensions and documents {documents.shape[1]}; "
            "encode both with the same model."
        )


def _on(values: Vectors, device: torch.device | str) -> Tensor:
    if isinstance(values, np.ndarray):
        values = torch.from_numpy(np.array(values))  # of a read-only map, which torch warns of
    return values.to(device, torch.float64)


def _best(scores: Tensor, k: int) -> Found:
    """Return the k largest of each row [Q, k], or all, equal ones in the order of columns.

    `topk` finds the right values, but which of several equal ones at the end it takes is not
    said: rows where that matters are sorted as a whole.
    """
    k = min(k, scores.shape[1])
    values, columns = scores.topk(k, dim=1)
    columns, order = columns.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    columns = columns.gather(1, order)
    is_open = (scores >= values[:, -1:]).sum(1) > k
    if is_open.any():
        whole = scores[is_open].sort(dim=1, descending=True, stable=True)
        values[is_open], columns[is_open] = whole.values[:, :k], whole.indices[:, :k]
    return Found(columns, values)


def _scored_alike(queries: Tensor, part: Tensor, found: Found) -> Found:
    """Return the same documents by their scores as `_better` takes them [Q, k]."""
    documents = found.documents.sort(1).values
    row = torch.arange(len(queries), device=documents.device).repeat_interleave(documents.shape[1])
    scores = _scores(queries, part, row, documents.flatten()).view_as(documents)
    order = scores.argsort(dim=1, descending=True, stable=True)
    return Found(documents.gather(1, order), scores.gather(1, order))


def _scores(queries: Tensor, part: Tensor, row: Tensor, document: Tensor) -> Tensor:
    """Return the products of pairs [P], float32. Args: row, document [P], of `queries`, `part`."""
    pairs = zip(row.split(PAIRS_AT_ONCE), document.split(PAIRS_AT_ONCE), strict=True)
    return torch.cat([(queries[some] * part[others]).sum(1).float() for some, others in pairs])


def _better(queries: Tensor, part: Tensor, worst: Tensor, most: int) -> Found | None:
    """Return the documents of a chunk whose scores may be above the worst one kept, in their order
    [Q, at most `most`]; -1 and -inf where there are fewer. None: there are too many, or float32
    does not tell.

    Args:
        queries: [Q, W] float64.
        part: [N, W] float64.
        worst: the lowest score that each query has kept [Q, 1] float32, -inf for none.
        most: documents of one query.
    """
    is_float32 = rounds_to_float32() and not torch.is_autocast_enabled("cpu")
    if part.device.type != "cpu" or not is_float32 or not torch.isfinite(worst).all():
        return None
    lengths, longest = queries.norm(dim=1, keepdim=True), part.norm(dim=1).max()
    if not (_is_tame(lengths) and _is_tame(longest)):
        return None
    products = queries.float() @ part.float().T
    is_near = products > (worst - 2 * _error(lengths, longest, part.shape[1])).float()
    counts = is_near.sum(1)
    if counts.max() > most:
        return None
    row, document = is_near.nonzero(as_tuple=True)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    found = Found(
        torch.full((len(queries), int(counts.max())), -1, dtype=torch.int64),
        torch.full((len(queries), int(counts.max())), -torch.inf, dtype=torch.float32),
    )
    found.documents[row, column] = document
    found.scores[row, column] = _scores(queries, part, row, document)
    return found


def _error(lengths: Tensor, longest: Tensor, width: int) -> Tensor:
    """Return a bound on what a product in float32 and a score differ by [Q, 1]: of `width` products
    and as many sums, both factors rounded, and the score rounded in the end."""
    return (width + 4) * torch.finfo(torch.float32).eps * lengths * longest


def _is_tame(lengths: Tensor) -> bool:
    """Whether products of such vectors neither overflow nor vanish in float32; not of NaN."""
    return bool(((lengths == 0) | ((lengths > 1e-12) & (lengths < 1e12))).all())


def _merged(best: Found, found: Found, k: int) -> Found:
    """Return the best of both; all documents of the first come before those of the second."""
    scores = torch.cat([best.scores, found.scores], 1)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    documents = torch.cat([best.documents, found.documents], 1)
    return Found(documents.gather(1, order), scores.gather(1, order))


CHOSEN_WEIGHT = "fusion_weight"  # in the recipe of a checkpoint
WEIGHTS = tuple(step / 20 for step in range(21))  # that are tried on the validation queries


@dataclass(frozen=True)
class Fusion:
    """How BM25's scores and those of the retriever are added.

    Each is first brought to 0 … 1 for each query: less the lowest of the query's ranking, over
    the highest less the lowest. A document that a ranking lacks has 0 there. The lowest of BM25
    is 0 where fewer documents share a word than it was asked for. A ranking is its best
    data.bm25_depth documents; those of the retriever behind them follow in their order.

    Args:
        weight: of BM25, 0 to 1; the retriever has the rest. None takes what is best for the
            first metric on the validation queries, which a checkpoint then keeps.

    Raises:
        ValueError: a weight outside 0 to 1.
    """

    weight: float | None = None

    def __post_init__(self) -> None:
        if self.weight is not None and not 0 <= self.weight <= 1:
            raise ValueError(f"fusion.weight must be 0 to 1, got {self.weight}.")


def weight_of(fusion: Fusion, recipe: dict[str, Any]) -> float:
    """Return the weight of BM25 that is given, or that a recipe keeps.

    Raises:
        ValueError: it was to be chosen on validation queries, and no validation has run.
    """
    if fusion.weight is not None:
        return fusion.weight
    if CHOSEN_WEIGHT not in recipe:
        raise ValueError(
            "fusion.weight is chosen on the validation queries, and this model has seen none; "
            "train with validation, or give model.fusion.weight."
        )
    return recipe[CHOSEN_WEIGHT]


def unit_range(scores: Tensor, is_there: Tensor, is_open: bool) -> Tensor:
    """Return the scores of each query between 0 and 1, float64; 0 where there is none.

    Args:
        scores: [Q, A].
        is_there: [Q, A] bool.
        is_open: a ranking with gaps ends at the score 0.
    """
    scores = scores.double()
    if not scores.shape[1]:
        return scores
    low = scores.masked_fill(~is_there, torch.inf).amin(1, keepdim=True)
    high = scores.masked_fill(~is_there, -torch.inf).amax(1, keepdim=True)
    if is_open:
        low = torch.where(is_there.all(1, keepdim=True), low, torch.zeros_like(low))
    span = high - low
    shifted = torch.where(span > 0, (scores - low) / span, torch.ones_like(scores))
    return shifted.masked_fill(~is_there, 0.0)


def fused(
    documents: Tensor, scores: Tensor, first: Tensor, first_scores: Tensor, weight: float
) -> tuple[Tensor, Tensor]:
    """Return documents [Q, A + F], best first, equal ones in the order of documents, and scores.

    Those are float64; -1 and -inf where there is none. The retriever's best F are fused, to
    scores of 0 to 1, and those behind them, where BM25 has not found them, follow with -1, -2, ….

    Args:
        documents, scores: [Q, A] of the retriever, best first; -1 = there are fewer.
        first, first_scores: [Q, F] of BM25.
        weight: of BM25.
    """
    depth = first.shape[1]
    deeper = documents[:, depth:]
    is_new = (deeper >= 0) & ~_is_among(deeper, first)
    found, values = _summed(documents[:, :depth], scores[:, :depth], first, first_scores, weight)
    behind = -torch.arange(1, deeper.shape[1] + 1, device=deeper.device).double()
    found = torch.cat([found, deeper.masked_fill(~is_new, NO_DOCUMENT)], 1)
    values = torch.cat([values, behind.expand(deeper.shape)], 1)
    values = values.masked_fill(found < 0, -torch.inf)
    order = values.argsort(dim=1, descending=True, stable=True)  # the fused come by document
    return found.gather(1, order), values.gather(1, order)


def _is_among(wanted: Tensor, known: Tensor) -> Tensor:
    """Whether each number is in its row of the other, [Q, n] bool."""
    if not known.shape[1]:
        return torch.zeros_like(wanted, dtype=torch.bool)
    known = known.sort(dim=1).values
    place = torch.searchsorted(known, wanted.contiguous()).clamp(max=known.shape[1] - 1)
    return known.gather(1, place) == wanted


def _summed(
    documents: Tensor, scores: Tensor, first: Tensor, first_scores: Tensor, weight: float
) -> tuple[Tensor, Tensor]:
    """Return the documents of both rankings, ascending, -1 for the second of two, and sums."""
    parts = (
        (1 - weight) * unit_range(scores, documents >= 0, is_open=False),
        weight * unit_range(first_scores, first >= 0, is_open=True),
    )
    numbers, order = torch.cat([documents, first], 1).sort(dim=1, stable=True)
    values = torch.cat(parts, 1).gather(1, order)
    is_second = torch.zeros_like(numbers, dtype=torch.bool)
    is_second[:, 1:] = (numbers[:, 1:] == numbers[:, :-1]) & (numbers[:, 1:] >= 0)
    # A document is in each ranking once, so that at most two neighbours are equal.
    values[:, :-1] += (values * is_second)[:, 1:]
    return numbers.masked_fill(is_second, NO_DOCUMENT), values.masked_fill(is_second, 0.0)


@dataclass(frozen=True)
class Feedback:
    """How far a query is moved, and by which documents. No judgement is used.

    Args:
        documents: best documents of a first search.
        weight: of their mean beside the query, which has 1.
        temperature: of the softmax over their scores; low ones listen to the best alone.

    Raises:
        ValueError: one of them is not above 0.

    Source: of the idea, Rocchio 1971, "Relevance feedback in information retrieval".
    """

    documents: int = 5
    weight: float = 0.6
    temperature: float = 0.1

    def __post_init__(self) -> None:
        for name in ("documents", "weight", "temperature"):
            if not getattr(self, name) > 0:
                raise ValueError(f"feedback.{name} must be above 0, got {getattr(self, name)}.")


def searched(
    queries: Vectors,
    documents: Vectors,
    k: int,
    device: torch.device | str,
    feedback: Feedback | None,
) -> Found:
    """Return what `search` finds, with queries that were moved first where that is wanted."""
    if feedback is not None:
        queries = moved(queries, documents, device, feedback)
    return search(queries, documents, k, device)


def moved(
    queries: Vectors, documents: Vectors, device: torch.device | str, feedback: Feedback
) -> Tensor:
    """Return unit vectors [Q, W] float64, on the CPU.

    Args:
        queries: [Q, W] unit vectors.
        documents: [D, W] unit vectors; of a memory-mapped matrix only those found are read.
        device: where the first search is computed.
        feedback: how far.
    """
    found = search(queries, documents, feedback.documents, device)
    shares = (found.scores.double() / feedback.temperature).softmax(1)  # [Q, k]
    rows = documents[found.documents.numpy().ravel()]
    best = torch.as_tensor(rows).cpu().double().unflatten(0, tuple(found.documents.shape))
    mean = (shares[..., None] * best).sum(1)
    own = torch.as_tensor(queries).cpu().double()
    return F.normalize(own + feedback.weight * mean, dim=-1)


OWN, BM25, FUSED = SYSTEMS = ("retriever", "bm25", "fused")
DEFAULT_METRICS = ("ndcg@10", "mrr@10", "recall@10", "recall@100")
OF_QUERIES = ("judged", "grade", "first_document", "first_score")


class CollectedTexts:
    """The texts of a split, each once; queries and documents in the order of their numbers.

    A plain class: of a tuple or dataclass, torchmetrics would squeeze tensors of one element.

    Args:
        queries, query: [Q, W] vectors and [Q] int64 numbers.
        documents, document: [D, W] and [D] int64.
        judged, grade: [Q, J] int64 documents, -1 = none, and float32 grades, NaN = none.
        first_document, first_score: [Q, F] int64, BM25's, -1 = none, and float32.
    """

    def __init__(
        self,
        queries: Tensor,
        query: Tensor,
        documents: Tensor,
        document: Tensor,
        judged: Tensor,
        grade: Tensor,
        first_document: Tensor,
        first_score: Tensor,
    ) -> None:
        self.queries, self.query = queries, query
        self.documents, self.document = documents, document
        self.judged, self.grade = judged, grade
        self.first_document, self.first_score = first_document, first_score


class EncodedTexts(Metric):
    """Keeps vectors and judgements; `compute` returns them in order, without fillers."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("vectors", "text_index", "is_query", "weight", *OF_QUERIES):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, vectors: Tensor, batch: EncodeBatch) -> None:
        """Add a batch. Args: vectors [B, W]; batch of an evaluation."""
        self.vectors.append(vectors.detach())
        for name in ("text_index", "is_query", "weight", *OF_QUERIES):
            getattr(self, name).append(batch[name])  # type: ignore[literal-required]

    def compute(self) -> CollectedTexts:
        """Return all texts of all ranks."""
        vectors, index, is_query, weight = (
            _whole(getattr(self, name)) for name in ("vectors", "text_index", "is_query", "weight")
        )
        documents = _in_order(index, (~is_query) & (weight > 0))
        queries = _in_order(index, is_query & (weight > 0))
        place = (is_query.cumsum(0) - 1)[queries]  # among all queries, fillers too
        of_queries = [_whole(getattr(self, name))[place] for name in OF_QUERIES]
        return CollectedTexts(
            vectors[queries], index[queries], vectors[documents], index[documents], *of_queries
        )


def deepest(metrics: Sequence[str]) -> int:
    """Return how many ranks metrics look at.

    Raises:
        ValueError: a metric that looks at all of them.
    """
    depths = [re.search(r"@(\d+)$", name) for name in metrics]
    for name, depth in zip(metrics, depths, strict=True):
        if depth is None:
            raise ValueError(
                f"metric {name!r} looks at every rank, and a retriever ranks only so many "
                f"documents; write a number of ranks, such as {name}@100."
            )
    return max((int(depth[1]) for depth in depths if depth), default=1)


class Rankings:
    """The rankings of all systems over the same texts.

    Args:
        texts: of the split.
        depth: ranks that are looked at.
        feedback: how queries are moved before they search; none leaves them.
    """

    def __init__(self, texts: CollectedTexts, depth: int, feedback: Feedback | None = None) -> None:
        self.texts = texts
        self.has_first = texts.first_document.shape[1] > 0 and len(texts.query) > 0
        depth = max(depth, texts.first_document.shape[1])
        device = texts.queries.device
        found = searched(texts.queries, texts.documents, depth, device, feedback)
        self.scores = found.scores.to(texts.document.device)
        rows = found.documents.to(texts.document.device)
        self.documents = torch.where(rows >= 0, texts.document[rows.clamp(min=0)], rows)

    @property
    def own(self) -> RankedQueries:
        """The retriever's."""
        return self._ranked(self.documents, self.scores)

    @property
    def bm25(self) -> RankedQueries:
        """The first stage's, over the documents that were encoded."""
        first = self._first()
        return self._ranked(first, self.texts.first_score)

    def fused(self, weight: float) -> RankedQueries:
        """Both together. Args: weight of BM25."""
        first, scores = self._first(), self.texts.first_score
        return self._ranked(*fused(self.documents, self.scores, first, scores, weight))

    def _first(self) -> Tensor:
        """BM25's documents; those that were not encoded, in a limited run, are none."""
        first = self.texts.first_document
        return first.masked_fill(~torch.isin(first, self.texts.document), -1)

    def _ranked(self, documents: Tensor, scores: Tensor) -> RankedQueries:
        relevance = graded(documents, self.texts.judged, self.texts.grade)
        grades = self.texts.grade.clamp(min=0)
        return rank_queries(scores, relevance, documents >= 0, grades, documents)


class RetrievalEvaluation(nn.Module):
    """Collects the texts of a split and measures all systems over them.

    Attributes:
        texts: of the last evaluation.
        ranked: system -> its rankings in the last evaluation.
        found: [Q, k] int64 numbers of the retriever's first documents there, -1 = none.

    Args:
        metrics: names with the number of ranks.
        depth: ranks that they look at.
    """

    def __init__(self, metrics: Sequence[str], depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.encoded = EncodedTexts()
        self.systems = nn.ModuleDict({name: RankingMetrics(metrics) for name in SYSTEMS})
        self.texts: CollectedTexts | None = None
        self.ranked: dict[str, RankedQueries] = {}
        self.found: Tensor | None = None

    def rankings(self, feedback: Feedback | None = None) -> Rankings:
        """Return the rankings over all ranks' texts, and forget those."""
        rankings = Rankings(self.encoded.compute(), self.depth, feedback)
        self.encoded.reset()
        return rankings

    def measure(self, rankings: Rankings, fusion_weight: float | None) -> dict[str, Metric]:
        """Return name -> metric of all systems, the retriever's own without a prefix."""
        self.texts, self.ranked = rankings.texts, {OWN: rankings.own}
        self.found = rankings.documents
        if rankings.has_first:
            self.ranked[BM25] = rankings.bm25
            if fusion_weight is not None:
                self.ranked[FUSED] = rankings.fused(fusion_weight)
        found: dict[str, Metric] = {}
        for system, ranked in self.ranked.items():
            metrics = self.systems[system]
            assert isinstance(metrics, RankingMetrics)
            # Every rank has all queries, and adds them: a mean over copies is the same mean.
            metrics.update(ranked, torch.ones_like(ranked.is_evaluated, dtype=torch.float64))
            prefix = "" if system == OWN else f"{system}_"
            found |= {f"{prefix}{name}": metric for name, metric in metrics.items()}
        return found

    def per_query(self) -> dict[str, dict[str, Tensor]]:
        """Return system -> metric -> values of the queries [Q] float64, in their order."""
        return {
            system: self.systems[system].per_query(ranked)  # type: ignore[operator]
            for system, ranked in self.ranked.items()
        }


def best_weight(rankings: Rankings, values_of: Callable[[RankedQueries], Tensor]) -> float:
    """Return the weight of BM25 that is best on average over queries, the smallest of equals."""
    if not rankings.has_first:  # a limited run may have seen no query
        return 0.0
    means = [float(values_of(rankings.fused(weight)).mean()) for weight in WEIGHTS]
    return WEIGHTS[max(range(len(WEIGHTS)), key=lambda n: (round(means[n], 12), -n))]


def graded(documents: Tensor, judged: Tensor, grade: Tensor) -> Tensor:
    """Return the grades of documents [Q, k] float32, NaN where nobody judged.

    Args:
        documents: [Q, k] numbers.
        judged: [Q, J] numbers of the judged ones; -1 = none.
        grade: [Q, J].
    """
    if not judged.shape[1]:
        return torch.full(documents.shape, torch.nan, device=documents.device)
    numbers, order = judged.sort(dim=1)
    place = torch.searchsorted(numbers, documents.contiguous()).clamp(max=judged.shape[1] - 1)
    is_judged = (numbers.gather(1, place) == documents) & (documents >= 0)
    return grade.gather(1, order).gather(1, place).masked_fill(~is_judged, torch.nan)


def _whole(values: Tensor | list[Tensor]) -> Tensor:
    """A state before or after the ranks' were joined."""
    return torch.cat(values) if isinstance(values, list) else values


def _in_order(index: Tensor, is_chosen: Tensor) -> Tensor:
    """Rows of chosen texts, in the order of their numbers."""
    rows = is_chosen.nonzero()[:, 0]
    return rows[index[rows].argsort()]
