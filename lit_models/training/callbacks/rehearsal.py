"""`micro_batch_size: auto`: the largest that fits, found by rehearsing the heaviest batches."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from datamodules.core.plan import Rehearsed, derive_batching, smaller_shares
from datamodules.core.planned import PlannedDataModule
from datamodules.heaviest import heaviest_batches
from lit_models.training.ledger import is_distributed
from lit_models.training.meters import GIB, DeviceMeter, HostMeter, Meter
from lit_models.training.throughput.flops import is_compiled
from lit_models.training.trial import try_batch, without_trace

# An expectation is no measurement: the next size is tried unless it clearly exceeds what is there.
CLEARLY_TOO_MUCH = 1.05


class Rehearsal(Callback):
    """Tries the longest and the widest batch of the run before its first step, then forgets it.

    Sizes grow from 1 until the next one would not fit, so that no trial goes far beyond what is
    there. All ranks try the same batches, and the one with least room decides. It runs on a GPU,
    or where the data has a `memory_budget_gib`; elsewhere `auto` is the whole share of a device.

    Args:
        meter: measures memory; none takes the device's.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Model and optimizer are on the device, the loaders are not made yet."""
        data = trainer.datamodule
        if not isinstance(data, PlannedDataModule) or not data.seeks_micro_batch:
            return
        meter = self.meter or meter_for(trainer, data)
        if meter is None:
            return
        if not pl_module.automatic_optimization:
            rank_zero_warn(
                f"micro_batch_size is auto, but {type(pl_module).__name__} optimizes by itself and "
                "cannot be rehearsed: each device takes its whole share; give a number if that is "
                "too much."
            )
            return
        data.take_micro_batch(self._rehearse(trainer, pl_module, data, meter))
        loaded = trainer._checkpoint_connector._loaded_checkpoint
        if loaded and hasattr(pl_module, "settle_progress"):
            pl_module.settle_progress(loaded)  # it was rescaled to the accumulation before

    def _rehearse(
        self, trainer: Trainer, module: LightningModule, data: PlannedDataModule, meter: Meter
    ) -> Rehearsed:
        sizes = smaller_shares(data.num_replicas, data.global_batch_size)
        if not getattr(module, "may_accumulate", True):
            sizes = sizes[-1:]
        with without_trace(trainer, module) as copied_bytes:
            # Copies of a CPU run lie in the memory that is measured; no real step has them.
            copied_bytes *= trainer.strategy.root_device.type == "cpu"
            trial = _Trial(trainer, module, data, meter, copied_bytes)
            trial.peak_bytes(sizes[0])  # makes gradients and moments, which later steps begin with
            found = largest_that_fits(sizes, trial.load)
        meter.start()  # gives back what the trials took
        if is_compiled(module):
            # Code that has met several sizes leaves the size open, and is slower for it.
            torch.compiler.reset()
        if found is None:
            raise RuntimeError(_too_large(data, meter, sizes[0], trial.loads[sizes[0]]))
        capacity_gib = meter.capacity_bytes / GIB
        return Rehearsed(found, trial.loads[found] * capacity_gib, capacity_gib)


class _Trial:
    """One size after the other on this rank; the same on all ranks.

    Attributes:
        loads: micro-batch -> share of the memory that it took, where it took the largest.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        data: PlannedDataModule,
        meter: Meter,
        copied_bytes: int,
    ) -> None:
        self.trainer, self.module, self.data = trainer, module, data
        self.meter, self.copied_bytes = meter, copied_bytes
        self.loads: dict[int, float] = {}

    def load(self, size: int) -> float:
        """Return the largest share of memory over ranks; infinite where it ran out."""
        here = self.peak_bytes(size) / self.meter.capacity_bytes
        self.loads[size] = largest_over_ranks(here, self.trainer.strategy.root_device)
        return self.loads[size]

    def peak_bytes(self, size: int) -> float:
        """Return what a micro-batch takes on this rank; infinite where the memory ran out."""
        self.meter.start()
        if self._runs_out(size):
            self.module.zero_grad(set_to_none=True)
            self._refuse_if_others_wait(size)
            return math.inf
        return self.meter.peak_bytes() - self.copied_bytes

    def _runs_out(self, size: int) -> bool:
        batching = derive_batching(self.data.num_replicas, self.data.global_batch_size, size)
        is_accumulated = batching.accumulate_grad_batches > 1
        try:
            for batch in heaviest_batches(self.data, size):
                try_batch(self.trainer, self.module, batch, keeps_gradients=is_accumulated)
        except torch.OutOfMemoryError:
            return True  # outside of this block nothing holds the tensors of the forward pass
        return False

    def _refuse_if_others_wait(self, size: int) -> None:
        """Where a pass is a collective, a rank that leaves it cannot join the next."""
        name = getattr(self.trainer.strategy, "strategy_name", "")
        if is_distributed() and name == "fsdp":
            if not self.loads:
                raise RuntimeError(_too_large(self.data, self.meter, size, math.inf))
            raise RuntimeError(
                f"this device ran out of memory while a micro-batch of {size} was rehearsed under "
                f"{name}, where the others wait for it. Give --data.micro_batch_size="
                f"{max(self.loads)}, or free the memory that others take of the device."
            )


def largest_that_fits(sizes: list[int], load: Callable[[int], float]) -> int | None:
    """Return the largest size whose load is at most 1, or None.

    Memory grows in a straight line with the rows of a batch: the last two loads say what the next
    size would take, and one that clearly exceeds is not tried.

    Args:
        sizes: ascending.
        load: size -> share of the memory; called once per size at most.
    """
    loads: dict[int, float] = {}
    for size in sizes:
        if _expected(loads, size) > CLEARLY_TOO_MUCH:
            break
        loads[size] = load(size)
        if loads[size] > 1:
            break
    return max((size for size, share in loads.items() if share <= 1), default=None)


def _expected(loads: dict[int, float], size: int) -> float:
    if len(loads) < 2:
        return 0.0
    (size_1, load_1), (size_2, load_2) = list(loads.items())[-2:]
    return load_2 + max(0.0, load_2 - load_1) / (size_2 - size_1) * (size - size_2)


def largest_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' values; one small collective."""
    if not is_distributed():
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def meter_for(trainer: Trainer, data: PlannedDataModule) -> Meter | None:
    """Return what measures the devices of a run; None where nothing limits them."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return DeviceMeter(device)
    return HostMeter(data.memory_budget_gib) if data.memory_budget_gib is not None else None


def _too_large(data: PlannedDataModule, meter: Meter, size: int, load: float) -> str:
    lengths: Any = data.datasets["train"].lengths
    longest, capacity_gib = int(lengths.argmax()), meter.capacity_bytes / GIB
    took = "ran out" if math.isinf(load) else f"took {load * capacity_gib:.2f} GiB"
    return (
        f"a micro-batch of {size} does not fit: the longest sample, {longest} of the training "
        f"split with {int(lengths[longest])} positions, {took} of the {capacity_gib:.2f} GiB of a "
        "device. "
        "Lower max_length, use --trainer.precision=bf16-mixed or --trainer.strategy=fsdp, with "
        "its activation_checkpointing where that is not enough, or give each process more memory "
        "(data.memory_budget_gib on a CPU)."
    )
