"""One optimizer step of a run again, on one device: its samples, their losses, its gradient."""

import contextlib
import itertools
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor

from datamodules.core.loader import collated
from datamodules.core.plan import MicroBatch, iterate_micro_batches
from datamodules.core.planned import PlannedDataModule
from lit_models.training.exact import ExactModule, share_of_step
from lit_models.training.faults import NonFinite
from lit_models.training.lineage import (
    LedgerStep,
    Start,
    check_data,
    plan_of,
    read_ledger,
    surviving,
)
from lit_models.training.probe import (
    Fault,
    FaultSearch,
    SampleLoss,
    gradient_norms,
    gradients,
    highest_dropout,
    sample_loss,
)

# What of a run's trainer decides what a step computes; devices, loggers and callbacks do not.
TRAINER_KEYS = (
    *("max_epochs", "max_steps", "limit_train_batches", "overfit_batches", "precision"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)


@dataclass
class Replay:
    """What a step did.

    Attributes:
        samples: losses of each sample by itself, in the order of the plan.
        descriptions: of each sample, name -> text.
        loss: of the step.
        grad_norms: block -> norm of its gradient.
        grad_norm: of the whole gradient, before clipping.
        faults: what is not finite in the forward passes, then in the gradient.
        weights_step: optimizer steps that the weights have behind them.
        dropout: the largest probability in the network; replay switches dropout off.
        way: largest relative difference to the ledger's losses on the way; none without steps.
    """

    samples: list[SampleLoss] = field(default_factory=list)
    descriptions: list[dict[str, str]] = field(default_factory=list)
    loss: float = math.nan
    grad_norms: dict[str, float] = field(default_factory=dict)
    grad_norm: float = math.nan
    faults: list[Fault] = field(default_factory=list)
    weights_step: int = 0
    dropout: float = 0.0
    way: float | None = None


def replay(
    found: LedgerStep,
    start: Start,
    module: ExactModule,
    data: PlannedDataModule,
    run: Path,
    folder: Path,
    trainer_values: dict[str, Any],
    advance: bool = False,
    accelerator: str = "auto",
) -> Replay:
    """Run one step again.

    Args:
        found: the step.
        start: where the weights come from.
        module: built from the run's config, right after the seed was set.
        data: built from the run's config.
        run: the run folder; only read.
        folder: takes what a Trainer writes.
        trainer_values: the `trainer` key of the run's config.
        advance: train the steps between the weights and the step first.
        accelerator: cpu, gpu or auto.

    Raises:
        ValueError: the data are not those that the step was trained with.
        RuntimeError: training ends before the step.
    """
    follow_one_device(data, found, run, trainer_values)
    if not module.may_accumulate:
        data.micro_batch_size = "auto"  # the whole step, whose samples the loss couples
    at_step = AtStep(found, run, advance)
    with quiet():
        trainer = one_device_trainer(trainer_values, found, folder, accelerator)
        trainer.callbacks.append(at_step)
        trainer.fit(module, data, ckpt_path=start.checkpoint, weights_only=True)
    return at_step.result(trainer.global_step, folder)


def one_device_trainer(
    trainer_values: dict[str, Any], found: LedgerStep, folder: Path, accelerator: str
) -> Trainer:
    """Return a trainer that computes steps as the run's did, and keeps nothing."""
    given = {k: v for k, v in trainer_values.items() if k in TRAINER_KEYS and v is not None}
    return Trainer(
        **(given | budget(given, found)),
        callbacks=[NonFinite("skip", most_skipped=sys.maxsize)],  # as in the run, if it went on
        accelerator=accelerator,
        devices=1,
        plugins=[LightningEnvironment()],  # one process, whatever the launcher
        default_root_dir=str(folder),
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def budget(given: dict[str, Any], found: LedgerStep) -> dict[str, int]:
    """Return the run's limits of training, where they end before a step of an earlier attempt."""
    needs = {"max_epochs": found.line["epoch"] + 1, "max_steps": found.line["step"]}
    return {name: max(given[name], n) for name, n in needs.items() if given.get(name, -1) >= 0}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep back what Lightning says about a training: here it is none."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for start in (
            "Be aware that when using `ckpt_path`, callbacks",  # those that save
            "You're resuming from a checkpoint that ended before the epoch ended",
            ".*does not have many workers",
            "The number of training batches",
            "GPU available but not used",
        ):
            warnings.filterwarnings("ignore", message=start)
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def follow_one_device(
    data: PlannedDataModule, found: LedgerStep, run: Path, trainer_values: dict[str, Any]
) -> None:
    """Give the datamodule the run's global batch, and its micro-batch, so that it fits again."""
    request = plan_of(run)["request"]
    accumulation = trainer_values.get("accumulate_grad_batches") or 1
    # The devices of a tensor group share a micro-batch; ledgers without the number know no groups.
    slots = found.start.get("num_replicas", found.start["world_size"]) * accumulation
    micro = data.batch_size or data.micro_batch_size
    data.global_batch_size = request["global_batch_size"]
    if micro == "auto" or accumulation > 1:
        micro = rehearsed_size(run) or math.ceil(data.global_batch_size / slots)
    data.batch_size, data.micro_batch_size = None, micro


def rehearsed_size(run: Path) -> int | None:
    """Return the micro-batch that `auto` found for a run, None where nothing was rehearsed."""
    path = run / "topology.json"
    if not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))["plan"].get("rehearsal")
    return found["micro_batch_size"] if found else None


class AtStep(Callback):
    """Looks at one step before it is trained, then stops.

    Args:
        found: the step.
        run: its run folder.
        advance: wait until the weights are those of the step; else look at once.
    """

    def __init__(self, found: LedgerStep, run: Path, advance: bool) -> None:
        self.found, self.run, self.advance = found, run, advance
        self.seen: Replay | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check the data before any weight is read."""
        check_data(trainer.datamodule, self.found, self.run, self._epoch(trainer))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look_if_due(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look_if_due(trainer, pl_module)

    def result(self, last_step: int, folder: Path) -> Replay:
        """Return what was seen, after a training.

        Args:
            last_step: optimizer steps that it did.
            folder: its own, with the ledger of the way.

        Raises:
            RuntimeError: it ended before the step.
        """
        if self.seen is None:
            raise RuntimeError(
                f"training ended after step {last_step}, before step {self.found.line['step']}; "
                "look at the nearest checkpoint's weights with --advance=false."
            )
        return replace(self.seen, way=_way(self.run, folder))

    def _look_if_due(self, trainer: Trainer, module: LightningModule) -> None:
        is_there = trainer.global_step == self.found.line["step"] - 1
        if self.seen is not None or not (is_there or not self.advance):
            return
        assert isinstance(module, ExactModule)
        trainer.should_stop = True
        module.eval()  # for good: no step follows
        step = self.found.line["step_in_epoch"]
        self.seen = looked_at(trainer, module, self._epoch(trainer), step)

    def _epoch(self, trainer: Trainer) -> int:
        return 0 if trainer.overfit_batches > 0 else self.found.line["epoch"]


def looked_at(trainer: Trainer, module: ExactModule, epoch: int, step: int) -> Replay:
    """Return what one step of the plan does with the weights as they are; they stay so.

    Args:
        trainer: attached to the module and a planned datamodule.
        module: in eval mode.
        epoch: of the plan.
        step: in the epoch.
    """
    precision, data = trainer.precision_plugin, trainer.datamodule
    dataset = data.datasets["train"]

    def ready(micro_batch: MicroBatch) -> dict[str, Any]:
        batch = precision.convert_input(collated(dataset, micro_batch))
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def forward(batch: dict[str, Any]) -> Tensor:
        with precision.train_step_context():
            return share_of_step(module.training_terms(batch), batch, module.term_weights())

    parts = list(micro_batches(data, epoch, step))
    module.on_train_batch_start(ready(parts[0]), step * len(parts))  # it belongs to the step
    ids = data.plan("train", epoch).step_ids(step)
    singles = [_single(int(i), parts[0]) for i in ids]
    out = Replay(weights_step=trainer.global_step, dropout=highest_dropout(module))
    with torch.no_grad(), FaultSearch(module) as search:
        for single in singles:
            with precision.train_step_context():
                loss = sample_loss(module, ready(single))
            search.end_sample(loss)
            out.samples.append(loss)
            out.descriptions.append(dataset.describe(loss.sample_id, epoch))
    out.faults = search.all_faults()
    with torch.enable_grad():
        out.loss, fault = gradients(module, map(ready, parts), forward)
        out.grad_norms = gradient_norms(module)
        out.grad_norm = math.sqrt(sum(norm**2 for norm in out.grad_norms.values()))
        if fault is not None:
            for single in singles:
                if gradients(module, iter([ready(single)]), forward)[1] is not None:
                    fault.samples.append(int(single.ids[0]))
            out.faults.append(fault)
    module.zero_grad(set_to_none=True)
    return out


def micro_batches(data: PlannedDataModule, epoch: int, step: int) -> Iterator[MicroBatch]:
    """Return the micro-batches of one step on one device."""
    dataset, batching = data.datasets["train"], data.batching
    plan, counts = data.plan("train", epoch), dataset.target_counts
    dealt = iterate_micro_batches(plan, dataset.lengths, counts, batching, 1, 0, epoch, step)
    return itertools.islice(dealt, batching.accumulate_grad_batches)


def _single(sample_id: int, part: MicroBatch) -> MicroBatch:
    """One sample of a step as a micro-batch of its own."""
    ids, weights = np.array([sample_id]), np.ones(1, np.float32)
    return MicroBatch(part.epoch, part.step, ids, weights, part.denominators)


def _way(run: Path, folder: Path) -> float | None:
    """Return the largest relative difference to the ledger's losses of the steps on the way."""
    made = [row for row in read_ledger(folder / "ledger.jsonl")[0] if "loss" in row]
    lineage, _ = surviving(read_ledger(run / "ledger.jsonl")[0])
    then = {step: row["loss"] for step, row in lineage.items()}
    pairs = [(row["loss"], then[row["step"]]) for row in made if row["step"] in then]
    return max((relative(new, old) for new, old in pairs), default=None)


def relative(new: float, old: float) -> float:
    """Return the difference of two values relative to the second."""
    if new == old or (math.isnan(new) and math.isnan(old)):
        return 0.0
    return abs(new - old) / abs(old) if old else math.inf
