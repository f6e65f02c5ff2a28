"""The terms of a lens's loss, each a number per sample.

Shapes: B samples, D features, t words, P places of a document,
V vocabulary.
"""

from dataclasses import dataclass, fields
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from datamodules.activations.dataset import TERMS
from lit_models.consistency_lens.schedules import LossWeight

SMALL_DEVIATION = 1e-4  # of errors in units of the variance: below, they are as good as equal
MAX_NATS = 50.0  # by which a word is improbable: an impossible one must not outweigh all others
JOINT = ("reconstruction", "effect")  # terms from which both networks learn together


@dataclass(frozen=True)
class LensLosses:
    """Weights of the terms, each over the optimizer steps of the run.

    Args:
        teacher_text: nats per word of the teacher's text, given the activation (warm start).
        teacher_reconstruction: squared error of what is rebuilt from the teacher's text.
        reconstruction: squared error of what is rebuilt from the verbalizer's own words.
        reference: nats per word by which the verbalizer's choices leave those of the reference.
        effect: nats by which the subject's next words change with the rebuilt activation, mean
            over its position and up to 8 that follow it.
        fluency: nats per word by which the choices leave those of the subject as a language model.
        entropy: nats per word of the verbalizer's choices; a positive weight makes them surer.
        group_size: explanations drawn for each activation, of which the verbalizer learns by a
            policy gradient; 0 lets the gradient pass through the words (straight-through).
    """

    teacher_text: LossWeight = LossWeight()  # noqa: RUF009 - frozen
    teacher_reconstruction: LossWeight = LossWeight()  # noqa: RUF009
    reconstruction: LossWeight = LossWeight()  # noqa: RUF009
    reference: LossWeight = LossWeight()  # noqa: RUF009
    effect: LossWeight = LossWeight()  # noqa: RUF009
    fluency: LossWeight = LossWeight()  # noqa: RUF009
    entropy: LossWeight = LossWeight()  # noqa: RUF009
    group_size: int = 0

    def __post_init__(self) -> None:
        assert tuple(field.name for field in fields(self)) == (*TERMS, "group_size")
        if self.group_size == 1 or self.group_size < 0:
            raise ValueError(
                f"losses.group_size must be 0 or at least 2, got {self.group_size}: an explanation "
                "is worth more or less than others of its group; usual is 4 to 16."
            )
        if not any(getattr(self, name).weight for name in TERMS):
            raise ValueError(
                "every weight of losses is 0, so there is nothing to learn; give one, such as "
                "losses.reconstruction.weight 1."
            )

    def at(self, step: int) -> dict[str, float]:
        """Return the terms that count at an optimizer step, with their weights."""
        weights = {name: term.at(step) for name, term in self._given.items()}
        return {name: weight for name, weight in weights.items() if weight}

    @cached_property
    def _given(self) -> dict[str, LossWeight]:
        """The terms that have a weight at any step."""
        terms = {name: getattr(self, name) for name in TERMS}
        return {name: term for name, term in terms.items() if term.weight}

    @cached_property
    def joint_start(self) -> int | None:
        """First step at which the verbalizer's own words are rebuilt; none where they never are."""
        terms = [getattr(self, name) for name in JOINT]
        return min((term.begin for term in terms if term.weight), default=None)


def precise(values: Tensor) -> Tensor:
    """Return values in float32, or in float64 where they are."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def squared_error(rebuilt: Tensor, activation: Tensor, variance: Tensor) -> Tensor:
    """Return [B]: mean square over features, in units of the training part's variance."""
    return (precise(rebuilt) - precise(activation)).square().mean(-1) / variance


def text_nats(logits: Tensor, token_ids: Tensor) -> Tensor:
    """Return [B]: mean nats of the words of a text. Args: logits [B, t, V], token_ids [B, t]."""
    return F.cross_entropy(logits.mT, token_ids, reduction="none").mean(-1)


def divergence(logits: Tensor, other: Tensor) -> Tensor:
    """Return [B]: mean over words of KL(softmax(logits) || softmax(other)), both [B, t, V].

    What `other` says of a word is cut off, and not the sum: its gradient must not vanish where the
    two differ most.
    """
    own = logits.log_softmax(-1)
    against = other.log_softmax(-1).clamp(min=-MAX_NATS)
    return (own.exp() * (own - against)).sum(-1).mean(-1)


def advantages(rewards: Tensor) -> Tensor:
    """Return [B, K]: by how many deviations of its group [B, K] each reward is above the mean; 0 in
    a group of equals."""
    away = rewards - rewards.mean(1, keepdim=True)
    deviation = away.square().mean(1, keepdim=True).sqrt()
    return away / deviation.clamp(min=SMALL_DEVIATION)


def entropy(logits: Tensor) -> Tensor:
    """Return [B]: mean nats of the choices, logits [B, t, V]."""
    own = logits.log_softmax(-1)
    return -(own.exp() * own).sum(-1).mean(-1)


def effect(true: Tensor, changed: Tensor, counts: Tensor) -> Tensor:
    """Return [B]: mean over the places that count of KL(true || changed).

    Args:
        true: [B, P, V] logits of the subject at the position and those that follow it.
        changed: as true, with another activation at the position.
        counts: [B, P] bool.
    """
    own = precise(true).log_softmax(-1)
    nats = (own.exp() * (own - precise(changed).log_softmax(-1))).sum(-1)  # [B, P]
    return (nats * counts).sum(-1) / counts.sum(-1)
