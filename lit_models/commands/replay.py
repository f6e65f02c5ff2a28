"""Rebuild one optimizer step of a run on one device."""

import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console

    from lit_models.training.lineage import LedgerStep, Start
    from lit_models.training.probe import Fault
    from lit_models.training.replay import Replay

WIDTH = 80
NUM_IDS_SHOWN = 8
NUM_FAULTS_SHOWN = 5
LABEL, WORDS, NUMBER = 11, 12, 9  # columns
WARN = "yellow"


class Replayed(NamedTuple):
    """A step that was made again, where its weights came from, and the run's config and seed."""

    run: Path
    found: "LedgerStep"
    start: "Start"
    result: "Replay"
    config_file: Path
    seed: int | None


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
    from rich.console import Console

    _check_output(samples, json)
    done = _replayed(Path(run), step, attempt, advance, accelerator, trust_checkpoint)
    console = Console(width=WIDTH, highlight=False)
    _say(console, "config", done.config_file.name)
    _show_start(console, done, advance)
    _show_samples(console, done.result, samples)
    _show_result(console, done.found, done.result)
    if json is not None:
        _write(Path(json), _everything(done))
        _say(console, "written", str(json))
    return 1 if done.result.faults else 0


def _check_output(samples: int, json: Path | None) -> None:
    if samples < 0:
        raise ValueError(f"--samples must be 0 or more, got {samples}.")
    if json is not None and not Path(json).absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {json}: there is no folder {Path(json).parent}; make it.")


def _replayed(
    run: Path, step: int, attempt: int | None, advance: bool, accelerator: str, trust: bool
) -> Replayed:
    import tempfile

    from lit_models.training.lineage import find_start, find_step
    from lit_models.training.replay import replay as replay_step

    found = find_step(run, step, attempt)
    start = find_start(run, found, advance)
    advance = advance and start.num_older > 0
    config_file, module, data, trainer_values, seed = _from_config(run, trust)
    with tempfile.TemporaryDirectory() as folder:
        result = replay_step(
            found, start, module, data, run, Path(folder), trainer_values, advance, accelerator
        )
    return Replayed(run, found, start, result, config_file, seed)


def _from_config(run: Path, trust: bool) -> tuple[Path, Any, Any, dict[str, Any], int | None]:
    """Return the config's path, module, data, trainer's values and seed."""
    from lightning.pytorch import seed_everything

    from datamodules.core.planned import PlannedDataModule
    from lit_models.cli import built, silence_noise
    from lit_models.config_files import newest_config, read_config
    from lit_models.training.exact import ExactModule
    from lit_models.training.hyperparameters import StoredClasses

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


def _show_start(console: "Console", done: Replayed, advance: bool) -> None:
    found, start, result = done.found, done.start, done.result
    line, way = found.line, result.way
    to_train = start.num_older
    say = partial(_say, console)
    say(
        "step",
        f"{line['step']}: step {line['step_in_epoch']} of epoch {line['epoch']}, attempt "
        f"{line['attempt']}, {line['samples']} samples, the ledger's digest",
    )
    if found.is_discarded:
        say("discarded", "a later attempt repeated it; the final weights know nothing of it", WARN)
    if found.left_out:
        say("left out", f"{found.left_out}; the final weights know nothing of it", WARN)
    if start.damaged:
        say("damaged", f"passed over: {', '.join(start.damaged)}", WARN)
    if start.checkpoint is not None:
        say("checkpoint", f"{start.checkpoint.name} of step {start.step}")
    else:
        how = "no seed: not the run's own" if done.seed is None else f"seed {done.seed}"
        say("checkpoint", f"none before it: the untrained network ({how})")
    if to_train and advance:
        agree = "" if way is None else f"; their losses: within {way:.1e} of the ledger's"
        say("advanced", f"trained {_steps(to_train)} to it{agree}")
    elif to_train:
        say(
            "weights",
            f"{_steps(to_train)} older than the step's own, so losses differ from the ledger's; "
            "--advance trains the steps between",
            WARN,
        )
    if result.dropout:
        say(
            "dropout",
            f"up to {result.dropout:g} in the run, off here, so losses differ from the ledger's",
            WARN,
        )


def _steps(count: int) -> str:
    return f"{count} step{'s' * (count != 1)}"


def _say(console: "Console", label: str, text: str, style: str = "") -> None:
    """Print one line; what does not fit goes on below its text."""
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 1))
    row.add_column(width=LABEL)
    row.add_column(overflow="fold")
    row.add_row(Text(label, style), Text(text))
    console.print(row)


def _show_samples(console: "Console", result: "Replay", most: int) -> None:
    from rich.table import Table

    names = list(result.descriptions[0])
    terms = list(result.samples[0].terms)
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
        shown = [_plain(words[name]) for name in names]
        table.add_row(str(loss.sample_id), *shown, *numbers, _number(loss.share))
    console.print(table)
    if len(rows) > most:
        console.print(f"… and {len(rows) - most} more with smaller shares (--samples, --json)")


def _show_result(console: "Console", found: "LedgerStep", result: "Replay") -> None:
    _show_loss(console, found, result)
    _show_gradient(console, found, result)
    _show_faults(console, result)


def _show_loss(console: "Console", found: "LedgerStep", result: "Replay") -> None:
    total = sum(loss.share for loss in result.samples)
    _say(console, "loss", f"{result.loss:.10g}, {_beside(result.loss, found.line['loss'])}")
    _say(console, "", f"{total:.10g}, sum of the shares of the samples by themselves")


def _show_gradient(console: "Console", found: "LedgerStep", result: "Replay") -> None:
    from rich.table import Table

    table = Table(width=WIDTH, title="gradient", title_justify="left", title_style="bold")
    table.add_column("block", overflow="ellipsis", no_wrap=True, ratio=1)
    table.add_column("norm", justify="right", no_wrap=True)
    for block, norm in result.grad_norms.items():
        table.add_row(_plain(block), _number(norm))
    console.print(table)
    ledger = found.line["grad_norm"]
    beside = "the ledger has none" if ledger is None else _beside(result.grad_norm, ledger)
    _say(console, "grad norm", f"{result.grad_norm:.10g}, {beside}")


def _beside(value: float, ledger: float) -> str:
    from lit_models.training.replay import relative

    return f"ledger {ledger:.10g}, relative difference {relative(value, ledger):.1e}"


def _show_faults(console: "Console", result: "Replay") -> None:
    if not result.faults:
        _say(console, "finite", "all losses, weights, activations and gradients", "green")
        return
    for place, fault in enumerate(result.faults[:NUM_FAULTS_SHOWN]):
        title = "not finite" if place == 0 else "also"
        _say(console, title, fault_line(fault, len(result.samples)), "red")
    if len(result.faults) > NUM_FAULTS_SHOWN:
        _say(console, "", f"… and {len(result.faults) - NUM_FAULTS_SHOWN} more")


def fault_line(fault: "Fault", num_samples: int) -> str:
    """Return a fault in words: where, what, in which samples."""
    where = f"the loss itself ({fault.tensor}), after finite outputs"
    if fault.module:
        where = f"{' '.join([fault.kind, fault.tensor]).strip()} of {fault.module}"
    ids = ", ".join(str(i) for i in fault.samples[:NUM_IDS_SHOWN])
    more = ", …" if len(fault.samples) > NUM_IDS_SHOWN else ""
    samples = f"sample{'s' * (len(fault.samples) != 1)} {ids}{more}"
    if len(fault.samples) == num_samples:
        samples = f"all {num_samples} samples"
    elif not fault.samples:
        samples = "no sample meets it first"
    return f"{where}: {fault.holds} in {fault.count:,} of {fault.size:,} values; {samples}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _plain(text: str) -> str:
    """Text that rich prints as it is, control characters made visible."""
    from rich.markup import escape

    return escape("".join(c if c.isprintable() else "�" for c in text))


def _everything(done: Replayed) -> dict[str, Any]:
    start = done.start
    return {
        "run": str(done.run),
        "ledger": done.found.line,
        "is_discarded": done.found.is_discarded,
        "config": str(done.config_file),
        "checkpoint": None if start.checkpoint is None else str(start.checkpoint),
        "checkpoint_step": start.step,
        "damaged_checkpoints": start.damaged,
        **asdict(done.result),
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(_as_json(content), indent=1) + "\n", encoding="utf-8")


def _as_json(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become words."""
    if isinstance(value, dict):
        return {key: _as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
