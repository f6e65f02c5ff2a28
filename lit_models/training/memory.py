"""What fits in a device's memory: the strategy for `auto`, and the micro-batch found by trial."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchmetrics import Metric

from datamodules.core import plan
from datamodules.core.planned import PlannedDataModule
from datamodules.shards.order import longest_rows
from lit_models.training.dropout import ExactDropout
from lit_models.training.ledger import StepRecord, is_distributed, of_all_ranks
from lit_models.training.progress import settle_progress
from lit_models.training.rules import Verdict
from lit_models.training.sharding import is_compiled, local_parts
from lit_models.training.strategies import FullyShardedStrategy

GIB = 2**30
VALUES_PER_WEIGHT = 4  # the weight, its gradient and the two moments of Adam
STATE_SHARE = 0.8  # of a device's memory that the state may fill; the rest is for activations
USABLE_SHARE = 0.9  # of the free memory: allocations whose sizes vary by step leave gaps
CLEARLY_TOO_MUCH = 1.05  # predicted share of memory above which a size is not even tried


def state_bytes(module: nn.Module, precision: str | int | None = None) -> int:
    """Return the bytes of a network's weights, gradients and moments under the Trainer's
    `precision`, to which the weights may not have been converted yet."""
    is_half = str(precision) in ("16-true", "bf16-true")
    return sum(
        p.numel()
        * (2 if is_half and p.is_floating_point() else p.element_size())
        * (VALUES_PER_WEIGHT if p.requires_grad else 1)
        for p in module.parameters()
    )


def choose_strategy(
    verdict: Verdict,
    module: LightningModule,
    is_training: bool = True,
    precision: str | int | None = None,
) -> tuple[str | FullyShardedStrategy, str] | None:
    """Return the strategy for `trainer.strategy: auto` and a line that says why; `None` for one
    device that needs none, and for devices that are neither CPUs nor GPUs.

    Several devices use ddp, or fsdp if they are GPUs that train and weights, gradients and Adam's
    moments do not fit on each. A network that is built only when the data is read counts as one
    that fits. In bf16-mixed GPUs use fsdp with whole copies if the module `takes_half_weights`.
    """
    count, trains = verdict.world_size, is_training and verdict.accelerator in ("gpu", "cuda")
    copies = trains and precision == "bf16-mixed" and getattr(module, "takes_half_weights", False)
    if (count == 1 and not copies) or verdict.accelerator not in ("cpu", "gpu", "cuda"):
        return None
    state = state_bytes(module, precision) if trains else 0
    name, line = "ddp", f"{count} device{'s' * (count > 1)}, each with all weights"
    if state:
        assert isinstance(verdict.devices, list)
        memory = min(torch.cuda.get_device_properties(i).total_memory for i in verdict.devices)
        name = "ddp" if state <= STATE_SHARE * memory else "fsdp"
        line = "weights, gradients and moments, as Adam has them, take "
        line += f"{state / GIB:.2f} GiB of the {memory / GIB:.1f} GiB of each of {count} devices"
    if name == "ddp" and copies:
        return FullyShardedStrategy(replicate_size=count), f"strategy fsdp, no shards: {line}"
    return name, f"strategy {name}: {line}"


class DeviceMeter:
    """The memory of a GPU that this process may use, without that of other processes."""

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
        """Return the most that was in use since `start`."""
        return torch.cuda.max_memory_allocated(self.device)


class Rehearsal(Callback):
    """Tries the longest and widest batch of the run before its first step, then undoes the trial.

    This finds the size for `data.micro_batch_size: auto` on a GPU; on other devices, and with
    manual optimization, `auto` is a device's whole share. Sizes grow from 1 until the next would
    not fit, since under fsdp a device that runs out of memory leaves the others waiting. All ranks
    try the same batches, and the rank with the least room decides.
    """

    def __init__(self, meter: DeviceMeter | None = None) -> None:
        self.meter = meter
        self.checkpoint: dict[str, Any] | None = None  # from which the run resumes

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        self.checkpoint = checkpoint

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the size: model and optimizer are on the device, and loaders do not exist yet."""
        data, device = trainer.datamodule, trainer.strategy.root_device
        checkpoint, self.checkpoint = self.checkpoint, None
        if not isinstance(data, PlannedDataModule) or not data.seeks_micro_batch:
            return
        meter = self.meter or (DeviceMeter(device) if device.type == "cuda" else None)
        if meter is None or not pl_module.automatic_optimization:
            return
        sizes = plan.smaller_shares(data.num_replicas, data.global_batch_size)
        if not getattr(pl_module, "may_accumulate", True):
            sizes = sizes[-1:]
        loads: list[tuple[int, float]] = []  # size and share of memory of each trial
        with untouched(trainer, pl_module):
            for size in sizes:
                # Memory grows linearly with the rows of a batch.
                if len(loads) > 1:
                    (size_1, load_1), (size_2, load_2) = loads[-2:]
                    growth = max(0.0, load_2 - load_1) / (size_2 - size_1)
                    if load_2 + growth * (size - size_2) > CLEARLY_TOO_MUCH:
                        break
                loads.append((size, load_of(trainer, pl_module, size, meter)))
                if loads[-1][1] > 1:
                    break
        size, load = max(((size, load) for size, load in loads if load <= 1), default=loads[0])
        meter.start()  # frees the memory of the trials
        if is_compiled(pl_module):
            # Code that was compiled for several sizes keeps the size dynamic, which is slower.
            torch.compiler.reset()
        gib = meter.capacity_bytes / GIB
        if load > 1:
            took = "ran out" if math.isinf(load) else f"took {load * gib:.2f} GiB"
            lengths = data.datasets["train"].lengths
            (longest,) = longest_rows(lengths, 1).tolist()
            raise RuntimeError(
                f"a micro-batch of {size} does not fit: the longest sample, {longest} of the "
                f"training split with {lengths[longest]} positions, {took} of the {gib:.2f} GiB "
                "of a device. Lower max_length, or use --trainer.strategy=fsdp with "
                "--trainer.precision=bf16-mixed, which keeps weights in float32 shards."
            )
        data.take_micro_batch(plan.Rehearsed(size, load * gib, gib))
        if checkpoint is not None and "ledger" in checkpoint:
            settle_progress(trainer, checkpoint)  # again, with the new accumulation


@contextmanager
def untouched(trainer: Trainer, module: LightningModule) -> Iterator[None]:
    """Restore gradients, buffers, metrics, record and random states of a module afterwards; hold
    memory meanwhile for the moments that the optimizers have not created yet."""
    buffers = local_parts(module.buffers())
    copies = [buffer.detach().clone() for buffer in buffers]
    record = getattr(module, "step_record", None)
    has_moments = any(optimizer.state for optimizer in trainer.optimizers)
    like = [] if has_moments else local_parts(p for p in module.parameters() if p.requires_grad) * 2
    moments = [torch.empty_like(part.detach()) for part in like]
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    try:
        with isolate_rng(), torch.enable_grad():
            yield
    finally:
        del module.log, moments
        module.zero_grad(set_to_none=True)
        if record is not None:
            module.step_record = record
        for metric in (part for part in module.modules() if isinstance(part, Metric)):
            metric.reset()  # as `setup` left it
        for buffer, saved in zip(buffers, copies, strict=True):
            buffer.detach().copy_(saved)


def load_of(trainer: Trainer, module: LightningModule, size: int, meter: DeviceMeter) -> float:
    """Return the share of memory, the largest over ranks, that the heaviest training micro-batch of
    `size` takes, batched as by the loader; infinite if memory ran out.

    Forward and backward pass run in the order of Lightning's loop. They call the module itself, not
    its wrapper: ddp communicates nothing, so that a rank that runs out of memory leaves no other
    rank waiting. With accumulation, the gradients of the previous batch stay while they run.
    """
    data, dataset = trainer.datamodule, trainer.datamodule.datasets["train"]
    batching = plan.derive_batching(data.num_replicas, data.global_batch_size, size)
    num_chunks = data.num_replicas * batching.accumulate_grad_batches
    ids = heaviest_ids(dataset.lengths, data.global_batch_size, num_chunks)
    counts = plan.count_targets(ids, dataset.target_counts)
    batch = dataset.collated(plan.MicroBatch(0, 0, ids, np.ones(len(ids), np.float32), counts))
    plugin = trainer.precision_plugin
    # Dropout masks keyed by sample take more memory than those of a generator.
    keyed = [callback for callback in trainer.callbacks if isinstance(callback, ExactDropout)]
    if hasattr(module, "step_record"):
        module.step_record = StepRecord()
    meter.start()
    try:
        batch = trainer.strategy.batch_to_device(plugin.convert_input(batch), dataloader_idx=0)
        for callback in keyed:
            callback.on_train_batch_start(trainer, module, batch, 0)
        with plugin.train_step_context():
            output = module.training_step(batch, 0)
        loss = output["loss"] if isinstance(output, dict) else output
        for callback in keyed:
            callback.on_before_backward(trainer, module, loss)
        if batching.accumulate_grad_batches == 1:  # Lightning frees the gradients only here
            module.zero_grad(set_to_none=True)
        loss.backward()
        for callback in keyed:
            callback.on_train_batch_end(trainer, module, output, batch, 0)
        load = meter.peak_bytes() / meter.capacity_bytes
    except torch.OutOfMemoryError:
        if is_distributed() and isinstance(trainer.strategy, ModelParallelStrategy):
            raise  # the others wait for the parameters of this rank
        load = math.inf
        if isinstance(module, FSDPModule):
            module.reset_iter_state()
        module.zero_grad(set_to_none=True)
    return max(of_all_ranks(load))


def heaviest_ids(lengths: Any, global_batch_size: int, num_chunks: int) -> np.ndarray:
    """Return the ids of the longest samples, as many as a micro-batch holds if a step has
    `num_chunks` micro-batches: no batch of any epoch is larger."""
    return longest_rows(lengths, math.ceil(min(global_batch_size, len(lengths)) / num_chunks))
