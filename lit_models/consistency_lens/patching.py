"""What becomes of a subject's next words when an activation is replaced.

Shapes: B rows, T tokens, D features, P places that are looked at, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from datamodules.core.batches import ActivationBatch
from lit_models.consistency_lens.hooks import output_edited, output_kept, outputs_given
from lit_models.consistency_lens.reading import read
from lit_models.consistency_lens.subject import Subject

FOLLOWING = 8  # positions behind the replaced one that are looked at
MOST_NUMBERS = 1 << 24  # logits that are worked on at once


class Effect(NamedTuple):
    """What a replaced activation does, all [B] float64.

    nats: KL(true || patched) of the next word at the position. following_nats: sum of it over the
    positions after it. num_following: their number. next_nats: nats of the next word by which the
    patched subject is worse than the true one.
    """

    nats: Tensor
    following_nats: Tensor
    num_following: Tensor
    next_nats: Tensor


class PatchedSubject:
    """One batch in the subject; what lies below the activation is computed once.

    Args:
        subject: of the activations.
        batch: the documents, and the position in each.

    Attributes:
        true: [B, P, V], the logits at the position and the `FOLLOWING` ones behind it.
        counts: [B, P] bool, places whose next word the document holds.
    """

    def __init__(self, subject: Subject, batch: ActivationBatch) -> None:
        self.subject, self.ids = subject, batch["input_ids"]
        self.rows = torch.arange(len(self.ids), device=self.ids.device)
        self.position, last = batch["position"], batch["lengths"] - 2
        steps = torch.arange(1 + FOLLOWING, device=self.ids.device)
        places = self.position[:, None] + steps  # [B, P]
        self.counts = places <= last[:, None]
        self.places = torch.minimum(places, last[:, None])
        with output_kept(subject.block) as self.below:
            hidden = read(subject.network, self.ids)
        self.true = self._logits(hidden)

    def effect(self, replacement: Tensor) -> Effect:
        """Return what activations [B, D] in the place of the true ones do."""
        changed = self.changed(replacement)
        next_word = self.ids[self.rows, self.position + 1]
        size = max(1, MOST_NUMBERS // changed[0].numel())
        found = []
        for part in self.rows.split(size):
            own, other = (x[part].double().log_softmax(-1) for x in (self.true, changed))
            nats = (own.exp() * (own - other)).sum(-1) * self.counts[part]  # [b, P]
            word = next_word[part, None]
            worse = (own[:, 0] - other[:, 0]).gather(1, word)[:, 0]
            found.append(torch.stack([nats[:, 0], nats[:, 1:].sum(-1), worse]))
        nats, following, worse = torch.cat(found, dim=1)
        return Effect(nats, following, self.counts[:, 1:].sum(-1).double(), worse)

    def changed(self, replacement: Tensor) -> Tensor:
        """Return the logits [B, P, V] with activations [B, D] in the place of the true ones, from
        the blocks above them alone; gradients pass through."""

        def patch(output: Tensor) -> Tensor:
            return output.index_put((self.rows, self.position), replacement.to(output.dtype))

        blocks = self.subject.network.blocks()[: self.subject.layer + 1]
        with outputs_given(blocks, self.below), output_edited(self.subject.block, patch):
            return self._logits(read(self.subject.network, self.ids))

    def _logits(self, hidden: Tensor) -> Tensor:
        """[B, P, V] at the places that are looked at."""
        return self.subject.network.head(hidden[self.rows[:, None], self.places])
