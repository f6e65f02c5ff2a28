"""The loss of a language model as sums and counts over target tokens.

Shapes: R rows, T positions, D hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from datamodules.batches import TextBatch
from lit_models.training.record import LossSum

IGNORED = -100


@dataclass(frozen=True)
class LossOptions:
    """What is trained on.

    Args:
        label_smoothing: share of a target's mass that goes to all tokens alike, 0 to below 1.
        z_loss: factor of the squared logarithm of the softmax's normaliser.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


def token_nats(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the negative log-likelihood of each label in nats [R, T], 0 where it is ignored.

    Args:
        hidden: [R, T, D].
        weight: [V, D], of the head.
        labels: [R, T] int64.
    """
    logits = F.linear(hidden, weight).float() if hidden.dtype != weight.dtype else F.linear(
        hidden, weight
    )
    nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return nats.view_as(labels)


def counted(batch: TextBatch) -> Tensor:
    """Return the weight of each position [R, T]: that of its sample, 0 without a label."""
    return batch["weight"][batch["sample_index"]] * (batch["labels"] != IGNORED)


def language_model_loss(hidden: Tensor, weight: Tensor, batch: TextBatch) -> LossSum:
    """Return the sum of nats over target tokens and their number."""
    weights = counted(batch)
    nats = token_nats(hidden, weight, batch["labels"])
    return LossSum((nats * weights.to(nats)).sum(), weights.sum())
