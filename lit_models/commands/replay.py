"""Reconstruction of one optimizer step of a run on one device."""

import itertools
import logging
import math
import re
import sys
import warnings
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from json import dumps
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from datamodules.core.plan import MicroBatch, digest_ids, iterate_micro_batches
from datamodules.core.planned import PlannedDataModule
from datamodules.core.store import write_whole
from lit_models.cli import built, quiet_trainer, silence_noise, topology_of
from lit_models.commands.verify import plan_of, read_ledger, surviving
from lit_models.config_files import newest_config, read_config
from lit_models.errors import COLUMNS, labelled
from lit_models.run_files import read_checkpoint
from lit_models.training.exact import ExactModule, share_of_step
from lit_models.training.faults import NonFinite
from lit_models.training.hyperparameters import StoredClasses

LABEL = 11  # width in columns
NUM_SHOWN = 8  # sample ids in a line
MOST_SAMPLES = 20  # rows of the table
# Options of a run's trainer that decide what a step computes; devices, loggers, callbacks do not.
TRAINER_KEYS = (
    *("max_epochs", "max_steps", "limit_train_batches", "overfit_batches", "precision"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)


@dataclass(frozen=True)
class LedgerStep:
    """A step of the surviving lineage, and the checkpoint nearest to the weights it began with."""

    run: Path  # folder of the run; only read
    line: dict[str, Any]  # its line in the ledger
    start: dict[str, Any]  # the line that began its attempt
    left_out: str = ""  # why it is not in the final weights
    checkpoint: Path | None = None  # `None` for the untrained network
    checkpoint_step: int = 0  # optimizer steps in its weights

    @property
    def num_older(self) -> int:
        """Number of optimizer steps between the checkpoint and this step."""
        return self.line["step"] - 1 - self.checkpoint_step


@dataclass(frozen=True)
class SampleLoss:
    """Losses of one sample, computed by itself."""

    sample_id: int  # index in the split
    description: dict[str, str]  # name -> text
    terms: dict[str, float | None]  # name -> mean over its own targets; `None` where it has none
    share: float  # what it adds to the loss of the step


@dataclass
class Replay:
    """Result of a rebuilt step."""

    samples: list[SampleLoss] = field(default_factory=list)  # in the order of the plan
    loss: float = 0.0  # of the step
    grad_norms: dict[str, float] = field(default_factory=dict)  # block -> norm of its gradient
    grad_norm: float = math.nan  # of the whole gradient, before clipping
    # First place with NaN or +inf in a forward pass -> ids of the samples concerned; a place in the
    # gradient has none.
    faults: dict[str, list[int]] = field(default_factory=dict)
    weights_step: int = 0  # optimizer steps in the weights that were used


def replay(
    run: Path,
    *,
    step: int,
    advance: bool = False,
    json: Path | None = None,
    trust_checkpoint: bool = False,
) -> int:
    """Rebuild the global batch of one optimizer step on one device: samples, losses, gradients.

    Args:
        run: a run folder, such as runs/demo.
        step: the optimizer step, from 1, as in RUN/ledger.jsonl.
        advance: train the steps between the nearest checkpoint and this one first.
        json: also write the complete result, with all samples, to this file.
        trust_checkpoint: import any class that the run's config names.

    Returns:
        1 if a value is not finite, else 0.
    """
    target = find_step(run, step)
    path = newest_config(run)
    config = read_config(path)
    if missing := [key for key in ("model", "data") if not config.get(key)]:
        raise ValueError(f"{path} lacks {' and '.join(missing)}; copy the run's own config again.")
    silence_noise()
    seed = config.get("seed_everything")
    if seed is not None and seed is not False:
        seed_everything(int(seed), workers=True, verbose=False)
    for key in ("model", "data"):
        StoredClasses(trust_checkpoint).check_spec(path, key, config[key])
    module, data = built(config, "model"), built(config, "data")
    assert isinstance(module, ExactModule), "it wrote the ledger"
    assert isinstance(data, PlannedDataModule)
    advance = advance and target.num_older > 0
    result = replay_step(target, module, data, config.get("trainer") or {}, advance)
    _say("config", path.name)
    _show(target, result, advance)
    if json is not None:
        facts = {"run": run, "config": path, "ledger": target.line}
        facts |= {name: getattr(target, name) for name in ("checkpoint", "checkpoint_step")}
        write_whole(json, dumps({**facts, **asdict(result)}, indent=1, default=str) + "\n")
    return 1 if result.faults else 0


def find_step(run: Path, step: int) -> LedgerStep:
    """Return a step, from 1, of the surviving lineage.

    Raises:
        FileNotFoundError: no such run, or it has no ledger.
        ValueError: the lineage has no such step.
    """
    lineage = surviving(read_ledger(run))
    steps = lineage.steps
    if step not in steps:
        there = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has no step at all"
        raise ValueError(f"{run} has no step {step}: {there}.")
    line = steps[step]
    before = lineage.rows[: lineage.rows.index(line)]
    start = [row for row in before if "resumed_from_step" in row][-1]
    # Checkpoints of steps that a kill discarded are of another lineage.
    hashes = {row.get("hash") for row in before}
    usable: list[tuple[int, Path | None]] = [(0, None)]  # steps in its weights, checkpoint
    for path in sorted((run / "checkpoints").glob("[!.]*.ckpt")):
        try:
            content = read_checkpoint(path, mmap=True, every_byte=False)
        except (ValueError, FileNotFoundError):
            _say("damaged", f"passed over: {path.name}")
            continue
        done = int(content.get("global_step", 0))
        is_before = done < step and content.get("ledger", {}).get("hash") in hashes
        if "optimizer_states" in content and is_before:
            usable.append((done, path))
    checkpoint_step, checkpoint = max(usable, key=lambda pair: pair[0])
    return LedgerStep(run, line, start, lineage.left_out.get(step, ""), checkpoint, checkpoint_step)


def _say(label: str, text: str) -> None:
    print(labelled(label, text, LABEL))


def _show(target: LedgerStep, result: Replay, advance: bool) -> None:
    line, steps = target.line, f"{target.num_older} step{'s' * (target.num_older != 1)}"
    _say(
        "step",
        f"{line['step']}: step {line['step_in_epoch']} of epoch {line['epoch']}, attempt "
        f"{line['attempt']}, {line['samples']} samples, the ledger's digest",
    )
    if target.left_out:
        _say("left out", f"{target.left_out}; the final weights know nothing of it")
    name = target.checkpoint and f"{target.checkpoint.name} of step {target.checkpoint_step}"
    _say("checkpoint", name or "none before it: the untrained network")
    if advance:
        _say("advanced", f"trained {steps} to it")
    elif target.num_older:
        _say("weights", f"{steps} older than the step's own; --advance trains the steps between")
    _say("dropout", "off here: where the run has it, losses differ from the ledger's")

    names = list({name: 0 for one in result.samples for name in one.description})
    terms = list(result.samples[0].terms)
    rows = sorted(result.samples, key=lambda one: (math.isfinite(one.share), -one.share))
    table = Table(width=COLUMNS, title="samples", title_justify="left", title_style="bold")
    table.add_column("id", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name)  # only these columns shrink if space is short
    for name in [*terms, "share"]:
        table.add_column(name[:9], justify="right", no_wrap=True)
    for one in rows[:MOST_SAMPLES]:
        numbers = ["-" if v is None else f"{v:.4g}" for v in (*one.terms.values(), one.share)]
        texts = (_printable(one.description.get(name, "-")) for name in names)
        table.add_row(str(one.sample_id), *texts, *numbers)
    console = Console(width=COLUMNS, highlight=False)
    console.print(table)
    if len(rows) > MOST_SAMPLES:
        print(f"… and {len(rows) - MOST_SAMPLES} more with smaller shares (--json writes all)")

    total = sum(loss.share for loss in result.samples)
    _say("loss", _beside(result.loss, line["loss"]))
    _say("", f"{total:.10g}, sum of the shares of the samples by themselves")
    table = Table(width=COLUMNS, title="gradient", title_justify="left", title_style="bold")
    table.add_column("block", ratio=1)
    table.add_column("norm", justify="right", no_wrap=True)
    for block, norm in result.grad_norms.items():
        table.add_row(_printable(block), f"{norm:.4g}")
    console.print(table)
    _say("grad norm", _beside(result.grad_norm, line["grad_norm"]))
    if not result.faults:
        _say("finite", "all losses and gradients")
    for place, samples in result.faults.items():
        ids = ", ".join(map(str, samples[:NUM_SHOWN])) + ", …" * (len(samples) > NUM_SHOWN)
        everywhere = f"all {len(samples)} samples"
        sample_words = everywhere if len(samples) == len(result.samples) else f"sample {ids}"
        _say("not finite", f"{place}; {sample_words}" if samples else place)


def _beside(value: float, ledger: float | None) -> str:
    if ledger is None:
        return f"{value:.10g}, the ledger has none"
    is_same = value == ledger or (math.isnan(value) and math.isnan(ledger))
    gap = 0.0 if is_same else abs(value - ledger) / abs(ledger) if ledger else math.inf
    return f"{value:.10g}, ledger {ledger:.10g}, relative difference {gap:.1e}"


def _printable(text: str) -> Text:
    """Return text that rich prints as it is, in one line, control characters made visible."""
    shown = "".join(c if c.isprintable() else "�" for c in text)
    return Text(shown, no_wrap=True, overflow="ellipsis")


def replay_step(
    target: LedgerStep,
    module: ExactModule,
    data: PlannedDataModule,
    trainer_values: dict[str, Any],
    advance: bool = False,
) -> Replay:
    """Rebuild one step; with `advance`, first train the steps between the checkpoint and this step.
    `module`, `data` and `trainer_values` are built from the run's config, the module right after
    the seed is set.

    Raises:
        ValueError: the data are not those that the step was trained with.
        RuntimeError: training ends before the step.
    """
    follow_one_device(data, target, trainer_values)
    if not module.may_accumulate:
        data.micro_batch_size = "auto"  # the whole step, whose samples the loss couples
    at_step = AtStep(target, advance)
    options = {k: v for k, v in trainer_values.items() if k in TRAINER_KEYS and v is not None}
    options.setdefault("precision", topology_of(target.run).get("precision"))
    non_finite = NonFinite("skip")
    non_finite.most_skipped = sys.maxsize  # no limit: the run itself went on
    options["callbacks"] = [non_finite, at_step]
    # Warnings are for real trainings.
    quiet = quiet_trainer(logging.WARNING, **options)
    with warnings.catch_warnings(action="ignore"), quiet as trainer:
        trainer.ckpt_path = target.checkpoint  # the datamodule reads it, too
        trainer.fit(module, data, weights_only=True)
    if at_step.seen is None:
        raise RuntimeError(
            f"training ended after step {trainer.global_step}, before step {target.line['step']}; "
            "look at the nearest checkpoint's weights with --advance=false."
        )
    return at_step.seen


def follow_one_device(
    data: PlannedDataModule, target: LedgerStep, trainer_values: dict[str, Any]
) -> None:
    """Set the run's global batch and micro-batch size on the datamodule: these fit in memory."""
    request = plan_of(target.run)["request"]
    accumulation = trainer_values.get("accumulate_grad_batches") or 1
    slots = target.start["num_replicas"] * accumulation  # a tensor group has one slot
    micro = data.micro_batch_size
    data.global_batch_size = request["global_batch_size"]
    if micro == "auto" or accumulation > 1:
        micro = math.ceil(data.global_batch_size / slots)
        rehearsal = topology_of(target.run).get("plan", {}).get("rehearsal")  # a script has none
        micro = rehearsal["micro_batch_size"] if rehearsal else micro
    data.micro_batch_size = micro


class AtStep(Callback):
    """Examines one step before it is trained, then stops: with `advance` once training has reached
    the step, else at once."""

    def __init__(self, target: LedgerStep, advance: bool) -> None:
        self.target, self.advance = target, advance
        self.seen: Replay | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check, before any weight is read, that the plan gives the ledger's samples."""
        data, run, line = trainer.datamodule, self.target.run, self.target.line
        request = data.request("train")
        if request.digest() != self.target.start["plan_digest"]:
            then, now = plan_of(run)["request"], vars(request)
            changes = [f"{k}: {then.get(k)} -> {v}" for k, v in now.items() if v != then.get(k)]
            raise ValueError(
                f"the data are not those of {run} ({'; '.join(changes) or 'another attempt'}). "
                "Restore the files and options of its config.yaml, and call this in the folder "
                "that it was started in."
            )
        ids = data.plan("train", self._epoch(trainer)).step_ids(line["step_in_epoch"])
        digest = f"{digest_ids(ids):016x}"
        if digest != line["digest"]:
            raise ValueError(
                f"step {line['step']} of {run} used {line['samples']} samples with digest "
                f"{line['digest']}, but the plan has {len(ids)} with {digest} there; `unisono "
                f"verify {run}` says which other steps differ."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_there = trainer.global_step == self.target.line["step"] - 1
        if self.seen is not None or not (is_there or not self.advance):
            return
        assert isinstance(pl_module, ExactModule)
        trainer.should_stop = True
        pl_module.eval()  # for good: no step follows
        step = self.target.line["step_in_epoch"]
        self.seen = looked_at(trainer, pl_module, self._epoch(trainer), step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)

    def _epoch(self, trainer: Trainer) -> int:
        return 0 if trainer.overfit_batches > 0 else self.target.line["epoch"]


def looked_at(trainer: Trainer, module: ExactModule, epoch: int, step: int) -> Replay:
    """Return samples, losses and gradient of one step of the plan, without a change of the weights.
    The module is in eval mode; the trainer is attached to it and to a planned datamodule."""
    precision, data = trainer.precision_plugin, trainer.datamodule
    dataset = data.datasets["train"]

    def ready(micro_batch: MicroBatch) -> dict[str, Any]:
        batch = precision.convert_input(dataset.collated(micro_batch))
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    plan, batching = data.plan("train", epoch), data.batching
    counts = dataset.target_counts
    dealt = iterate_micro_batches(plan, dataset.lengths, counts, batching, 1, 0, epoch, step)
    parts = list(itertools.islice(dealt, batching.accumulate_grad_batches))
    module.on_train_batch_start(ready(parts[0]), step * len(parts))  # as before a training step
    out = Replay(weights_step=trainer.global_step)
    for sample in map(int, plan.step_ids(step)):  # each a micro-batch of its own
        batch = ready(replace(parts[0], ids=np.array([sample]), weights=np.ones(1, np.float32)))
        with torch.no_grad(), precision.train_step_context():
            terms = module.training_terms(batch)
            share = float(share_of_step(terms, batch, module.term_weights()))
            if not math.isfinite(share):
                out.faults.setdefault(first_fault(module, batch), []).append(sample)
        sums = {name: (float(total), float(count)) for name, (total, count) in terms.items()}
        means = {name: total / count if count else None for name, (total, count) in sums.items()}
        out.samples.append(SampleLoss(sample, dataset.describe(sample, epoch), means, share))
    module.zero_grad(set_to_none=True)
    with torch.enable_grad():
        for part in parts:
            batch = ready(part)
            with precision.train_step_context():
                loss = share_of_step(module.training_terms(batch), batch, module.term_weights())
            loss.backward()
            out.loss += float(loss.detach())
    squares: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            # Its name up to the first number, else at most three parts of it, without the last.
            numbered = re.match(r"(.*?\.\d+)\.", name)
            block = numbered[1] if numbered else ".".join(name.split(".")[:-1][:3]) or name
            squares[block] = squares.get(block, 0.0) + float(parameter.grad.double().norm()) ** 2
    module.zero_grad(set_to_none=True)
    out.grad_norms = {block: math.sqrt(square) for block, square in squares.items()}
    out.grad_norm = math.sqrt(sum(squares.values()))
    if bad := [block for block, norm in out.grad_norms.items() if not math.isfinite(norm)]:
        out.faults[f"gradient of {bad[0]}"] = []
    return out


def first_fault(module: ExactModule, batch: dict[str, Any]) -> str:
    """Return the first place with NaN or +inf in a forward pass: a value of the batch, a weight or
    the output of a module, else the loss itself. -inf is allowed: masks consist of it."""
    places: list[str] = []

    def look(place: str, values: Any) -> None:
        if isinstance(values, dict | list | tuple):
            for value in values.values() if isinstance(values, dict) else values:
                look(place, value)
        elif isinstance(values, Tensor) and (values.isnan() | (values == math.inf)).any():
            places.append(place)

    for name, value in batch.items():
        look(f"{name} of the batch", value)
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        look(f"weight {name}", value)
    parts = {f"output of {name}": part for name, part in module.named_modules() if name}
    hooks = {place: partial(lambda at, *call: look(at, call[-1]), place) for place in parts}
    handles = [parts[place].register_forward_hook(hook) for place, hook in hooks.items()]
    module.training_terms(batch)
    for handle in handles:
        handle.remove()
    return places[0] if places else "the loss itself, after finite outputs"
