"""Rebuild one optimizer step of a run on one device."""

import itertools
import logging
import math
import re
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from json import dumps, loads
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from datamodules.core.loader import collated
from datamodules.core.plan import MicroBatch, iterate_micro_batches
from datamodules.core.planned import PlannedDataModule
from lit_models.cli import built, silence_noise
from lit_models.config_files import newest_config, read_config
from lit_models.training.exact import ExactModule, share_of_step
from lit_models.training.faults import NonFinite
from lit_models.training.hyperparameters import StoredClasses
from lit_models.training.lineage import (
    LedgerStep,
    Start,
    check_data,
    find_start,
    find_step,
    plan_of,
    read_ledger,
    surviving,
)

WIDTH = 80
NUM_SHOWN = 8  # ids of samples, faults
LABEL, WORDS, NUMBER = 11, 12, 9  # columns
# What of a run's trainer decides what a step computes; devices, loggers and callbacks do not.
TRAINER_KEYS = (
    *("max_epochs", "max_steps", "limit_train_batches", "overfit_batches", "precision"),
    *("gradient_clip_val", "gradient_clip_algorithm"),
)


@dataclass
class Fault:
    """A tensor that is not finite.

    Attributes:
        module: name of the module that it belongs to; empty for the loss.
        kind: weight, input, output, loss or gradient.
        tensor: which one of that kind; empty where there is one.
        holds: nan, inf or -inf.
        count: how many of its values.
        size: of all its values.
        samples: ids of the samples in which it is the first one; none of a gradient.
    """

    module: str
    kind: str
    tensor: str
    holds: str
    count: int
    size: int
    samples: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SampleLoss:
    """One sample by itself.

    Attributes:
        sample_id: index in the split.
        terms: name -> mean over the sample's own targets; `None` where it has none.
        share: what it adds to the loss of the step.
    """

    sample_id: int
    terms: dict[str, float | None]
    share: float


@dataclass
class Replay:
    """A step made again.

    Attributes:
        samples: losses of each sample by itself, in the order of the plan.
        descriptions: of each sample, name -> text.
        loss: of the step.
        grad_norms: block -> norm of its gradient.
        grad_norm: of the whole gradient, before clipping.
        faults: what is not finite in the forward passes, then in the gradient.
        weights_step: optimizer steps that the weights have behind them.
        dropout: the largest probability in the network; replay switches dropout off.
        way: largest relative difference to the ledger's losses on the way; `None` without steps.
    """

    samples: list[SampleLoss] = field(default_factory=list)
    descriptions: list[dict[str, str]] = field(default_factory=list)
    loss: float = 0.0
    grad_norms: dict[str, float] = field(default_factory=dict)
    grad_norm: float = math.nan
    faults: list[Fault] = field(default_factory=list)
    weights_step: int = 0
    dropout: float = 0.0
    way: float | None = None


def replay(
    run: Path,
    *,
    step: int,
    attempt: int | None = None,
    advance: bool = False,
    samples: int = 20,
    json: Path | None = None,
    accelerator: Literal["auto", "cpu", "gpu"] = "auto",
    trust_checkpoint: bool = False,
) -> int:
    """Rebuild the global batch of one optimizer step on one device: samples, losses, gradients.

    Args:
        run: a run folder, such as runs/demo.
        step: the optimizer step, from 1, as in RUN/ledger.jsonl.
        attempt: look at this attempt; null takes the one that led to the final weights.
        advance: train the steps between the nearest checkpoint and this one first.
        samples: how many samples to print, those with the largest share of the loss first.
        json: write everything to this file too.
        accelerator: where it runs.
        trust_checkpoint: import whatever the run's config names as a class.

    Returns:
        1 where something is not finite, else 0.
    """
    run = Path(run)
    if samples < 0:
        raise ValueError(f"--samples must be 0 or more, got {samples}.")
    if json is not None and not Path(json).absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {json}: there is no folder {Path(json).parent}; make it.")
    found = find_step(run, step, attempt)
    start = find_start(run, found)
    path, module, data, trainer_values, seed = _from_config(run, trust_checkpoint)
    advance = advance and start.num_older > 0
    with tempfile.TemporaryDirectory() as folder:
        result = replay_step(
            *(found, start, module, data, run, Path(folder), trainer_values, advance, accelerator)
        )
    _say("config", path.name)
    _show_start(found, start, result, seed, advance)
    _show_samples(result, samples)
    _show_result(found, result)
    if json is not None:
        content = {
            "run": str(run),
            "ledger": found.line,
            "is_discarded": found.is_discarded,
            "config": str(path),
            "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
            "checkpoint_step": start.step,
            "damaged_checkpoints": start.damaged,
            **asdict(result),
        }
        Path(json).write_text(dumps(_finite(content), indent=1) + "\n", encoding="utf-8")
        _say("written", str(json))
    return 1 if result.faults else 0


def _from_config(run: Path, trust: bool) -> tuple[Path, Any, Any, dict[str, Any], int | None]:
    """Return the config's path, module, data, trainer's values and seed."""
    silence_noise()
    path = newest_config(run)
    config = read_config(path)
    lacking = [key for key in ("model", "data") if not config.get(key)]
    if lacking:
        raise ValueError(f"{path} lacks {' and '.join(lacking)}; copy the run's own config again.")
    given = config.get("seed_everything")
    seed = None if given is None or given is False else int(given)
    if seed is not None:
        seed_everything(seed, workers=True, verbose=False)
    classes = StoredClasses(trust)
    for key in ("model", "data"):
        classes.check_spec(path, key, config[key])
    module, data = built(config)
    if not (isinstance(module, ExactModule) and isinstance(data, PlannedDataModule)):
        raise ValueError(
            f"{path} trains a {type(module).__name__} on {type(data).__name__}; only an "
            "ExactModule on a PlannedDataModule has steps that can be made again."
        )
    return path, module, data, config.get("trainer") or {}, seed


def _say(label: str, text: str) -> None:
    """Print one line; what does not fit goes on below its text."""
    indent = " " * (LABEL + 1)
    line = f"{label:<{LABEL}} {text}"
    print(textwrap.fill(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False))


def _show_start(
    found: LedgerStep, start: Start, result: Replay, seed: int | None, advance: bool
) -> None:
    line, steps = found.line, f"{start.num_older} step{'s' * (start.num_older != 1)}"
    _say(
        "step",
        f"{line['step']}: step {line['step_in_epoch']} of epoch {line['epoch']}, attempt "
        f"{line['attempt']}, {line['samples']} samples, the ledger's digest",
    )
    if found.is_discarded:
        _say("discarded", "a later attempt repeated it; the final weights know nothing of it")
    if found.left_out:
        _say("left out", f"{found.left_out}; the final weights know nothing of it")
    if start.damaged:
        _say("damaged", f"passed over: {', '.join(start.damaged)}")
    if start.checkpoint is not None:
        _say("checkpoint", f"{start.checkpoint.name} of step {start.step}")
    else:
        how = "no seed: not the run's own" if seed is None else f"seed {seed}"
        _say("checkpoint", f"none before it: the untrained network ({how})")
    if advance:
        way = f"; their losses: within {result.way:.1e} of the ledger's"
        _say("advanced", f"trained {steps} to it{'' if result.way is None else way}")
    elif start.num_older:
        _say(
            "weights",
            f"{steps} older than the step's own, so losses differ from the ledger's; "
            "--advance trains the steps between",
        )
    if result.dropout:
        _say(
            "dropout",
            f"up to {result.dropout:g} in the run, off here, so losses differ from the ledger's",
        )


def _show_samples(result: Replay, most: int) -> None:
    names, terms = list(result.descriptions[0]), list(result.samples[0].terms)
    rows = sorted(
        zip(result.samples, result.descriptions, strict=True),
        key=lambda row: (math.isfinite(row[0].share), -row[0].share),
    )
    table = Table(width=WIDTH, title="samples", title_justify="left", title_style="bold")
    table.add_column("id", justify="right", no_wrap=True)
    table.add_column(names[0], no_wrap=True, overflow="ellipsis", ratio=1)
    for name in names[1:]:
        longest = max(len(words[name]) for _, words in rows)
        width = min(max(longest, len(name)), WORDS)
        table.add_column(name, no_wrap=True, overflow="ellipsis", width=width)
    for name in [*terms, "share"]:
        table.add_column(name[:NUMBER], justify="right", no_wrap=True)
    for loss, words in rows[:most]:
        numbers = [_number(loss.terms[name]) for name in terms]
        shown = [_printable(words[name]) for name in names]
        table.add_row(str(loss.sample_id), *shown, *numbers, _number(loss.share))
    Console(width=WIDTH, highlight=False).print(table)
    if len(rows) > most:
        print(f"… and {len(rows) - most} more with smaller shares (--samples, --json)")


def _show_result(found: LedgerStep, result: Replay) -> None:
    total = sum(loss.share for loss in result.samples)
    _say("loss", f"{result.loss:.10g}, {_beside(result.loss, found.line['loss'])}")
    _say("", f"{total:.10g}, sum of the shares of the samples by themselves")
    table = Table(width=WIDTH, title="gradient", title_justify="left", title_style="bold")
    table.add_column("block", overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column("norm", justify="right", no_wrap=True)
    for block, norm in result.grad_norms.items():
        table.add_row(_printable(block), _number(norm))
    Console(width=WIDTH, highlight=False).print(table)
    ledger = found.line["grad_norm"]
    beside = "the ledger has none" if ledger is None else _beside(result.grad_norm, ledger)
    _say("grad norm", f"{result.grad_norm:.10g}, {beside}")
    if not result.faults:
        _say("finite", "all losses, weights, activations and gradients")
    for place, fault in enumerate(result.faults[:NUM_SHOWN]):
        _say("also" if place else "not finite", _fault_line(fault, len(result.samples)))
    if len(result.faults) > NUM_SHOWN:
        _say("", f"… and {len(result.faults) - NUM_SHOWN} more (--json)")


def _beside(value: float, ledger: float) -> str:
    return f"ledger {ledger:.10g}, relative difference {relative(value, ledger):.1e}"


def _fault_line(fault: Fault, num_samples: int) -> str:
    where = f"the loss itself ({fault.tensor}), after finite outputs"
    if fault.module:
        where = f"{' '.join([fault.kind, fault.tensor]).strip()} of {fault.module}"
    line = f"{where}: {fault.holds} in {fault.count:,} of {fault.size:,} values"
    if not fault.samples:
        return line
    if len(fault.samples) == num_samples:
        return f"{line}; all {num_samples} samples"
    more = ", …" if len(fault.samples) > NUM_SHOWN else ""
    ids = ", ".join(str(i) for i in fault.samples[:NUM_SHOWN])
    return f"{line}; sample{'s' * (len(fault.samples) != 1)} {ids}{more}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _printable(text: str) -> str:
    """Text that rich prints as it is, control characters made visible."""
    return escape("".join(c if c.isprintable() else "�" for c in text))


def _finite(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become words."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def replay_step(
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
    line = found.line
    given = {k: v for k, v in trainer_values.items() if k in TRAINER_KEYS and v is not None}
    # The run's limits may end before a step of an earlier attempt.
    for name, needed in (("max_epochs", line["epoch"] + 1), ("max_steps", line["step"])):
        if given.get(name, -1) >= 0:
            given[name] = max(given[name], needed)
    with quiet():
        trainer = Trainer(
            **given,
            # As in the run, if it went on.
            callbacks=[NonFinite("skip", most_skipped=sys.maxsize), at_step],
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
        trainer.ckpt_path = start.checkpoint  # which the data are read by, too
        trainer.fit(module, data, weights_only=True)
    if at_step.seen is None:
        raise RuntimeError(
            f"training ended after step {trainer.global_step}, before step {line['step']}; "
            "look at the nearest checkpoint's weights with --advance=false."
        )
    made = [row for row in read_ledger(folder / "ledger.jsonl")[0] if "loss" in row]
    lineage, _ = surviving(read_ledger(run / "ledger.jsonl")[0])
    ways = [
        relative(row["loss"], lineage[row["step"]]["loss"])
        for row in made
        if row["step"] in lineage
    ]
    return replace(at_step.seen, way=max(ways, default=None))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what Lightning says about a training: here it is none."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)


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
        path, rehearsal = run / "topology.json", None
        if path.exists():
            rehearsal = loads(path.read_text(encoding="utf-8"))["plan"].get("rehearsal")
        micro = math.ceil(data.global_batch_size / slots)
        micro = rehearsal["micro_batch_size"] if rehearsal else micro
    data.batch_size, data.micro_batch_size = None, micro


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
        is_there = trainer.global_step == self.found.line["step"] - 1
        if self.seen is not None or not (is_there or not self.advance):
            return
        assert isinstance(pl_module, ExactModule)
        trainer.should_stop = True
        pl_module.eval()  # for good: no step follows
        step = self.found.line["step_in_epoch"]
        self.seen = looked_at(trainer, pl_module, self._epoch(trainer), step)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)

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

    plan, batching = data.plan("train", epoch), data.batching
    counts = dataset.target_counts
    dealt = iterate_micro_batches(plan, dataset.lengths, counts, batching, 1, 0, epoch, step)
    parts = list(itertools.islice(dealt, batching.accumulate_grad_batches))
    module.on_train_batch_start(ready(parts[0]), step * len(parts))  # it belongs to the step
    dropout = max((m.p for m in module.modules() if isinstance(m, nn.Dropout)), default=0.0)
    out = Replay(weights_step=trainer.global_step, dropout=dropout)
    with torch.no_grad(), precision.train_step_context(), FaultSearch(module) as search:
        for sample in plan.step_ids(step):  # each a micro-batch of its own
            alone = replace(parts[0], ids=np.array([int(sample)]), weights=np.ones(1, np.float32))
            batch = ready(alone)
            terms = module.training_terms(batch)
            share = float(share_of_step(terms, batch, module.term_weights()))
            means = {
                name: float(total) / float(count) if float(count) else None
                for name, (total, count) in terms.items()
            }
            loss = SampleLoss(int(sample), means, share)
            search.end_sample(loss)
            out.samples.append(loss)
            out.descriptions.append(dataset.describe(loss.sample_id, epoch))
    out.faults = list(search.faults.values())
    module.zero_grad(set_to_none=True)
    with torch.enable_grad():
        for part in parts:
            batch = ready(part)
            with precision.train_step_context():
                loss_share = share_of_step(
                    module.training_terms(batch), batch, module.term_weights()
                )
            loss_share.backward()
            out.loss += float(loss_share.detach())
    squares: dict[str, float] = {}
    bad_gradient: Fault | None = None
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            block = block_of(name)
            squares[block] = squares.get(block, 0.0) + float(parameter.grad.double().norm()) ** 2
            bad_gradient = bad_gradient or _fault(block, "gradient", name, parameter.grad)
    out.grad_norms = {block: math.sqrt(square) for block, square in squares.items()}
    out.grad_norm = math.sqrt(sum(squares.values()))
    out.faults += [bad_gradient] if bad_gradient else []
    module.zero_grad(set_to_none=True)
    return out


def relative(new: float, old: float) -> float:
    """Return the difference of two values relative to the second."""
    if new == old or (math.isnan(new) and math.isnan(old)):
        return 0.0
    return abs(new - old) / abs(old) if old else math.inf


class FaultSearch:
    """Search of forward passes for the first tensor with NaN or +inf, sample by sample.

    -inf is what masks are made of: it counts in the loss alone.

    Args:
        module: whose submodules are watched while this is used as a context.

    Attributes:
        faults: place -> the first one of some samples.
    """

    def __init__(self, module: nn.Module) -> None:
        self.faults: dict[tuple[str, str, str], Fault] = {}
        self._names = {part: name or type(part).__name__ for name, part in module.named_modules()}
        self._first: Fault | None = None
        self._handles: list[Any] = []

    def __enter__(self) -> "FaultSearch":
        for part in self._names:
            self._handles += [
                part.register_forward_pre_hook(self._before, with_kwargs=True),
                part.register_forward_hook(lambda part, args, out: self._look(part, "output", out)),
            ]
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def end_sample(self, loss: SampleLoss) -> None:
        """Note what the pass of one sample showed, and begin the next."""
        first, self._first = self._first, None
        if first is None and not math.isfinite(loss.share):
            wrong = [name for name, v in loss.terms.items() if v is not None and v - v != 0]
            first = Fault("", "loss", " ".join(wrong), str(loss.share), 1, 1)
        if first is not None:
            place = (first.module, first.kind, first.tensor)
            self.faults.setdefault(place, first).samples.append(loss.sample_id)

    def _before(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        own = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        self._look(part, "weight", dict(own))
        is_one = len(args) == 1 and not kwargs
        self._look(part, "input", args[0] if is_one else {**dict(enumerate(args)), **kwargs})

    def _look(self, part: nn.Module, kind: str, values: Any) -> None:
        for label, tensor in _tensors(values):
            if self._first is None:
                fault = _fault(self._names[part], kind, label, tensor)
                self._first = fault if fault and fault.holds != "-inf" else None


def block_of(name: str) -> str:
    """Return the block of a parameter: up to the first number of its name, else at most three
    steps down and never the parameter itself."""
    numbered = re.match(r"(.*?\.\d+)\.", name)
    return numbered[1] if numbered else ".".join(name.split(".")[:-1][:3]) or name


def _fault(module: str, kind: str, label: str, tensor: Tensor) -> Fault | None:
    tensor = tensor.detach()
    count = int((~torch.isfinite(tensor)).sum())
    if not count:
        return None
    is_nan, is_inf = bool(torch.isnan(tensor).any()), bool((tensor == math.inf).any())
    holds = "nan" if is_nan else "inf" if is_inf else "-inf"
    return Fault(module, kind, label, holds, count, tensor.numel())


def _tensors(values: Any, label: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors in nested dicts and sequences."""
    if isinstance(values, Tensor):
        yield label, values
        return
    if isinstance(values, tuple) and hasattr(values, "_asdict"):
        values = values._asdict()
    elif isinstance(values, list | tuple):
        values = dict(enumerate(values))
    if hasattr(values, "items"):
        for name, value in values.items():
            yield from _tensors(value, f"{label}.{name}".lstrip("."))
