"""What is learnt of a text: one head per kind of label, with its loss.

Shapes: B texts, D hidden, P outputs of a head, L levels, classes or labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.training.metrics import LossSum

LossName = Literal["mse", "huber", "mae", "cumulative", "cross_entropy"]
LOSSES: dict[str, tuple[LossName, ...]] = {  # of each kind, the default first
    "regression": ("mse", "huber", "mae"),
    "ordinal": ("cumulative", "cross_entropy"),
    "binary": ("cross_entropy",),
    "multiclass": ("cross_entropy",),
    "multilabel": ("cross_entropy",),
}
SMALLEST_GAP = 1e-3  # between thresholds, so that every level keeps a probability


@dataclass(frozen=True)
class HeadOptions:
    """How a head is learnt.

    Args:
        loss: regression: `mse`, `huber` (from one standard deviation on) or `mae`, of labels in
            standard deviations of the training rows; ordinal: `cumulative` or `cross_entropy`; the
            others `cross_entropy`. None takes the first of these.
        weight: factor of the loss; 0 reports the head without training it.

    Raises:
        ValueError: a negative weight.
    """

    loss: LossName | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.weight < 0:
            raise ValueError(f"a head's weight must be 0 or more, got {self.weight}.")

    def loss_of(self, name: str, kind: str) -> LossName:
        """Return the loss of a head of this name and kind.

        Raises:
            ValueError: the kind has no such loss.
        """
        loss = self.loss or LOSSES[kind][0]
        if loss not in LOSSES[kind]:
            raise ValueError(
                f'model.heads.{name}: loss "{loss}" does not fit a {kind} head; take '
                f"{' or '.join(LOSSES[kind])}."
            )
        return loss


class Head(nn.Module):
    """A vector to numbers, one number or one per level, class or label.

    Args:
        facts: of the recipe: `kind`, `classes`, and of a regression `mean` and `std`.
        loss: one that fits the kind.
        width: D.
    """

    def __init__(self, facts: dict[str, Any], loss: LossName, width: int) -> None:
        super().__init__()
        self.kind, self.loss_name = facts["kind"], loss
        self.mean, self.std = facts.get("mean", 0.0), facts.get("std", 1.0)
        levels = len(facts["classes"] or ())
        if loss == "cumulative":
            # Thresholds take the place of the bias.
            self.output = nn.Linear(width, 1, bias=False)
            start = torch.linspace(-1.0, 1.0, levels - 1) * (levels - 2) / 2
            self.first = nn.Parameter(start[:1].clone())
            self.gaps = nn.Parameter(torch.full((levels - 2,), 0.5))
        else:
            size = levels if self.kind in ("ordinal", "multiclass", "multilabel") else 1
            self.output = nn.Linear(width, size)

    def forward(self, vectors: Tensor) -> Tensor:
        """Return [B, P] of vectors [B, D]: a value in standard deviations, logits, or of
        `cumulative` log-probabilities of the levels."""
        scores = self.output(vectors)
        return self._log_levels(scores) if self.loss_name == "cumulative" else scores

    def loss(self, outputs: Tensor, target: Tensor, is_labelled: Tensor, weight: Tensor) -> LossSum:
        """Return the loss over the labels that are there.

        Args:
            outputs: [B, P] of `forward`.
            target: [B], or [B, L] of a multilabel head; any number where there is no label.
            is_labelled: bool, as target.
            weight: [B], 0 for a filler.
        """
        counted = is_labelled * (weight if target.dim() == 1 else weight[:, None])
        # Zero times a gradient that is no number would be one that is none.
        losses = self._losses(outputs, target.to(outputs.dtype).where(counted > 0, 0.0))
        return LossSum.of(losses, counted)

    def loss_of_texts(self, outputs: Tensor, target: Tensor, is_labelled: Tensor) -> Tensor:
        """Return the mean loss over the labels of each text [B], 0 where it has none; arguments as
        for `loss`."""
        losses = self._losses(outputs, target.to(outputs.dtype).where(is_labelled, 0.0))
        known = is_labelled.to(losses.dtype).reshape(len(losses), -1)
        return (losses.reshape(known.shape) * known).sum(1) / known.sum(1).clamp(min=1)

    def prediction(self, outputs: Tensor) -> Tensor:
        """Return [B, P] float64: a regression's value in the unit of its labels, else the
        probabilities of the positive class, of the levels, classes or labels."""
        outputs = outputs.double()
        if self.kind == "regression":
            return outputs * self.std + self.mean
        if self.kind in ("binary", "multilabel"):
            return outputs.sigmoid()
        return outputs.softmax(-1)

    def _losses(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.kind in ("ordinal", "multiclass"):
            return F.cross_entropy(outputs, target.long(), reduction="none")
        if self.kind == "multilabel":
            return F.binary_cross_entropy_with_logits(outputs, target, reduction="none")
        single = outputs.squeeze(-1)
        if self.kind == "binary":
            return F.binary_cross_entropy_with_logits(single, target, reduction="none")
        scaled = (target - self.mean) / self.std
        if self.loss_name == "mse":
            return (single - scaled) ** 2
        if self.loss_name == "huber":
            return F.huber_loss(single, scaled, reduction="none")
        return (single - scaled).abs()

    def _log_levels(self, scores: Tensor) -> Tensor:
        """Log-probabilities [B, L] of proportional odds: P(level <= k) = sigmoid(threshold k -
        score), thresholds ascending (McCullagh 1980, Regression Models for Ordinal Data)."""
        steps = F.softplus(self.gaps) + SMALLEST_GAP
        distance = torch.cat([self.first, self.first + steps.cumsum(0)]) - scores  # [B, L - 1]
        # sigmoid(b) - sigmoid(a) = sigmoid(b) sigmoid(-a) (1 - exp(a - b)), without cancellation
        lowest, highest = F.logsigmoid(distance[:, :1]), F.logsigmoid(-distance[:, -1:])
        between = F.logsigmoid(distance[:, 1:]) + F.logsigmoid(-distance[:, :-1])
        return torch.cat([lowest, between + torch.log(-torch.expm1(-steps)), highest], 1)


def baseline(facts: dict[str, Any]) -> Tensor:
    """Return what `Head.prediction` would be [P] float64 for someone who has read no text: the
    mean of the training labels, or the shares of classes."""
    if facts["kind"] == "regression":
        return torch.tensor([facts["mean"]], dtype=torch.float64)
    shares = torch.tensor(facts["shares"], dtype=torch.float64)
    return shares[1:] if facts["kind"] == "binary" else shares


def said(facts: dict[str, Any], prediction: Sequence[float]) -> str:
    """Return the prediction [P] of one text in words: the likeliest level or class, the labels that
    are likelier than not, or the number itself."""
    if facts["kind"] in ("regression", "binary"):
        return f"{prediction[0]:.3g}"
    classes = [str(name) for name in facts["classes"]]
    if facts["kind"] == "multilabel":
        return " ".join(n for n, p in zip(classes, prediction, strict=True) if p > 0.5)
    return classes[max(range(len(classes)), key=lambda place: prediction[place])]
