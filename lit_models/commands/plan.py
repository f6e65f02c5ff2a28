"""Show steps, rates, memory and time on several device counts."""

import contextlib
import json as json_format
import logging
import math
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console
from rich.table import Table

from datamodules.core.plan import derive_batching
from datamodules.core.planned import PlannedDataModule, cached_plan
from lit_models.errors import UsageError, say
from lit_models.training.memory import GIB, state_bytes
from lit_models.training.optim import lr_scale
from lit_models.training.rules import check_share

SMALL_GLOBAL_BATCH = 256


def plan(
    run_options: list[str] | None = None,
    devices: str = "1,2,4,8",
    measured: Path | None = None,
    time_limit_h: float | None = None,
    json: bool = False,
) -> int:
    """Show what a run will be on several numbers of devices, by arithmetic; nothing is left behind.

    Args:
        run_options: those of `unisono fit`, such as --config and --model.optimizer.lr=0.1; the data
            are prepared in the cache as for a training.
        devices: numbers of devices over all machines, such as 1,2,4,8.
        measured: folder of a run of these settings, for seconds: twenty steps are enough, such as
            those of `unisono fit … --trainer.max_steps=20 --trainer.log_every_n_steps=10`. Other
            numbers of devices are taken to be as fast for each device.
        time_limit_h: of one job of a cluster, to count how many the run takes.
        json: print plain JSON for scripts.

    Raises:
        UsageError: a number cannot be meant, or the devices are no replicas.
    """
    parts = [part.strip() for part in str(devices).strip("[]").split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--devices must be numbers such as 1,2,4,8, got {devices}.")
    if time_limit_h is not None and not 0 < time_limit_h < math.inf:
        raise UsageError(
            f"--time_limit_h must be above 0, got {time_limit_h:g}; leave it out if unknown."
        )
    speed = None if measured is None else speed_of(Path(measured))
    forecast = forecast_of(run_options or [], [int(part) for part in parts])
    rows = forecast.rows(speed, time_limit_h)
    if json:
        for line in forecast.refused:
            say(f"left out: {line}")
        print(json_format.dumps(rows, indent=1))
        return 0
    show(rows)
    notes = [f"Left out: {line}" for line in forecast.refused]
    if len(set(rows["global batch"])) > 1:
        notes.append(
            "The global batch grows with the devices (data.batch_size): these are different runs. "
            "data.global_batch_size makes them the same one."
        )
        if forecast.rule != "none" and rows["global batch"][-1] < SMALL_GLOBAL_BATCH:
            notes.append(
                f"Below a global batch of {SMALL_GLOBAL_BATCH}, try the original rate first "
                "(model.lr_scaling=none): scaling rules were found on larger ones."
            )
    if "steps in all" not in rows:
        notes.append("The run has no end: give trainer.max_epochs or trainer.max_steps.")
    if speed is None:
        notes.append("No seconds: --measured=RUN takes them from a run of some steps.")
    summary = (
        f"{forecast.num_samples:,} samples; {forecast.num_parameters:,} weights, "
        f"{forecast.num_trained:,} of them trained. Memory is that of weights, gradients and two "
        "moments; activations come on top."
    )
    for line in [summary, *notes]:
        Console(highlight=False).print(line, soft_wrap=True)
    return 0


def speed_of(run: Path) -> float:
    """Return the samples per second and device of a run's last interval.

    Raises:
        UsageError: the folder does not tell.
    """
    lines, topology = run / "throughput.jsonl", run / "topology.json"
    if not lines.is_file() or not lines.read_text("utf-8").strip() or not topology.is_file():
        raise UsageError(
            f"--measured={run} has no throughput.jsonl with a line and no topology.json; name the "
            "folder of a training that logged once, see trainer.log_every_n_steps."
        )
    line = json_format.loads(lines.read_text("utf-8").splitlines()[-1])
    world: int = json_format.loads(topology.read_text("utf-8"))["world_size"]
    return float(line["samples_per_s"]) / world


@dataclass
class Forecast:
    """What a run would be on each number of devices.

    Attributes:
        num_samples: of an epoch.
        num_parameters: of the network.
        num_trained: of them, those with a gradient.
        state_bytes: of weights, gradients and moments.
        checkpoint_bytes: of weights and moments.
        rule: by which the learning rate follows the global batch.
        columns: one for each number of devices: label -> value.
        refused: why a run on a number of devices would be refused.
    """

    num_samples: int
    num_parameters: int
    num_trained: int
    state_bytes: int
    checkpoint_bytes: int
    rule: str
    columns: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def rows(
        self, samples_per_s: float | None = None, time_limit_h: float | None = None
    ) -> dict[str, list[Any]]:
        """Return label -> value per number of devices; rows without any value are left out.

        Args:
            samples_per_s: of each device.
            time_limit_h: of one job.
        """
        for column in self.columns:
            count, total = column["devices"], column["steps in all"]
            column["GiB, ddp"] = self.state_bytes / GIB
            column["GiB, fsdp"] = self.state_bytes / count / GIB
            column["GiB, checkpoint"] = self.checkpoint_bytes / GIB
            if samples_per_s is None:
                continue
            seconds = column["global batch"] / (samples_per_s * count)
            column["s per step"] = seconds
            column["min per epoch"] = seconds * column["steps per epoch"] / 60
            column["h in all"] = None if total is None else seconds * total / 3600
            if total is not None and time_limit_h is not None:
                column["jobs"] = max(1, math.ceil(seconds * total / (time_limit_h * 3600)))
        names = dict.fromkeys(name for column in self.columns for name in column)
        rows = {name: [column.get(name) for column in self.columns] for name in names}
        return {name: row for name, row in rows.items() if any(v is not None for v in row)}


def forecast_of(run_options: list[str], counts: list[int]) -> Forecast:
    """Return what a run with these options would be on each number of devices.

    Raises:
        UsageError: devices of the run are no replicas, or it is refused on all of them.
    """
    from lightning.pytorch import seed_everything

    from lit_models.cli import built, parsed, silence_noise

    config = parsed(run_options)
    trainer, seed = config.get("trainer") or {}, config.get("seed_everything")
    strategy = trainer.get("strategy")
    options = (strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}
    size = options.get("tensor_parallel_size") or 1
    if size > 1:
        raise UsageError(
            f"trainer.strategy.tensor_parallel_size is {size}, but `unisono plan` takes every "
            "device for a replica: steps and memory would be wrong. Leave it out, and let "
            "--devices be numbers of tensor groups: the steps are those of a run on "
            f"{size} times as many devices."
        )
    silence_noise()
    # The seed 1 equals True, which stands for no number.
    seed_everything(0 if seed is True else int(seed or 0), verbose=False)
    module, data = built({"model": config["model"], "data": config["data"]})
    if not isinstance(data, PlannedDataModule):
        raise UsageError(
            f"`unisono plan` reads the plan of the data, and {type(data).__name__} has none; give "
            "a config of one of Unisono's datamodules."
        )
    look = Look(counts, trainer)
    limits = ("max_epochs", "max_steps")
    logging.disable(logging.INFO)  # Lightning's lines on devices
    with contextlib.ExitStack() as stack:
        stack.callback(logging.disable, logging.NOTSET)
        stack.enter_context(isolate_rng())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Trainer(
            accelerator="cpu",
            devices=1,
            callbacks=[look],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            limit_val_batches=0,
            accumulate_grad_batches=trainer.get("accumulate_grad_batches") or 1,
            **{name: trainer[name] for name in limits if trainer.get(name) is not None},
        ).fit(module, data)
    assert look.forecast is not None
    if not look.forecast.columns:
        raise UsageError(look.forecast.refused[0].partition(". ")[2])
    return look.forecast


class Look(Callback):
    """Looks at everything that a training has before its first step, and ends it there.

    Args:
        counts: numbers of devices.
        values: of the config's trainer.
    """

    def __init__(self, counts: list[int], values: dict[str, Any]) -> None:
        self.counts, self.values = counts, values
        self.forecast: Forecast | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data: Any = trainer.datamodule
        weights = list(pl_module.parameters())
        state = state_bytes(pl_module)
        gradients = sum(p.numel() * p.element_size() for p in weights if p.requires_grad)
        found = Forecast(
            num_samples=len(data.datasets["train"].lengths),
            num_parameters=sum(p.numel() for p in weights),
            num_trained=sum(p.numel() for p in weights if p.requires_grad),
            state_bytes=state,
            checkpoint_bytes=state - gradients,
            rule=pl_module.hparams.get("lr_scaling", "none"),
        )
        for count in self.counts:
            try:
                found.columns.append(self._column(trainer, pl_module, data, count))
            except ValueError as error:
                found.refused.append(f"{count} devices. {error}")
        self.forecast = found
        trainer.should_stop = True

    def _column(
        self, trainer: Trainer, module: LightningModule, data: PlannedDataModule, count: int
    ) -> dict[str, Any]:
        """Return label -> value of one number of devices.

        Raises:
            ValueError: a run would be refused there, as at its start.
        """
        sizes = (data.global_batch_size, data.micro_batch_size, data.batch_size)
        batching = derive_batching(count, *sizes, data.given_accumulation)
        check_share(batching, count)
        dataset, request = data.datasets["train"], data.request("train")
        request = type(request)(
            **{**vars(request), "global_batch_size": batching.global_batch_size}
        )
        epoch = cached_plan(request, dataset.lengths, 0)
        limit = self.values.get("limit_train_batches")
        steps = epoch.num_steps
        if isinstance(limit, float) and limit <= 1:
            steps = max(1, int(steps * limit))
        elif limit is not None:  # 3.0 is 3 batches, to Lightning too
            steps = min(steps, int(limit))
        by_epochs = (trainer.max_epochs or -1) * steps
        total = min((n for n in (trainer.max_steps, by_epochs) if n > 0), default=None)
        whole, rest = divmod(total or 0, steps)
        base = module.hparams.get("base_global_batch_size") or data.batching.global_batch_size
        rule = module.hparams.get("lr_scaling", "none")
        groups = trainer.optimizers[0].param_groups
        rate = max(group.get("initial_lr", group["lr"]) for group in groups)
        rate = rate / getattr(module, "lr_scale", 1.0)
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        warmup = getattr(schedules[0], "warmup", None) if schedules else None
        if warmup is not None and total is not None:
            growth = 1.0 if rule == "none" else batching.global_batch_size / base
            warmup = math.ceil(warmup / growth if warmup >= 1 else warmup * total)
        targets = [counts for counts in dataset.target_counts.values() if counts is not None]
        return {
            "devices": count,
            "global batch": batching.global_batch_size,
            "batch per device": batching.micro_batch_size,
            "accumulation": batching.accumulate_grad_batches,
            "steps per epoch": steps,
            "targets per epoch": int(sum(counts.sum() for counts in targets)) or None,
            "steps in all": total,
            "samples seen": total and whole * int(epoch.offsets[steps]) + int(epoch.offsets[rest]),
            "warm-up steps": None if total is None else warmup,
            "learning rate": rate * lr_scale(rule, batching.global_batch_size, base),
        }


def show(rows: dict[str, list[Any]]) -> None:
    """Print a table with a column for each number of devices."""
    (label, counts), *others = rows.items()
    table = Table()
    table.add_column(label, no_wrap=True)
    for count in counts:
        table.add_column(str(count), justify="right", no_wrap=True)
    for name, values in others:
        table.add_row(name, *map(_shown, values))
    Console(highlight=False).print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if value < 0.1 else f"{value:,.2f}"
