"""Memory of a device: the micro-batch and the strategy that fit.

The state of a run is what lives from step to step: weights, gradients, two moments; 16 bytes a
weight in float32. Activations come on top, and a rehearsal on the device measures them.
"""

import gc
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torchmetrics import Metric

from datamodules.core.loader import collated
from datamodules.core.plan import (
    MicroBatch,
    Plan,
    PlanRequest,
    Rehearsed,
    count_targets,
    derive_batching,
    smaller_shares,
)
from datamodules.core.planned import PlannedDataModule
from lit_models.training.dropout import ExactDropout
from lit_models.training.ledger import StepRecord, is_distributed
from lit_models.training.rules import Settings, Verdict
from lit_models.training.sharding import local_parts

GIB = 2**30
VALUES_PER_WEIGHT = 4  # itself, its gradient and the two moments of Adam
# The state may fill so much of a device before sharding is worth its communication: the rest is
# for activations, without which no sample can be trained.
STATE_SHARE = 0.8
# What a rehearsal may fill: blocks whose sizes differ from step to step leave gaps.
USABLE_SHARE = 0.9
# An expectation is no measurement: the next size is tried unless it clearly exceeds what is there.
CLEARLY_TOO_MUCH = 1.05


def state_bytes(module: nn.Module, precision: str | int | None = None) -> int:
    """Return the bytes of weights, gradients and moments of a network: a frozen weight has itself.

    Args:
        module: with its network.
        precision: as the Trainer takes it, where the weights are not yet converted to it.
    """
    is_half = str(precision) in ("16-true", "bf16-true")
    return sum(
        p.numel()
        * (2 if is_half and p.is_floating_point() else p.element_size())
        * (VALUES_PER_WEIGHT if p.requires_grad else 1)
        for p in module.parameters()
    )


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy by its name, and the line that says why.

    Attributes:
        unchecked_bytes: memory of a device that the state is still to be compared with, since its
            size was not known; `None` where it was.
    """

    strategy: str
    line: str
    unchecked_bytes: int | None = None


def choose_strategy(
    settings: Settings,
    verdict: Verdict,
    module: LightningModule,
    is_training: bool = True,
    precision: str | int | None = None,
) -> StrategyChoice | None:
    """Return what `trainer.strategy: auto` becomes; `None` where it stays what was given.

    On several GPUs it is ddp where the state fits on each, else fsdp. Evaluation, in which fsdp
    has all weights whole too, and CPU processes, which share one memory, take ddp.

    Args:
        settings: what was asked for.
        verdict: the devices.
        module: perhaps not built yet; it is then compared before the first step.
        is_training: false in validate, test and predict.
        precision: as the Trainer takes it.

    Raises:
        ValueError: the state fits under no strategy.
    """
    is_open = settings.strategy == "auto" and verdict.accelerator in ("cpu", "gpu", "cuda")
    count = verdict.world_size
    if not is_open or count == 1:
        return None
    if not is_training:
        return StrategyChoice("ddp", f"strategy ddp: each of {count} devices evaluates all weights")
    if verdict.accelerator == "cpu":
        return StrategyChoice("ddp", f"strategy ddp: {count} processes on CPUs")
    indices = verdict.devices if isinstance(verdict.devices, list) else range(verdict.num_devices)
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in indices)
    state = state_bytes(module, precision)
    there = f"of the {memory / GIB:.1f} GiB of each of {count} devices"
    if state == 0:
        line = "strategy ddp: the weights, known once the data is read, are then held against 80 %"
        return StrategyChoice("ddp", f"{line} {there}", unchecked_bytes=memory)
    what = f"weights, gradients and moments take {state / GIB:.2f} GiB {there}"
    if state <= STATE_SHARE * memory:
        return StrategyChoice("ddp", f"strategy ddp: {what}")
    if state <= STATE_SHARE * memory * count:
        return StrategyChoice("fsdp", f"strategy fsdp: {what}, and are divided among them")
    raise ValueError(
        f"trainer.strategy=auto: {what}, and do not fit even divided by fsdp. Use "
        f"{math.ceil(state / STATE_SHARE / memory)} devices, --trainer.precision=bf16-true, or "
        "devices with more memory."
    )


class StateCheck(Callback):
    """Refuses ddp before the first step where the state cannot fit, and names what would.

    Args:
        memory_bytes: of each device.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = state_bytes(pl_module)
        if state <= STATE_SHARE * self.memory_bytes:
            return
        message = (
            f"weights, gradients and moments take {state / GIB:.2f} GiB on each device under ddp, "
            f"{self.memory_bytes / GIB:.2f} GiB are there, and activations come on top; "
            f"--trainer.strategy=fsdp takes {state / trainer.world_size / GIB:.2f} GiB"
        )
        if state > self.memory_bytes:
            raise ValueError(f"{message}. Use it, or more memory.")
        rank_zero_warn(f"{message}.")


def most_resident_bytes() -> int | None:
    """Return the most host memory that this process has held, its libraries included; `None`
    where the system does not say."""
    # Linux tells it of this program alone; what `getrusage` says is at least what the process
    # that started it had held. It is asked where the kernel does not tell, as that of gVisor.
    status = Path("/proc/self/status")
    lines = status.read_text("utf-8").splitlines() if status.is_file() else []
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    if sys.platform == "win32":
        return None
    import resource  # POSIX alone has it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Meter(Protocol):
    """Measures the peak of one stretch of work."""

    capacity_bytes: int

    def start(self) -> None:
        """Begin a stretch."""

    def peak_bytes(self) -> int:
        """Return the most that was in use since `start`."""


class DeviceMeter:
    """The memory of a GPU that this process may use; what others hold is not counted to it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        self.capacity_bytes = int(USABLE_SHARE * (free + torch.cuda.memory_reserved(device)))

    def start(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class Rehearsal(Callback):
    """Tries the longest and the widest batch of the run before its first step, then forgets it.

    It answers `data.micro_batch_size: auto` on a GPU; elsewhere `auto` is the whole share of a
    device. Sizes grow from 1 until the next one would not fit, so that no trial goes far beyond
    what is there. All ranks try the same batches, and the one with least room decides.

    Args:
        meter: measures memory; `None` takes the device's.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self.meter = meter
        self.checkpoint: dict[str, Any] | None = None  # that the run goes on from
        self.loads: dict[int, float] = {}  # micro-batch -> share of the memory, the largest

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.checkpoint = checkpoint

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpoint = None  # fsdp loads it behind `on_fit_start`

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Model and optimizer are on the device, the loaders are not made yet."""
        data, device = trainer.datamodule, trainer.strategy.root_device
        checkpoint, self.checkpoint = self.checkpoint, None
        if not isinstance(data, PlannedDataModule) or not data.seeks_micro_batch:
            return
        meter = self.meter or (DeviceMeter(device) if device.type == "cuda" else None)
        if meter is None:
            return
        if not pl_module.automatic_optimization:
            rank_zero_warn(
                f"micro_batch_size is auto, but {type(pl_module).__name__} optimizes by itself and "
                "cannot be rehearsed: each device takes its whole share; give a number if that is "
                "too much."
            )
            return
        sizes = smaller_shares(data.num_replicas, data.global_batch_size)
        if not getattr(pl_module, "may_accumulate", True):
            sizes = sizes[-1:]
        self.loads = {}
        found = self._largest(trainer, pl_module, sizes, meter)
        meter.start()  # gives back what the trials took
        if "torch._dynamo" in sys.modules:
            # Code that has met several sizes leaves the size open, and is slower for it.
            torch.compiler.reset()
        capacity_gib = meter.capacity_bytes / GIB
        if found is None:
            raise RuntimeError(self._too_large(data, capacity_gib, sizes[0]))
        data.take_micro_batch(Rehearsed(found, self.loads[found] * capacity_gib, capacity_gib))
        if checkpoint is not None and hasattr(pl_module, "settle_progress"):
            pl_module.settle_progress(checkpoint)  # it was rescaled to the accumulation before

    def _largest(
        self, trainer: Trainer, module: LightningModule, sizes: list[int], meter: Meter
    ) -> int | None:
        """Return the largest size that fits, and leave the module as it was: no optimizer takes a
        step, and buffers, metrics, the step's record and random states are put back."""
        trained = [p for p in module.parameters() if p.requires_grad]
        buffers = local_parts(module.buffers())
        copies = [buffer.detach().clone() for buffer in buffers]
        record = getattr(module, "step_record", None)
        # What the optimizer will hold, where it holds nothing yet.
        has_moments = any(optimizer.state for optimizer in trainer.optimizers)
        like = [] if has_moments else [*local_parts(trained)] * 2
        moments = [torch.empty_like(part.detach()) for part in like]
        module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        try:
            with isolate_rng(), torch.enable_grad():
                return largest_that_fits(
                    sizes, lambda size: self._load(trainer, module, size, meter)
                )
        finally:
            del module.log, moments
            module.zero_grad(set_to_none=True)
            if record is not None:
                module.step_record = record
            for metric in module.modules():
                if isinstance(metric, Metric):
                    metric.reset()  # as `setup` left it
            for buffer, saved in zip(buffers, copies, strict=True):
                buffer.detach().copy_(saved)

    def _load(self, trainer: Trainer, module: LightningModule, size: int, meter: Meter) -> float:
        """Return the largest share of memory over ranks; infinite where it ran out."""
        data = trainer.datamodule
        whole = math.ceil(data.global_batch_size / data.num_replicas)
        meter.start()
        try:
            for batch in heaviest_batches(data, size):
                _try_batch(trainer, module, batch, is_accumulated=size < whole)
            load = meter.peak_bytes() / meter.capacity_bytes
        except torch.OutOfMemoryError:
            load = math.inf  # outside of this block nothing holds the tensors of the forward pass
            module.zero_grad(set_to_none=True)
        name = getattr(trainer.strategy, "strategy_name", "")
        if math.isinf(load) and is_distributed() and name == "fsdp":
            # A pass is a collective there: a rank that left one cannot join the next.
            way = f"Give --data.micro_batch_size={max(self.loads, default=1)}, or free the memory "
            raise RuntimeError(
                f"this device ran out of memory while a micro-batch of {size} was rehearsed under "
                f"fsdp, where the others wait for it. {way}that others take of the device."
            )
        self.loads[size] = largest_over_ranks(load, trainer.strategy.root_device)
        return self.loads[size]

    def _too_large(self, data: PlannedDataModule, capacity_gib: float, size: int) -> str:
        lengths, load = data.datasets["train"].lengths, self.loads[size]
        longest = int(lengths.argmax())
        took = "ran out" if math.isinf(load) else f"took {load * capacity_gib:.2f} GiB"
        return (
            f"a micro-batch of {size} does not fit: the longest sample, {longest} of the training "
            f"split with {int(lengths[longest])} positions, {took} of the {capacity_gib:.2f} GiB "
            "of a device. Lower max_length, use --trainer.precision=bf16-mixed or "
            "--trainer.strategy=fsdp, with its activation_checkpointing where that is not enough."
        )


def _try_batch(trainer: Trainer, module: LightningModule, batch: Any, is_accumulated: bool) -> None:
    """Run forward and backward on one batch, in the order of Lightning's loop.

    It calls no wrapper of the module: under ddp nothing is communicated, so that a rank that runs
    out of memory leaves no other one waiting.

    Args:
        trainer: fully set up.
        module: its module.
        batch: on the CPU.
        is_accumulated: the backward pass adds to gradients that are there.
    """
    plugin, data = trainer.precision_plugin, trainer.datamodule
    batch = data.on_before_batch_transfer(plugin.convert_input(batch), 0)
    batch = data.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
    batch = data.on_after_batch_transfer(batch, 0)
    if hasattr(module, "step_record"):
        module.step_record = StepRecord()
    # Masks that are keyed by sample take more memory than those of a generator.
    keyed = [callback for callback in trainer.callbacks if isinstance(callback, ExactDropout)]
    for callback in keyed:
        callback.on_train_batch_start(trainer, module, batch, 0)
    with plugin.train_step_context():
        output = module.training_step(batch, 0)
    loss = output["loss"] if isinstance(output, dict) else output
    for callback in keyed:
        callback.on_before_backward(trainer, module, loss)
    if not is_accumulated:  # Lightning frees them only now
        module.zero_grad(set_to_none=True)
    loss.backward()
    for callback in keyed:
        callback.on_train_batch_end(trainer, module, output, batch, 0)


def largest_that_fits(sizes: list[int], load: Callable[[int], float]) -> int | None:
    """Return the largest size whose load is at most 1, or `None`.

    Memory grows in a straight line with the rows of a batch: the last two loads say what the next
    size would take, and one that clearly exceeds is not tried.

    Args:
        sizes: ascending.
        load: size -> share of the memory; called once per size at most.
    """
    loads: dict[int, float] = {}
    for size in sizes:
        if len(loads) > 1:
            (size_1, load_1), (size_2, load_2) = list(loads.items())[-2:]
            growth = max(0.0, load_2 - load_1) / (size_2 - size_1)
            if load_2 + growth * (size - size_2) > CLEARLY_TOO_MUCH:
                break
        loads[size] = load(size)
        if loads[size] > 1:
            break
    return max((size for size, share in loads.items() if share <= 1), default=None)


def largest_over_ranks(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' values; one small collective."""
    if not is_distributed():
        return value
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def heaviest_batches(data: PlannedDataModule, micro_batch_size: int) -> list[dict[str, Any]]:
    """Return the batches of training that take most memory, dealt by this micro-batch: real
    samples, as the loader would hand them over."""
    dataset = data.datasets["train"]
    batching = derive_batching(data.num_replicas, data.global_batch_size, micro_batch_size)
    num_chunks = data.num_replicas * batching.accumulate_grad_batches
    batches = []
    plan = data.plan("train", 0)
    for ids in heaviest_ids(data.request("train"), plan, dataset.lengths, num_chunks):
        weights = np.ones(len(ids), np.float32)
        counts = count_targets(ids, dataset.target_counts)
        batches.append(collated(dataset, MicroBatch(0, 0, ids, weights, counts)))
    return batches


def heaviest_ids(
    request: PlanRequest, plan: Plan, lengths: np.ndarray, num_chunks: int
) -> list[np.ndarray]:
    """Return the sample ids of the micro-batches with most positions per row and most in all.

    Cut by number, every step has the same rows, and the longest samples of the split make a
    batch that none of any epoch exceeds. Cut by a budget of positions, each epoch has the same
    steps in another order: the longest and the widest of the first one are those of all.

    Args:
        request: what the plan was made from.
        plan: of any epoch.
        lengths: [N] positions of each sample.
        num_chunks: micro-batches that a step is cut into, over all replicas.

    Returns:
        one or two arrays of ids, each from the longest sample to shorter ones.
    """
    rows = -(-np.diff(plan.offsets) // num_chunks)  # [steps]
    if request.global_batch_tokens is None:
        return [np.argsort(-lengths.astype(np.int64), kind="stable")[: int(rows.max())]]
    widths = np.maximum.reduceat(lengths[plan.order], plan.offsets[:-1]).astype(np.int64)
    positions = rows * widths
    longest = int(np.lexsort((positions, widths))[-1])
    widest = int(np.lexsort((widths, positions))[-1])
    chosen = []
    for step in dict.fromkeys((longest, widest)):
        ids = plan.step_ids(step)
        order = np.argsort(-lengths[ids].astype(np.int64), kind="stable")
        chosen.append(ids[order][: int(rows[step])])
    return chosen
