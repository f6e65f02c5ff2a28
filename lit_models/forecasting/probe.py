"""A training that ends before its first step, and what could be learnt until then."""

import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from datamodules.batching import derive_batching
from datamodules.loader import collated
from datamodules.plan import MicroBatch, count_targets, deal
from datamodules.plan_cache import cached_plan
from datamodules.planned import PlannedDataModule
from lit_models.training.memory import StateSize
from lit_models.training.optim import WarmupDecay, lr_scale
from lit_models.training.state_size import size_of
from lit_models.training.trial import try_batch, without_trace

REHEARSED_STEPS, REPEATS = 5, 3


@dataclass(frozen=True)
class World:
    """How a run would be on so many devices.

    Args:
        num_devices: data-parallel replicas.
        global_batch_size: samples of one optimizer step.
        micro_batch_size: of one forward call on one device.
        accumulate_grad_batches: micro-batches of one step on one device.
        steps_per_epoch: optimizer steps.
        total_steps: of the whole run; none where the trainer sets no end.
        warmup_steps: until the full rate; none without a schedule that has a warm-up.
        learning_rate: the full rate, scaled by the rule of the module.
        samples: that the whole run sees, repetitions counted.
        step_s: seconds of forward, backward and update on one device, rehearsed; none where no
            rehearsal was asked for.
        activation_bytes: what the backward pass of the widest rehearsed micro-batch keeps.
    """

    num_devices: int
    global_batch_size: int
    micro_batch_size: int
    accumulate_grad_batches: int
    steps_per_epoch: int
    total_steps: int | None
    warmup_steps: int | None
    learning_rate: float
    samples: int | None
    step_s: float | None = None
    activation_bytes: int | None = None


@dataclass
class Forecast:
    """All worlds that were asked for, and the state that each of their devices holds."""

    num_samples: int
    size: StateSize
    rule: str
    worlds: list[World] = field(default_factory=list)


class Probe(Callback):
    """Looks at everything that a training has before its first step, and ends it there.

    Args:
        devices: numbers of devices.
        rehearses: whether batches are computed and timed.
    """

    def __init__(self, devices: Sequence[int], rehearses: bool) -> None:
        self.devices, self.rehearses = devices, rehearses
        self.forecast: Forecast | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule
        if not isinstance(data, PlannedDataModule):
            raise ValueError(
                f"`unisono plan` reads the plan of the data, and {type(data).__name__} has none; "
                "give a config of one of Unisono's datamodules."
            )
        size = size_of(pl_module)
        assert size is not None
        rule = pl_module.hparams.get("lr_scaling", "none")
        found = Forecast(len(data.datasets["train"].lengths), size, rule)
        for num_devices in self.devices:
            found.worlds.append(_world(trainer, pl_module, data, num_devices, self.rehearses))
        self.forecast = found
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = 0  # not one batch is trained on


def forecast(
    module: LightningModule, data: Any, trainer_values: dict[str, Any], probe: Probe
) -> Forecast:
    """Return what a run would be on each number of devices.

    Args:
        module: of the run.
        data: of the run.
        trainer_values: of the config, of which precision, epochs and limits count.
        probe: knows the numbers of devices.
    """
    taken = ("precision", "max_epochs", "max_steps", "limit_train_batches", "accelerator")
    given = {name: trainer_values[name] for name in taken if trainer_values.get(name) is not None}
    given["accumulate_grad_batches"] = trainer_values.get("accumulate_grad_batches") or 1
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            devices=1,
            logger=False,
            callbacks=[probe],
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            **given,
        )
        trainer.fit(module, data)
    assert probe.forecast is not None
    return probe.forecast


def _world(
    trainer: Trainer,
    module: LightningModule,
    data: PlannedDataModule,
    num_devices: int,
    rehearses: bool,
) -> World:
    sizes = (data.global_batch_size, data.micro_batch_size, data.batch_size)
    batching = derive_batching(num_devices, *sizes, data.given_accumulation)
    request = data.request("train")
    request = type(request)(**{**vars(request), "global_batch_size": batching.global_batch_size})
    plan = cached_plan(request, data.datasets["train"].lengths, 0)
    steps = _limited(plan.num_steps, data)
    by_epochs = (trainer.max_epochs or -1) * steps
    # The probe has set max_steps to none of these; the user's is in the loop's own option.
    limits = [n for n in (trainer.max_steps, by_epochs) if n > 0]
    total = min(limits, default=None)
    base = module.hparams.get("base_global_batch_size") or data.batching.global_batch_size
    rule = module.hparams.get("lr_scaling", "none")
    schedule = next((c.scheduler for c in trainer.lr_scheduler_configs), None)
    measured: tuple[float | None, int | None] = (None, None)
    if rehearses:
        measured = _rehearsed(trainer, module, data, plan, num_devices, batching)
    return World(
        num_devices,
        batching.global_batch_size,
        batching.micro_batch_size,
        batching.accumulate_grad_batches,
        steps,
        total,
        _warmup(schedule, total, 1.0 if rule == "none" else batching.global_batch_size / base),
        _unscaled_rate(trainer, module, schedule)
        * lr_scale(rule, batching.global_batch_size, base),
        None if total is None else _samples(plan, steps, total),
        *measured,
    )


def _unscaled_rate(trainer: Trainer, module: LightningModule, schedule: Any) -> float:
    """Return the highest rate of the optimizer as the config gives it."""
    rate = max(group["lr"] for group in trainer.optimizers[0].param_groups)
    if isinstance(schedule, WarmupDecay):
        rate = max(schedule.base_lrs)
    return rate / getattr(module, "lr_scale", 1.0)


def _limited(num_steps: int, data: PlannedDataModule) -> int:
    given = data._limits.given["limit_train_batches"] if data._limits else 1.0
    if isinstance(given, int):
        return min(num_steps, given)
    return num_steps if given in (None, 1.0) else max(1, int(num_steps * given))


def _samples(plan: Any, steps: int, total: int) -> int:
    whole, rest = divmod(total, steps)
    return whole * int(plan.offsets[steps]) + int(plan.offsets[rest])


def _warmup(schedule: Any, total: int | None, growth: float) -> int | None:
    if not isinstance(schedule, WarmupDecay) or total is None:
        return None
    warmup = schedule.warmup
    return math.ceil(warmup / growth) if warmup >= 1 else math.ceil(warmup * total)


def _rehearsed(
    trainer: Trainer,
    module: Any,
    data: PlannedDataModule,
    plan: Any,
    num_devices: int,
    batching: Any,
) -> tuple[float, int]:
    """Return the seconds of a step on one of the devices, and the most bytes that are kept."""
    dataset = data.datasets["train"]
    seconds, most = [], 0
    chosen = range(0, plan.num_steps, max(1, plan.num_steps // REHEARSED_STEPS))
    accumulation = batching.accumulate_grad_batches
    with without_trace(trainer, module):
        for step in list(chosen)[:REHEARSED_STEPS]:
            ids = plan.step_ids(step)
            chunk, weights = deal(ids, dataset.lengths, num_devices, 0, accumulation)[0]
            counts = count_targets(ids, dataset.target_counts)
            batch = collated(dataset, MicroBatch(0, step, chunk, weights, counts))
            kept = KeptBytes(module)
            with kept:
                try_batch(trainer, module, batch, keeps_gradients=False)
            most = max(most, kept.num_bytes)
            times = []
            for _ in range(REPEATS):
                begun = time.perf_counter()
                try_batch(trainer, module, batch, keeps_gradients=False)
                if trainer.strategy.root_device.type == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begun)
            seconds.append(statistics.median(times))
    return statistics.fmean(seconds) * accumulation, most


class KeptBytes:
    """Counts what autograd keeps for the backward pass, each memory once, without the weights.

    Args:
        module: whose parameters are not counted.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._note, lambda kept: kept)
        self._alive: list[Tensor] = []  # so that no address is used twice
        self.num_bytes = 0

    def __enter__(self) -> "KeptBytes":
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)
        self._alive.clear()

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor.detach())
            self.num_bytes += storage.nbytes()
        return tensor


def processes_share_cores(num_devices: int, accelerator: str) -> float:
    """Return how many times longer a step takes where processes share the CPUs of one machine."""
    if accelerator not in ("cpu", "auto") or torch.cuda.is_available():
        return 1.0
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1.0, num_devices * torch.get_num_threads() / cpus)
