"""How good a ranking is: per query, then the mean over queries.

Shapes: B queries, K candidates of a query, J judged documents of a query. Definitions are those of
trec_eval 9 (NDCG of Järvelin & Kekäläinen 2002, with log2(rank + 1) as the discount of every rank):

- A candidate without a judgement counts as not relevant, and so does a grade of 0 or below.
- The ideal ranking and the number of relevant documents are those of **all** judged documents, so
  that a relevant document that no candidate is lowers NDCG, MAP and recall.
- precision@k divides by k, also where there are fewer candidates.
- A query that has judgements but no relevant document scores 0; one without judgements is not
  evaluated at all.
- Ties: equal scores are ordered by the document's index, the smaller first (by the candidate's
  position where no index is given). That depends on nothing but the query, and so is equal on any
  number of devices and in any order of candidates. (trec_eval takes the larger identifier first.)
- A query with a score that is no number has the value NaN: it cannot pass for a good ranking.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lit_models.training.metrics import SumCount

Gain = Literal["linear", "exponential"]
DEFAULT_METRICS = ("ndcg@1", "ndcg@5", "ndcg@10", "mrr@10", "map", "recall@100")
BOOTSTRAP_ROWS = 4_000_000  # numbers drawn at once: 32 MB


class RankedQueries(NamedTuple):
    """Queries whose candidates are in the order of their scores."""

    relevance: Tensor  # [B, K] float64, grade at each rank; 0 = not relevant, unjudged or none
    ideal: Tensor  # [B, J] float64, grades of all judged documents, descending, at least 0
    is_evaluated: Tensor  # [B] bool, the query has judgements


def rank_queries(
    scores: Tensor,
    relevance: Tensor,
    is_candidate: Tensor,
    all_relevance: Tensor,
    document: Tensor | None = None,
) -> RankedQueries:
    """Put the candidates of each query in order.

    Args:
        scores: [B, K], the higher the better.
        relevance: [B, K] grades; nan = unjudged.
        is_candidate: [B, K] bool, false where a query has fewer candidates.
        all_relevance: [B, J] grades of every judged document, whether it is a candidate or not;
            nan or below 0 = none, so that a judgement below 0 is given as 0.
        document: [B, K] int64, what decides ties; the candidate's position where not given.
    """
    scores = scores.detach().double()
    order = ranking(scores, is_candidate, document)
    grades = relevance.double().nan_to_num(nan=0.0).clamp(min=0).masked_fill(~is_candidate, 0)
    is_wrong = (scores.isnan() & is_candidate).any(1, keepdim=True)
    judged = all_relevance.double()
    return RankedQueries(
        relevance=grades.gather(1, order).masked_fill(is_wrong, torch.nan),
        ideal=judged.nan_to_num(nan=0.0).clamp(min=0).sort(dim=1, descending=True).values,
        is_evaluated=(judged >= 0).any(1),
    )


def ranking(scores: Tensor, is_candidate: Tensor, document: Tensor | None = None) -> Tensor:
    """Return the candidates of each query, the best first and those that are none last.

    Args:
        scores, is_candidate, document: as for `rank_queries`.

    Returns:
        [B, K] int64, positions in `scores`.
    """
    if document is None:
        order = torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    else:
        order = document.argsort(dim=1, stable=True)
    # Sorts that keep the order of equals, the least important first.
    order = order.gather(1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True))
    is_none = (~is_candidate).gather(1, order).byte()
    return order.gather(1, is_none.argsort(dim=1, stable=True))


def ndcg(ranked: RankedQueries, k: int | None = None, gain: Gain = "linear") -> Tensor:
    """Return the discounted gain of the first k over that of the ideal ranking, [B] float64.

    Args:
        ranked: queries in order.
        k: ranks that count; all where not given.
        gain: of grade g: g, or 2**g - 1 (Burges et al. 2005).
    """
    gained, best = _discounted(ranked.relevance, k, gain), _discounted(ranked.ideal, k, gain)
    return _ratio(gained, best)


def reciprocal_rank(
    ranked: RankedQueries, k: int | None = None, relevant_above: float = 0.0
) -> Tensor:
    """Return 1 / rank of the first relevant document, 0 where none is in the first k; [B] float64.

    Args:
        ranked: queries in order.
        k: ranks that count; all where not given.
        relevant_above: grades above it are relevant.
    """
    hits = _hits(ranked.relevance, k, relevant_above)
    if hits.shape[1] == 0:
        return hits.sum(1)
    return (hits / _ranks(hits)).amax(1)


def first_relevant(ranked: RankedQueries, relevant_above: float = 0.0) -> Tensor:
    """Return the rank of the first relevant document from 1, 0 where none is ranked; [B] int64."""
    hits = _hits(ranked.relevance, None, relevant_above) > 0
    if hits.shape[1] == 0:
        return hits.sum(1)
    return torch.where(hits.any(1), hits.byte().argmax(1) + 1, 0)


def average_precision(
    ranked: RankedQueries, k: int | None = None, relevant_above: float = 0.0
) -> Tensor:
    """Return the precision at each relevant document, summed, over the number of all relevant
    documents, [B] float64. Arguments as for `reciprocal_rank`."""
    hits = _hits(ranked.relevance, k, relevant_above)
    precisions = hits.cumsum(1) / _ranks(hits)
    return _ratio((precisions * hits).sum(1), _num_relevant(ranked, relevant_above))


def recall(ranked: RankedQueries, k: int | None = None, relevant_above: float = 0.0) -> Tensor:
    """Return the share of all relevant documents that is among the first k, [B] float64.

    Arguments as for `reciprocal_rank`."""
    found = _hits(ranked.relevance, k, relevant_above).sum(1)
    return _ratio(found, _num_relevant(ranked, relevant_above))


def precision(ranked: RankedQueries, k: int, relevant_above: float = 0.0) -> Tensor:
    """Return the share of relevant documents in the first k ranks, [B] float64.

    Arguments as for `reciprocal_rank`."""
    return _hits(ranked.relevance, k, relevant_above).sum(1) / k


class RankingMetrics(nn.ModuleDict):
    """Means over queries; every entry is a SumCount that is logged under its name.

    Args:
        names: `ndcg`, `mrr`, `map`, `recall`, `precision`, each with `@k` where only k ranks count.
        gain: of NDCG.
        relevant_above: grades above it are relevant, for all but NDCG.

    Raises:
        ValueError: a name that is none of these.
    """

    def __init__(
        self,
        names: Sequence[str] = DEFAULT_METRICS,
        gain: Gain = "linear",
        relevant_above: float = 0.0,
    ) -> None:
        super().__init__()
        self._measures = {name: measure(name, gain, relevant_above) for name in names}
        for name in names:
            self[name] = SumCount()

    def update(self, ranked: RankedQueries, weight: Tensor) -> None:
        """Add a batch.

        Args:
            ranked: its queries in order.
            weight: [B], 0 for a filler.
        """
        counted = weight.double() * ranked.is_evaluated
        for name, values in self.per_query(ranked).items():
            # Zero times a value that is no number would be one that is none.
            self[name].update(values.where(counted > 0, 0.0) * counted, counted)

    def per_query(self, ranked: RankedQueries) -> dict[str, Tensor]:
        """Return each metric of each query, [B] float64; without meaning where it is not
        evaluated."""
        return {name: measured(ranked) for name, measured in self._measures.items()}


def measure(name: str, gain: Gain, relevant_above: float) -> Callable[[RankedQueries], Tensor]:
    """Return the function that a name such as `ndcg@10` stands for.

    Raises:
        ValueError: there is none of that name, or its ranks are not a number above 0.
    """
    parts = re.fullmatch(r"(ndcg|mrr|map|recall|precision)(?:@([1-9]\d*))?", name)
    if parts is None or (parts[1] == "precision" and parts[2] is None):
        raise ValueError(
            f"metric {name!r} is unknown; write ndcg, mrr, map, recall or precision, with @ and a "
            "number of ranks above 0 (precision always), such as ndcg@10."
        )
    kind, k = parts[1], None if parts[2] is None else int(parts[2])
    if kind == "ndcg":
        return partial(ndcg, k=k, gain=gain)  # which `ddp_spawn` can send, unlike a lambda
    if k is not None and kind == "precision":
        return partial(precision, k=k, relevant_above=relevant_above)
    of_hits = {"mrr": reciprocal_rank, "map": average_precision, "recall": recall}
    return partial(of_hits[kind], k=k, relevant_above=relevant_above)


def paired_bootstrap(
    a: np.ndarray, b: np.ndarray, seed: int, num: int = 10_000, confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return the mean of a - b over queries and its percentile interval (low, high).

    Queries are drawn with replacement, both systems' values of a query together (Sakai 2006). The
    same seed gives the same interval.

    Args:
        a, b: [Q] values of the same queries in the same order.
        seed: of the drawing.
        num: samples drawn.
        confidence: share of the samples inside the interval.

    Raises:
        ValueError: the values are not of the same queries, none, or not finite.
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape or a.ndim != 1 or not a.size:
        raise ValueError(
            f"values of shapes {a.shape} and {b.shape} cannot be paired; give one value per query "
            "for both systems, and at least one query."
        )
    difference = a - b
    if not np.isfinite(difference).all():
        wrong = int(np.flatnonzero(~np.isfinite(difference))[0])
        raise ValueError(
            f"query {wrong} has the values {a[wrong]} and {b[wrong]}, which must be finite; leave "
            "queries out that were not evaluated."
        )
    generator, size = np.random.default_rng(seed), difference.size
    rows = max(1, BOOTSTRAP_ROWS // size)
    means = [
        difference[generator.integers(size, size=(min(rows, num - start), size))].mean(1)
        for start in range(0, num, rows)
    ]
    tail = (1 - confidence) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(difference.mean()), float(low), float(high)


def _discounted(grades: Tensor, k: int | None, gain: Gain) -> Tensor:
    grades = grades[:, :k]
    gains = grades if gain == "linear" else grades.exp2() - 1
    return (gains / (_ranks(grades) + 1).log2()).sum(1)


def _hits(grades: Tensor, k: int | None, relevant_above: float) -> Tensor:
    grades = grades[:, :k]
    return (grades > relevant_above).double().where(~grades.isnan(), torch.nan)


def _num_relevant(ranked: RankedQueries, relevant_above: float) -> Tensor:
    return (ranked.ideal > relevant_above).double().sum(1)


def _ranks(grades: Tensor) -> Tensor:
    return torch.arange(1, grades.shape[1] + 1, dtype=torch.float64, device=grades.device)


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 where there is no whole."""
    return torch.where(whole > 0, part / whole.clamp(min=1e-300), part * 0)
