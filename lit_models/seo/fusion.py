"""Two rankings as one: BM25 finds the words, an encoder what they mean.

As many documents of the retriever are fused as BM25 was asked for, however many it ranks: what a
document gets depends neither on the ranks that a metric looks at nor on those that are written.

Shapes: Q queries, A and F documents of the two rankings.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datamodules.search.queries import NO_DOCUMENT

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
