"""What is reported of a language model: nats, perplexity and bits per byte, all exact."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.core.batches import IGNORED, TextBatch
from lit_models.training.metrics import LossSum, SumCount


class Perplexity(SumCount):
    """The exponential of the mean nats per token."""

    def compute(self) -> Tensor:
        """Return the perplexity, [] float64; infinity where it is beyond all numbers."""
        return super().compute().exp()


class BitsPerByte(SumCount):
    """Bits per UTF-8 byte of the text that the targets spell: comparable over tokenizers."""

    def compute(self) -> Tensor:
        """Return the bits per byte, [] float64."""
        return super().compute() / math.log(2)


class TextMetrics(nn.ModuleDict):
    """The metrics of one split, by the name that they are logged under.

    Args:
        byte_lengths: [V] bytes that each token spells; none where the tokenizer does not say, and
            there are no bits per byte.
    """

    def __init__(self, byte_lengths: Tensor | None) -> None:
        super().__init__({"loss": SumCount(), "perplexity": Perplexity()})
        self.register_buffer("byte_lengths", byte_lengths, persistent=False)
        if byte_lengths is not None:
            self["bits_per_byte"] = BitsPerByte()

    def add_batch(self, nats: LossSum, batch: TextBatch) -> None:
        """Add one batch.

        Args:
            nats: sum over its targets that count, and their number.
            batch: whose labels they are.
        """
        for name in ("loss", "perplexity"):
            self[name].update(*nats)
        if "bits_per_byte" in self:
            labels = batch["labels"]
            weights = batch["weight"][batch["sample_index"]] * (labels != IGNORED)
            spelled = self.byte_lengths[labels.clamp(min=0)]  # [R, T]
            self["bits_per_byte"].update(nats.total, (spelled * weights).double().sum())


def byte_table(byte_lengths: Any, vocab_size: int) -> Tensor | None:
    """Return the lengths [V] int64 for a vocabulary that may be larger than the tokenizer's.

    Args:
        byte_lengths: [tokenizer's size] integers, or none.
        vocab_size: V.
    """
    if byte_lengths is None:
        return None
    table = torch.zeros(vocab_size, dtype=torch.int64)
    table[: len(byte_lengths)] = torch.as_tensor(byte_lengths)
    return table
