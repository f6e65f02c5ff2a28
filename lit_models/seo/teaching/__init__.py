"""What else a retriever may learn: vectors of several sizes, and a ranker's scores.

Shapes: B queries, K documents of each, M of the step, W width of vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.core.batches import RetrievalBatch
from datamodules.search.lists import DISTILLED
from lit_models.seo.networks import in_batch_loss
from lit_models.training.metrics import LossSum


def shortened(vectors: Tensor, size: int | None) -> Tensor:
    """Return the first numbers of unit vectors [R, W], made unit ones; all without a size."""
    return vectors if size is None else F.normalize(vectors[:, :size], dim=-1)


def nested(
    sizes: Sequence[int], queries: Tensor, answers: Tensor, documents: Tensor, *rest: Tensor
) -> LossSum:
    """Return the mean of `in_batch_loss` over vectors of these sizes; of whole ones without any.

    Source: Kusupati et al. 2022, Matryoshka representation learning, equation 1, equal weights.
    """
    given = (queries, answers, documents)
    losses = [in_batch_loss(*(shortened(x, n) for x in given), *rest) for n in sizes or (None,)]
    total = torch.stack([loss.total for loss in losses]).sum() / len(losses)
    return LossSum(total, losses[0].count)


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
