"""Forecast of a run on several numbers of devices, and audit of its data."""

from __future__ import annotations

import logging
import math
from typing import Any

import lightning.pytorch as pl
from rich.console import Console
from rich.table import Table

from datamodules.core.plan import derive_batching
from datamodules.core.planned import PlannedDataModule
from datamodules.files.audit import WIDTH
from datamodules.shards.order import add_sources, of_sources
from lit_models.cli import NO_STEPS, ParsedCLI, built, quiet_trainer, silence_noise
from lit_models.commands.report import shown
from lit_models.engines.jobs import device_counts
from lit_models.errors import UsageError
from lit_models.training.exact import ExactModule
from lit_models.training.memory import GIB, state_bytes
from lit_models.training.progress import budgeted_steps
from lit_models.training.rules import check_share, strategy_of


def check(run_options: list[str] | None = None) -> int:
    """Read all data files of a config to their end and report their errors, without training.

    Args:
        run_options: options of `unisono fit`, such as --config and --data.train_files=mine.csv; the
            tokenizer is that of a pretrained model, if any.

    Returns:
        1 where a row breaks a rule, else 0.
    """
    config = ParsedCLI(["fit", *(run_options or [])]).values
    data = built(config, "data")
    if not hasattr(data, "audit"):
        raise ValueError(
            f"`unisono check` asks a datamodule for its audit, and {type(data).__name__} has "
            "none; give a config of one of Unisono's, or write the method."
        )
    if isinstance(data, PlannedDataModule):
        model = built(config, "model")
        data.model = model.model_facts() if isinstance(model, ExactModule) else data.model
    audit = data.audit()
    audit.show(Console(width=WIDTH, highlight=False))
    return 0 if audit.is_sound else 1


def plan(run_options: list[str] | None = None, *, devices: str = "1,2,4,8") -> int:
    """Compute the steps, batches and memory of a run on several numbers of devices; train nothing.

    Args:
        run_options: options of `unisono fit`, such as --config and --model.optimizer.lr=0.1; the
            data are prepared in the cache as for a training.
        devices: numbers of devices over all machines, such as 1,2,4,8.

    Raises:
        UsageError: a number is not valid, or the run splits its layers over devices.
    """
    forecast = forecast_of(run_options or [], device_counts(devices))
    label, *labels = forecast.columns[0]
    table = Table()
    table.add_column(label, no_wrap=True)
    for column in forecast.columns:
        table.add_column(str(column[label]), justify="right", no_wrap=True)
    for name in labels:
        values = [column[name] for column in forecast.columns]
        if any(value is not None for value in values):
            table.add_row(name, *map(shown, values))
    console = Console(highlight=False)
    console.print(table)
    notes = [f"Left out: {line}" for line in forecast.refused]
    if forecast.columns[0]["steps in all"] is None:
        notes.append("The run has no end: give trainer.max_epochs or trainer.max_steps.")
    for line in [forecast.summary, *notes]:
        console.print(line, soft_wrap=True)
    return 0


def forecast_of(run_options: list[str], counts: list[int]) -> Forecast:
    """Return the forecast of a run with these options on each number of devices.

    Raises:
        UsageError: the run splits its layers over devices, or every number of devices is refused.
    """
    cli = ParsedCLI(["fit", *run_options])
    config, (_, options) = cli.values, strategy_of(cli.options.trainer.strategy)
    size = options.get("tensor_parallel_size") or 1
    trainer, seed = config.get("trainer") or {}, config.get("seed_everything")
    if size > 1:
        raise UsageError(
            f"trainer.strategy.tensor_parallel_size is {size}, but `unisono plan` takes every "
            "device for a replica. Leave it out, and let --devices be numbers of tensor groups."
        )
    silence_noise()
    # `seed_everything: true` gives no number; 1 equals True, but is not True.
    pl.seed_everything(0 if seed is True else int(seed or 0), verbose=False)
    module, data = built(config, "model"), built(config, "data")
    if not isinstance(data, PlannedDataModule):
        raise UsageError(
            f"`unisono plan` reads the plan of the data, and {type(data).__name__} has none; give "
            "a config of one of Unisono's datamodules."
        )
    forecast = Forecast(counts, trainer.get("precision"))
    limits = ("max_epochs", "max_steps", "limit_train_batches", "overfit_batches")
    with quiet_trainer(
        logging.INFO,  # Lightning's messages on devices
        accelerator="cpu",
        callbacks=[forecast],
        accumulate_grad_batches=trainer.get("accumulate_grad_batches") or 1,
        **{name: trainer[name] for name in limits if trainer.get(name) is not None},
    ) as quiet:
        quiet.fit(module, data)
    if not forecast.columns:
        raise UsageError(forecast.refused[0].partition(". ")[2] if forecast.refused else NO_STEPS)
    return forecast


class Forecast(pl.Callback):
    """Computes the forecast when training starts, and stops before the first step. `counts` are
    numbers of devices; `precision`, that of the run, decides the memory of the weights."""

    def __init__(self, counts: list[int], precision: str | int | None) -> None:
        self.counts, self.precision = counts, precision
        self.columns: list[dict[str, Any]] = []  # one for each number of devices: label -> value
        self.refused: list[str] = []  # why a run on a number of devices would be refused
        self.summary = ""  # sizes of data and network, in words

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        data: Any = trainer.datamodule
        dataset, epoch = data.datasets["train"], data.plan("train", 0)
        weights = list(pl_module.parameters())
        num_trained = sum(p.numel() for p in weights if p.requires_grad)
        self.summary = (
            f"{epoch.samples_in(epoch.num_steps):,} samples; "
            f"{sum(p.numel() for p in weights):,} weights, {num_trained:,} of them trained. Memory "
            "is that of weights, gradients and two moments, as AdamW has them; activations come "
            "on top."
        )
        steps, total = data.steps_per_epoch, budgeted_steps(trainer)
        whole, rest = divmod(total or 0, steps)
        groups = trainer.optimizers[0].param_groups
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        warmup = getattr(schedules[0], "warmup", None) if schedules else None
        if warmup is not None and total is not None:
            warmup = math.ceil(warmup if warmup >= 1 else warmup * total)
        targets = [counts for counts in dataset.target_counts.values() if counts is not None]
        request, sources = data.request("train"), dict[str, list[int]]()
        # A full epoch without sources has all targets; a walk through its steps takes long.
        walks = steps < epoch.num_steps or any(name for name, *_ in getattr(request, "sources", ()))
        num_targets = 0 if walks else sum(int(counts.sum()) for counts in targets)
        for ids in map(epoch.step_ids, range(steps if walks else 0)):
            num_targets += sum(int(counts[ids].sum()) for counts in targets)
            add_sources(sources, of_sources(request, dataset.lengths, ids))
        of_all = {
            "steps per epoch": steps,
            "targets per epoch": num_targets or None,
            **{f"samples of {name}": samples for name, (samples, _) in sources.items()},
            **{f"targets of {name}": own for name, (_, own) in sources.items()},
            "steps in all": total,
            "samples seen": total and whole * epoch.samples_in(steps) + epoch.samples_in(rest),
            "warm-up steps": None if total is None else warmup,
            "learning rate": max(group.get("initial_lr", group["lr"]) for group in groups),
        }
        state_gib = state_bytes(pl_module, self.precision) / GIB
        sizes = (data.global_batch_size, data.micro_batch_size, data.given_accumulation)
        for count in self.counts:
            try:
                batching = derive_batching(count, *sizes)
                check_share(batching, count)
            except ValueError as error:  # the run itself would be refused
                self.refused.append(f"{count} devices. {error}")
                continue
            column = {
                "devices": count,
                "global batch": batching.global_batch_size,
                "batch per device": batching.micro_batch_size,
                "accumulation": batching.accumulate_grad_batches,
            }
            memory = {"GiB, ddp": state_gib, "GiB, fsdp": state_gib / count}
            self.columns.append({**column, **of_all, **memory})
        trainer.should_stop = True
