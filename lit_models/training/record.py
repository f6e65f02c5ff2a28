"""What one rank knows about the optimizer step under way: sums, counts and used sample ids."""

from typing import NamedTuple

import torch
from torch import Tensor

_LIMB_BITS, _NUM_LIMBS = 21, 3  # 63 bits of digest in float64 sums that stay exact
_DIGEST_MASK = (1 << 63) - 1


class LossSum(NamedTuple):
    """One term of a loss: its total over the targets that count, and their number; both []."""

    total: Tensor
    count: Tensor


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical shift of a signed integer


def hash_ids(ids: Tensor) -> Tensor:
    """Return [N] int64 with the bits of `datamodules.plan.hash_ids`, without leaving the device."""
    x = ids + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _MIX_1
    x = (x ^ _shifted(x, 27)) * _MIX_2
    return x ^ _shifted(x, 31)


class StepRecord:
    """Collects one optimizer step on the device, without a synchronisation.

    The vector that `vector` returns is summed over ranks; `read` turns the sum into values.
    """

    def __init__(self) -> None:
        self.term_names: tuple[str, ...] = ()
        self.grad_norm: Tensor | None = None
        self._sums: Tensor | None = None
        self._shifts: Tensor | None = None  # [limbs], on the device
        self._used: list[tuple[Tensor, Tensor]] = []  # ids and loss of each micro-batch so far
        self._recent: dict[int, list[tuple[Tensor, Tensor]]] = {}

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
        used, loss = weight > 0, loss.detach()
        digest = torch.where(used, hash_ids(sample_id), 0).sum()
        if self._shifts is None or self._shifts.device != digest.device:
            self._shifts = _LIMB_BITS * torch.arange(_NUM_LIMBS, device=digest.device)
        limbs = (digest >> self._shifts) & ((1 << _LIMB_BITS) - 1)
        self.term_names = tuple(terms)
        self._used.append((torch.where(used, sample_id, -1), loss))
        counts = torch.cat([limbs, used.sum(0, keepdim=True)])
        values = torch.stack([loss, *(v.detach() for term in terms.values() for v in term)])
        sums = torch.cat([counts.double(), values.double()])
        self._sums = sums if self._sums is None else self._sums + sums

    def suspects(self, step: int) -> tuple[list[int], list[int]]:
        """Return this rank's samples in micro-batches whose loss is not finite, and all of them.

        Args:
            step: one of the last two that ended.
        """
        used = self._recent.get(step, [])
        wrong = [ids for ids, loss in used if not bool(torch.isfinite(loss))]
        return _real(wrong), _real([ids for ids, _ in used])

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
        finite = torch.isfinite(self._sums).all()
        if self.grad_norm is not None:
            finite = finite & torch.isfinite(self.grad_norm.to(finite.device))
        wishes = self._sums.new_tensor([float(stop), float(save)])
        vector, self._sums = torch.cat([(~finite).double()[None], wishes, self._sums]), None
        self._recent = {k: v for k, v in self._recent.items() if k == step - 1}
        self._recent[step], self._used = self._used, []
        return vector


def _real(parts: list[Tensor]) -> list[int]:
    return [i for ids in parts for i in ids.tolist() if i >= 0]


class StepSummary(NamedTuple):
    """One optimizer step over all ranks."""

    is_finite: bool
    stop: bool
    save: bool
    digest: str
    num_samples: int
    loss: float
    terms: dict[str, tuple[float, float]]


def read_vector(vector: Tensor, term_names: tuple[str, ...]) -> StepSummary:
    """Return the values in a vector that was summed over ranks; waits for the device."""
    values = vector.tolist()
    flags, limbs, rest = values[:3], values[3 : 3 + _NUM_LIMBS], values[3 + _NUM_LIMBS :]
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
