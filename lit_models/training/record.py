"""What one rank knows about the optimizer step under way: sums, counts and used sample ids."""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from datamodules.core.plan import digest_ids
from lit_models.training.optim import gradients
from lit_models.training.sharding import total_norm

_NUM_FLAGS = 3  # in front of a vector
_LIMB_BITS, _NUM_LIMBS = 21, 3  # 63 bits of digest in float64 sums that stay exact
_LIMB_MASK, _DIGEST_MASK = (1 << _LIMB_BITS) - 1, (1 << 63) - 1


class LossSum(NamedTuple):
    """One term of a loss: its total over the targets that count, and their number; both []."""

    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, values: Tensor, weight: Tensor) -> "LossSum":
        """Return the weighed sum of values and the sum of their weights, of one shape; in float32
        at least: half precision rounds a count above 256 and overflows with a sum above 65,504."""
        weight = _wide(weight)
        return cls((_wide(values) * weight).sum(), weight.sum())


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift of a signed integer


def hash_ids(ids: Tensor) -> Tensor:
    """Return [N] int64 with the bits of `datamodules.core.plan.hash_ids`, on the same device."""
    x = ids + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


class StepRecord:
    """Collects one optimizer step where it is computed, without waiting for a GPU.

    The vector that `vector` returns is summed over ranks; `read_vector` turns the sum into values.
    """

    def __init__(self) -> None:
        self.term_names: tuple[str, ...] = ()
        self.grad_norm: Tensor | None = None  # of this step, once `gradient_norm` was called
        self._sums: HostSums | DeviceSums | None = None
        # ids, which of them are no fillers, and loss of each micro-batch so far
        self._used: list[tuple[Tensor, Tensor, Tensor]] = []
        self._recent: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def add(
        self, sample_id: Tensor, weight: Tensor, terms: dict[str, LossSum], loss: Tensor
    ) -> None:
        """Add one micro-batch.

        Args:
            sample_id: [B] int64.
            weight: [B], 0 for fillers.
            terms: totals and counts on this rank.
            loss: [] this micro-batch's share of the step's loss.
        """
        self.term_names, loss = tuple(terms), loss.detach()
        on_host = loss.device.type == "cpu"
        # In a third of the time; numpy has no bfloat16, which a batch is in under bf16-true.
        by_numpy = on_host and weight.dtype == torch.float32
        used = torch.from_numpy(weight.numpy() > 0) if by_numpy else weight > 0
        self._used.append((sample_id, used, loss))
        if self._sums is None:
            self._sums = HostSums() if on_host else DeviceSums()
        values = [loss, *(v.detach() for term in terms.values() for v in term)]
        self._sums.add(sample_id, used, values)

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """Return the norm [] of the whole gradient as it was when first asked for in this step,
        which is before it is clipped; `None` where no parameter has a gradient. The first call is
        a collective where parameters are sharded."""
        if self.grad_norm is None and (grads := gradients(optimizer)):
            self.grad_norm = total_norm(grads)
        return self.grad_norm

    def suspects(self, step: int) -> tuple[list[int], list[int]]:
        """Return this rank's samples in micro-batches whose loss is not finite, and all of them.

        Args:
            step: one of the last two that ended.
        """
        parts = [
            (ids[used].tolist(), bool(torch.isfinite(loss)))
            for ids, used, loss in self._recent.get(step, [])
        ]
        wrong = [i for ids, is_finite in parts for i in ids if not is_finite]
        return wrong, [i for ids, _ in parts for i in ids]

    def vector(self, stop: bool, save: bool, step: int = 0) -> Tensor:
        """Return [8 + 2 terms] float64 for the sum over ranks, and start the next step.

        Args:
            stop: this rank asks all to stop.
            save: this rank asks all to save.
            step: the optimizer step that ended.
        """
        if self._sums is None:
            raise RuntimeError(
                "an optimizer step ended, but training_step never called exact_mean; the loss "
                "of an ExactModule must go through it."
            )
        vector, self._sums = self._sums.vector([float(stop), float(save)], self.grad_norm), None
        self._recent = {k: v for k, v in self._recent.items() if k == step - 1}
        self._recent[step], self._used = self._used, []
        self.grad_norm = None
        return vector


class HostSums:
    """Sums of one step on a CPU as plain numbers: small tensors would take several times as long.

    Has the bits of `DeviceSums`.
    """

    def __init__(self) -> None:
        self._sums: list[float] | None = None

    def add(self, sample_id: Tensor, used: Tensor, values: list[Tensor]) -> None:
        """Add one micro-batch.

        Args:
            sample_id: [B] int64.
            used: [B] bool, false for fillers.
            values: what is summed, each [].
        """
        ids = sample_id.numpy()[used.numpy()]
        digest = digest_ids(ids)
        limbs = [float((digest >> _LIMB_BITS * i) & _LIMB_MASK) for i in range(_NUM_LIMBS)]
        new = [*limbs, float(len(ids)), *map(float, values)]
        if self._sums is not None:
            new = [before + more for before, more in zip(self._sums, new, strict=True)]
        self._sums = new

    def vector(self, wishes: list[float], norm: Tensor | None) -> Tensor:
        """Return whether a sum or the norm is not finite, the wishes, and the sums; float64."""
        assert self._sums is not None
        numbers = self._sums if norm is None else [*self._sums, float(norm)]
        is_finite = all(map(math.isfinite, numbers))
        return torch.tensor([float(not is_finite), *wishes, *self._sums], dtype=torch.float64)


class DeviceSums:
    """Sums of one step on a GPU, which is not waited for; arguments as those of `HostSums`."""

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(self, sample_id: Tensor, used: Tensor, values: list[Tensor]) -> None:
        """Add one micro-batch."""
        digest = torch.where(used, hash_ids(sample_id), 0).sum()
        limbs = (digest >> _shifts(digest.device)) & _LIMB_MASK
        counts = torch.cat([limbs, used.sum(0, keepdim=True)])
        sums = torch.cat([counts.double(), torch.stack(values).double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def vector(self, wishes: list[float], norm: Tensor | None) -> Tensor:
        """Return whether a sum or the norm is not finite, the wishes, and the sums; float64."""
        assert self._sums is not None
        finite = torch.isfinite(self._sums).all()
        if norm is not None:
            finite = finite & torch.isfinite(norm.to(finite.device))
        flags = self._sums.new_zeros(_NUM_FLAGS)
        flags[0] = ~finite
        for place, wish in enumerate(wishes, start=1):
            if wish:  # filled, for a copy of a list would make the host wait for the whole step
                flags[place].fill_(wish)
        return torch.cat([flags, self._sums])


@cache
def _shifts(device: torch.device) -> Tensor:
    """Return [limbs]; kept, for making it takes a GPU two more kernels."""
    return _LIMB_BITS * torch.arange(_NUM_LIMBS, device=device)


def without_samples(vector: Tensor) -> Tensor:
    """Return the flags of a `StepRecord.vector` alone, for a rank whose samples another tells."""
    vector[_NUM_FLAGS:] = 0
    return vector


def share_of_step(
    terms: dict[str, LossSum], batch: dict[str, Any], term_weights: dict[str, float]
) -> Tensor:
    """Return what a micro-batch adds to the mean loss of its optimizer step []; the shares of all
    its micro-batches sum to that loss. Arguments as in `ExactModule.exact_mean`."""
    share: Tensor | None = None
    for name, (total, _) in terms.items():
        factor = term_weights.get(name, 1.0)
        if factor == 0:
            continue  # reported beside the loss; the plan need not count it
        # A term that counts nothing in this step has total 0: a zero loss, never NaN.
        part = _wide(total) * factor / max(1.0, batch["step_denominators"][name])
        share = part if share is None else share + part
    return torch.zeros((), device=batch["weight"].device) if share is None else share


class StepSummary(NamedTuple):
    """One optimizer step over all ranks."""

    is_finite: bool
    stop: bool
    save: bool
    digest: str
    num_samples: int
    loss: float
    terms: dict[str, tuple[float, float]]


def read_vector(values: list[float], term_names: tuple[str, ...]) -> StepSummary:
    """Return what the numbers of a vector say that was summed over ranks."""
    flags, limbs = values[:_NUM_FLAGS], values[_NUM_FLAGS : _NUM_FLAGS + _NUM_LIMBS]
    rest = values[_NUM_FLAGS + _NUM_LIMBS :]
    # Each rank added several micro-batches: limbs have carried, and are put together with carry.
    digest = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(limbs)) & _DIGEST_MASK
    pairs = rest[2:]
    terms = {n: (pairs[2 * i], pairs[2 * i + 1]) for i, n in enumerate(term_names)}
    return StepSummary(
        is_finite=flags[0] == 0,
        stop=flags[1] > 0,
        save=flags[2] > 0,
        digest=f"{digest:016x}",
        num_samples=int(rest[0]),
        loss=rest[1],
        terms=terms,
    )
