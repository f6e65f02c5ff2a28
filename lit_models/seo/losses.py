"""Losses over the candidates of a query. Shapes: B queries, K candidates."""

import torch
from torch import Tensor

from lit_models.training.record import LossSum


def listwise_softmax(scores: Tensor, relevance: Tensor, weight: Tensor) -> LossSum:
    """Return ListNet's cross-entropy between grades and scores, in nats per query.

    Args:
        scores: [B, K], -inf where there is no candidate.
        relevance: [B, K] grades; NaN = unjudged, which takes no part.
        weight: [B], 0 for a filler.

    Source: Cao et al. 2007, "Learning to rank", top-one probabilities, with grades as the target.
    """
    takes_part = torch.isfinite(relevance) & torch.isfinite(scores)
    grades = relevance.masked_fill(~takes_part, 0.0).clamp(min=0)
    target = grades / grades.sum(1, keepdim=True).clamp(min=1e-9)
    logits = scores.masked_fill(~takes_part, -1e9)
    nats = -(target * logits.log_softmax(1)).sum(1)
    return LossSum((nats * weight).sum(), weight.sum())
