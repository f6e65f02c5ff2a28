"""InfoNCE over the documents of a whole optimizer step.

Shapes: B queries of this device, M documents of all devices, W width of vectors, R documents that
are known of a query.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from datamodules.search.queries import NO_DOCUMENT
from lit_models.training.metrics import LossSum


@dataclass(frozen=True)
class TemperatureOptions:
    """By what cosines are divided before they become probabilities.

    Args:
        start: its value at the beginning; also for good where it does not learn.
        learns: whether it is trained.
        lowest: it stays above this.
        highest: it stays below this.

    Raises:
        ValueError: not 0 < lowest < start < highest.
    """

    start: float = 0.05
    learns: bool = True
    lowest: float = 0.005
    highest: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.lowest < self.start < self.highest:
            raise ValueError(
                f"temperature.start must lie between lowest {self.lowest} and highest "
                f"{self.highest}, all above 0, got {self.start}."
            )


class Temperature(nn.Module):
    """A temperature between two bounds, which it nears and never sticks to.

    Its logarithm is a sigmoid of the parameter, stretched over the logarithms of the bounds.
    """

    def __init__(self, options: TemperatureOptions) -> None:
        super().__init__()
        bounds = torch.tensor([options.lowest, options.highest], dtype=torch.float64).log()
        self.low, self.width = float(bounds[0]), float(bounds[1] - bounds[0])
        share = (torch.tensor(options.start, dtype=torch.float64).log() - self.low) / self.width
        # In the dtype of all others: a checkpoint of a float64 run is read before Lightning
        # converts the module, and would lose half its digits in float32.
        self.position = nn.Parameter(torch.full((1,), share.logit().item()), options.learns)

    def forward(self) -> Tensor:
        """Return the temperature []."""
        return (self.low + self.width * self.position.sigmoid()).exp().squeeze(0)


def in_batch_loss(
    queries: Tensor,
    answers: Tensor,
    documents: Tensor,
    document: Tensor,
    known: Tensor,
    temperature: Tensor,
    weight: Tensor,
) -> LossSum:
    """Return the cross-entropy of finding each query's answer among all documents, in nats.

    A query's own answer is told by its vector, not by its place: nothing here depends on which
    part of the documents is this device's.

    Args:
        queries: [B, W] unit vectors.
        answers: [B, W] unit vectors of the documents that answer them.
        documents: [M, W] unit vectors of all documents of the step, answers included.
        document: [M] int64, their numbers; -1 = no negative of anything.
        known: [B, R] int64, documents that are no negatives of a query, its answer among them, so
            that copies of the answer are none either; -1 = none.
        temperature: [].
        weight: [B], 0 for a filler.

    Source: van den Oord et al. 2018, "Representation learning with contrastive predictive coding".
    """
    own = (queries * answers).sum(-1, keepdim=True) / temperature  # [B, 1]
    others = queries @ documents.T / temperature  # [B, M]
    is_known = (known[:, :, None] == document).any(1)
    others = others.masked_fill(is_known | (document == NO_DOCUMENT), -torch.inf)
    nats = torch.cat([own, others], 1).logsumexp(1) - own.squeeze(1)
    return LossSum.of(nats, weight)
