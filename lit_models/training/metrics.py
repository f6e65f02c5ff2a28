"""Sums and counts of losses and metrics, exact over ragged batches and ranks."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from datamodules.core.batches import list_of_texts

# Of SplitMix64, as signed integers: 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB.
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def in_float32(x: Tensor) -> Tensor:
    """Return x in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class LossSum(NamedTuple):
    """One term of a loss: its total over the targets that count, and their number; both []."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, weight: Tensor) -> "LossSum":
        """Return the weighted sum of values, and the sum of the weights of the same shape; half
        precision would round counts above 256 and overflow in sums above 65,504."""
        weight = in_float32(weight)
        return cls((in_float32(values) * weight).sum(), weight.sum())


class SampleResult(NamedTuple):
    """Results of `test_step` for the table of errors; `None` for unknown values.

    Attributes:
        loss: [B], the loss of each sample; larger is worse.
        answers: name -> [B] or [B, n] numbers, with the same n in every batch;
            `ExactModule.in_words` turns them into text.
        is_wrong: [B] bool.
        confidence: [B], from 0 to 1.
        is_seen: [B] bool, whether the training data hold the same text.
    """

    loss: Tensor
    answers: dict[str, Tensor]
    is_wrong: Tensor | None = None
    confidence: Tensor | None = None
    is_seen: Tensor | None = None


class SumCount(Metric):
    """A mean kept as float64 sum and count, so that every sample weighs the same on any device.

    `update(total, count)` adds a batch; `compute()` is total / count, and NaN if nothing was
    counted, since 0 would look like a result. The command line shows NaN as "–".
    """

    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Add one batch, the sums of total and count, [] or [N]."""
        self.total = self.total + total.detach().double().sum()
        self.count = self.count + count.detach().double().sum()

    def compute(self) -> Tensor:
        """Return the mean, [] float64."""
        return self.total / self.count


def hash_ids(ids: Tensor) -> Tensor:
    """Return [N] int64 with the bits of `datamodules.core.plan.hash_ids`, on the device of ids."""
    x = ids + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift of a signed integer


@contextmanager
def float32_on(device: torch.device | str) -> Iterator[None]:
    """Create new tensors on a device and in float32, whatever the caller's context."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(dtype)


def texts_for(module: Any, texts: Iterable[Any], are_texts: bool = True) -> list[Any]:
    """Like `list_of_texts`, but RuntimeError if the module has no trained network yet. Without
    `are_texts` a value may be something else, such as a chat, which its reader checks."""
    if not module.is_built:
        name, is_away = type(module).__name__, module.early_weights is not None
        was = "was trained by spawned processes" if is_away else "has not been trained"
        raise RuntimeError(
            f"this {name} {was}: load a run's checkpoint with {name}.load_from_checkpoint(path)."
        )
    return list_of_texts(texts) if are_texts or isinstance(texts, str) else list(texts)


_evaluations: dict[nn.Module, list[Any]] = {}  # number under way, parts' modes before the first
_lock = Lock()


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode; when no thread evaluates it any more, put each of its parts back
    into its former mode."""
    with _lock:
        modes = [(part, part.training) for part in module.modules()]
        mine = _evaluations.setdefault(module, [0, modes])
        mine[0] += 1
        module.eval()
    try:
        yield
    finally:
        with _lock:
            mine[0] -= 1
            for part, mode in [] if mine[0] else _evaluations.pop(module)[1]:
                part.training = mode
