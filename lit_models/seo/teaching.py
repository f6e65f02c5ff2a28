"""A ranker's scores, which a retriever may learn. Shapes: B queries, K documents each, W width."""

from dataclasses import dataclass

import torch
from torch import Tensor

from datamodules.core.batches import RetrievalBatch
from datamodules.search.candidates import DISTILLED
from lit_models.training.metrics import LossSum


@dataclass(frozen=True)
class Distillation:
    """How a ranker's scores are learnt, which `data.negatives` reads from its run: as another
    order of a query's own documents, beside the answer among all.

    Args:
        weight: of this loss beside the other.
        temperature: by which the ranker's scores are divided; the retriever has its own.

    Source: Ren et al. 2021, RocketQAv2, equation 5, with a teacher that stands still.
    """

    weight: float = 1.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.weight <= 0 or self.temperature <= 0:
            raise ValueError(
                "distillation.weight and .temperature must be above 0, got "
                f"{self.weight} and {self.temperature}."
            )


def taught_terms(
    options: Distillation | None,
    queries: Tensor,
    documents: Tensor,
    batch: RetrievalBatch,
    temperature: Tensor,
) -> dict[str, LossSum]:
    """Return the divergence of the retriever's shares from the ranker's, in nats, times its weight;
    0 for a query of which fewer than two documents have a score. Nothing without options.

    Args:
        queries: [B, W] unit vectors; documents: [B * K, W].
        temperature: [] of the retriever.
    """
    if options is None:
        return {}
    scores = batch["teacher"]  # [B, K], NaN = none
    own = (queries[:, None] * documents.view(*scores.shape, -1)).sum(-1) / temperature
    takes_part = ~scores.isnan() & (~scores.isnan()).sum(1, keepdim=True).gt(1)
    hidden = own.new_tensor(-1e9)  # a share of 0, whose gradient is 0 too
    wanted = torch.where(takes_part, scores.to(own) / options.temperature, hidden).log_softmax(1)
    found = torch.where(takes_part, own, hidden).log_softmax(1)
    nats = (wanted.exp() * (wanted - found) * takes_part).sum(1)
    return {DISTILLED: LossSum.of(options.weight * nats, batch["weight"])}
