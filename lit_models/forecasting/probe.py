"""A training that ends before its first step, and what could be learnt until then."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from datamodules.core.plan import Batching, derive_batching
from datamodules.core.planned import PlannedDataModule, cached_plan
from lit_models.errors import UsageError
from lit_models.forecasting.exchange import Exchange, State
from lit_models.forecasting.rehearsal import Rehearsal, Rehearsed
from lit_models.training.memory import StateSize, gradient_bytes
from lit_models.training.optim import WarmupDecay, lr_scale
from lit_models.training.rules import check_share
from lit_models.training.state_size import sharded_groups, size_of

if TYPE_CHECKING:
    from lit_models.forecasting.short_run import ShortRun


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
        rehearsed: what a device's part of a step took here; none where it was not asked for.
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
    rehearsed: Rehearsed | None = None


@dataclass
class Forecast:
    """All worlds that were asked for, and the state that each of their devices holds.

    Attributes:
        num_samples: of an epoch.
        size: of network and optimizer.
        state: what devices send each other.
        rule: by which the learning rate follows the global batch.
        on_cpu: whether devices are processes that share a machine's CPUs.
        worlds: one for each number of devices that a run can have.
        exchanges: number of devices -> what ranks on this machine cost each other.
        refused: number of devices -> why `fit` and `submit` would refuse a run on them.
        short_runs: (number of devices, strategy) -> what real ranks took here.
        unrehearsed: number of devices -> why their rehearsal did not end.
        untried: (number of devices, strategy) -> why there are none.
    """

    num_samples: int
    size: StateSize
    state: State
    rule: str
    on_cpu: bool = True
    worlds: list[World] = field(default_factory=list)
    exchanges: dict[int, Exchange] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    short_runs: "dict[tuple[int, str], ShortRun]" = field(default_factory=dict)
    unrehearsed: dict[int, str] = field(default_factory=dict)
    untried: dict[tuple[int, str], str] = field(default_factory=dict)


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
        on_cpu = trainer.strategy.root_device.type == "cpu"
        frees = getattr(pl_module, "calls_blocks_evenly", True)
        sent = State(
            gradient_bytes(size), sharded_groups(pl_module), frees, size.bytes_per_parameter
        )
        found = Forecast(len(data.datasets["train"].lengths), size, sent, rule, on_cpu)
        # Small micro-batches first: a heap that was large keeps gaps. It matters to `forecast()`
        # called from Python: `unisono plan` rehearses one number in each process.
        worlds: dict[int, World] = {}
        for count in sorted(self.devices, reverse=True):
            try:
                batching = _batching(data, count)
            except ValueError as error:
                found.refused[count] = str(error)
                continue
            worlds[count] = _world(trainer, pl_module, data, (count, batching), self.rehearses)
        if not worlds:
            raise UsageError(found.refused[min(found.refused)])
        found.worlds = [worlds[count] for count in self.devices if count in worlds]
        self.forecast = found
        trainer.should_stop = True
        trainer.fit_loop.epoch_loop.max_steps = 0  # not one batch is trained on


def forecast(
    module: LightningModule,
    data: Any,
    trainer_values: dict[str, Any],
    probe: Probe,
    parent: str | None = None,
) -> Forecast:
    """Return what a run would be on each number of devices.

    Args:
        module: of the run.
        data: of the run.
        trainer_values: of the config; see `trainer_options`.
        probe: knows the numbers of devices.
        parent: folder in which one is made for what the training writes; none is the system's.
    """
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        trainer = bare_trainer(folder, [probe], devices=1, **trainer_options(trainer_values))
        trainer.fit(module, data)
    assert probe.forecast is not None
    return probe.forecast


def bare_trainer(folder: str, callbacks: list[Callback], **options: Any) -> Trainer:
    """Return a trainer that trains alone: it logs, saves, shows and evaluates nothing.

    Args:
        folder: for what callbacks write; the caller throws it away.
        callbacks: all of them.
        options: of the trainer, beside these.
    """
    return Trainer(
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        **options,
    )


def trainer_options(values: dict[str, Any]) -> dict[str, Any]:
    """Return those of a config's trainer that change a step or how many there are."""
    names = ("precision", "max_epochs", "max_steps", "limit_train_batches", "accelerator")
    taken = (*names, "gradient_clip_val", "gradient_clip_algorithm")
    given = {name: values[name] for name in taken if values.get(name) is not None}
    return {**given, "accumulate_grad_batches": values.get("accumulate_grad_batches") or 1}


def _batching(data: PlannedDataModule, num_devices: int) -> Batching:
    """Return how a global batch is spread over so many devices.

    Raises:
        ValueError: a run would be refused there, as at its start.
    """
    sizes = (data.global_batch_size, data.micro_batch_size, data.batch_size)
    batching = derive_batching(num_devices, *sizes, data.given_accumulation)
    check_share(batching, num_devices)
    return batching


def _world(
    trainer: Trainer,
    module: LightningModule,
    data: PlannedDataModule,
    place: tuple[int, Batching],
    rehearses: bool,
) -> World:
    num_devices, batching = place
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
    rehearsed = None
    if rehearses:
        rehearsed = Rehearsal(trainer, module, data, plan, request, *place).run()
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
        rehearsed,
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
