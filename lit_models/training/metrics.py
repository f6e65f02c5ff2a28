"""Sums and counts of losses and metrics, exact over ragged batches and ranks."""

from typing import NamedTuple

import torch
from torch import Tensor
from torchmetrics import Metric


def in_float32(x: Tensor) -> Tensor:
    """Return x in float32, or as it is where that has fewer bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LossSum(NamedTuple):
    """One term of a loss: its total over the targets that count, and their number; both []."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, weight: Tensor) -> "LossSum":
        """Return the weighed sum of values and the sum of their weights, of one shape; in float32
        at least: half precision rounds a count above 256 and overflows with a sum above 65,504."""
        weight = in_float32(weight)
        return cls((in_float32(values) * weight).sum(), weight.sum())


class SampleResult(NamedTuple):
    """What `validation_step` and `test_step` return, and callbacks are given.

    Attributes:
        loss: [B], of each sample by itself; the larger, the worse.
        answers: name -> what the model said, [B] or [B, n] numbers, of the same n in every batch;
            `ExactModule.in_words` makes text of them.
        is_wrong: [B] bool; None where an answer is nearer or farther, not right or wrong.
        confidence: [B], from 0 to 1; None where the model has none.
        is_seen: [B] bool, whether training had the same text; None where nobody has looked.
    """

    loss: Tensor
    answers: dict[str, Tensor]
    is_wrong: Tensor | None = None
    confidence: Tensor | None = None
    is_seen: Tensor | None = None


class SumCount(Metric):
    """A mean kept as float64 sum and count, so that every sample weighs the same on any device.

    `update(total, count)` adds a batch; `compute()` is total / count, and NaN where nothing was
    counted: a 0 would look like a figure. The command line shows it as "–".
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        zero = torch.zeros((), dtype=torch.float64)
        self.add_state("total", zero, dist_reduce_fx="sum")
        self.add_state("count", zero.clone(), dist_reduce_fx="sum")

    def set_dtype(self, dst_type: torch.dtype | str) -> "SumCount":
        """Keep float64 whatever the precision of the module."""
        return self

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add one batch.

        Args:
            total: [] or [N], summed.
            count: [] or [N], summed.
        """
        self.total = self.total + total.detach().double().sum()
        self.count = self.count + count.detach().double().sum()

    def compute(self) -> Tensor:
        """Return the mean, [] float64."""
        return self.total / self.count


class Count(Metric):
    """A number of samples, kept as an integer: equal on any number of devices, not nearly so."""

    full_state_update = False
    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("number", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, is_counted: Tensor) -> None:
        """Add one batch. Args: is_counted [B] bool."""
        self.number = self.number + is_counted.detach().sum()

    def compute(self) -> Tensor:
        """Return the number, [] float64, which loggers take."""
        return self.number.double()
