"""Verification of a run: its ledger, plan and checkpoints are compared with each other."""

import json
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from datamodules.core.plan import digest_ids
from datamodules.shards import order
from lit_models.errors import run_guarded
from lit_models.run_files import LEDGER, Row, chained, damaged_file, json_lines, read_checkpoint

SHOWN_FINDINGS = 10


class Status(IntEnum):
    """Exit status of `unisono verify`: the most severe of its findings."""

    PROVEN = 0  # every epoch is whole: each of its samples is in the weights once
    CUT = 3  # an epoch is not whole here, or the run has no end; nothing was used twice
    NOT_APPLIED = 4  # skipped steps are not in the weights
    MISSING = 5  # steps are missing within the ledger or after its last one
    DOUBLED = 6  # a step is in the ledger twice
    OFF_PLAN = 7  # a step used other samples or targets than the plan gives it
    EDITED = 8  # a line is not what the run wrote
    CHECKPOINT = 9  # a checkpoint is damaged, or of another ledger


def verify(runs: list[Path]) -> int:
    """Compare a run's ledger, plan and checkpoints: was each sample used exactly once?

    Exit status: 0 proven, every epoch is whole; 3 an epoch is not whole, or the run continues
    another one or has no end; 4 steps were skipped; 5 steps are missing; 6 a step occurs twice; 7 a
    step used other samples or targets than planned; 8 the ledger was edited; 9 a checkpoint is
    damaged or of another run. For several runs it is the highest status; one that cannot be read
    counts as 1.

    Args:
        runs: a run folder, such as runs/demo, or several.
    """
    console = Console(highlight=False, soft_wrap=True)

    def status_of(run: Path) -> Status:
        if len(runs) > 1:
            console.print(f"{'run':<17} {run}", markup=False)
        proof = verify_run(run)
        _show(proof, console)
        return proof.status

    folders = [run for run in runs if not run.is_file()] or runs  # runs/* also names error.txt
    return max(run_guarded(partial(status_of, run)) for run in folders)


def _show(proof: "Proof", console: Console) -> None:
    lines = [("attempts", f"{len(proof.attempts)} (devices: {str(proof.attempts)[1:-1]})")]
    lines += [("discarded", f"{lost} (repeated after the kill)") for lost in proof.discarded]
    steps = sum(use.num_steps for use in proof.epochs)
    samples = sum(use.num_samples for use in proof.epochs)
    lines.append(("in the weights", f"{steps:,} steps, {samples:,} samples"))
    if proof.checkpoints:
        lines.append(("checkpoints", f"{', '.join(proof.checkpoints)}: the ledger's"))
    # Counts of samples that are not the plan's would mean nothing.
    if proof.status <= Status.NOT_APPLIED:
        lines += proof.epoch_lines()
        for name, (own, targets) in proof.sources.items():
            lines.append((f"of {name}", f"{own:,} samples, {targets:,} targets"))
    for label, text in lines:
        console.print(f"{label:<17} {text}")
    for finding in proof.findings[:SHOWN_FINDINGS]:
        word = "not whole" if finding.status is Status.CUT else "fault"
        console.print(f"[red]{word}[/red]{' ' * (17 - len(word))} ", end="")
        console.print(finding.text, markup=False)
    if len(proof.findings) > SHOWN_FINDINGS:
        console.print(f"(+{len(proof.findings) - SHOWN_FINDINGS} more)")
    if proof.findings:
        console.print(f"status            {proof.status:d} ({proof.status.name.lower()})")


class Finding(NamedTuple):
    """Status and one-sentence text of a finding."""

    status: Status
    text: str


@dataclass(frozen=True)
class EpochUse:
    """Numbers of steps and samples of an epoch that are in the weights and that were planned."""

    epoch: int  # from 0, as in the ledger
    num_steps: int
    planned_steps: int
    num_samples: int
    planned_samples: int


@dataclass
class Proof:
    """Result of `verify_run`."""

    epochs: list[EpochUse] = field(default_factory=list)  # of the surviving lineage
    discarded: list[str] = field(default_factory=list)  # see `Lineage`
    attempts: list[int] = field(default_factory=list)  # world size of each attempt
    checkpoints: list[str] = field(default_factory=list)  # name and step of each that agrees
    # Source of a mixture -> its samples and targets that are in the weights.
    sources: dict[str, list[int]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)  # empty where all is proven

    def add(self, status: Status, text: str) -> None:
        """Add a finding."""
        self.findings.append(Finding(status, text))

    @property
    def status(self) -> Status:
        """The most severe status."""
        return max((finding.status for finding in self.findings), default=Status.PROVEN)

    @property
    def faults(self) -> list[str]:
        """All findings except CUT."""
        return [finding.text for finding in self.findings if finding.status != Status.CUT]

    def epoch_lines(self) -> list[tuple[str, str]]:
        """Return (epochs, "N of M samples, each once") pairs, one for equal neighbouring epochs."""
        lines = []
        for use, group in groupby(self.epochs, lambda use: replace(use, epoch=0)):
            numbers = [one.epoch for one in group]
            first, last = numbers[0], numbers[-1]
            name = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            text = f"{use.num_samples:,} of {use.planned_samples:,} samples, each once"
            if use.num_steps < use.planned_steps:
                text = f"{use.num_steps:,} of {use.planned_steps:,} steps, {text}"
            lines.append((name, text))
        return lines


_KEYS = {  # required keys of each kind of line
    "start": {"attempt", "resumed_from_step", "plan_digest", "plan_hash", "world_size"},
    "event": {"attempt", "event"},
    "step": {"attempt", "epoch", "step", "step_in_epoch", "digest", "samples"},
}
_TEXTS = {"event", "digest", "plan_digest", "plan_hash"}  # the others are whole numbers


def _kind(row: Row) -> str:
    if "event" in row:
        return "event"
    return "start" if "resumed_from_step" in row else "step"


def read_ledger(run: Path) -> list[Row]:
    """Return the complete lines of a run's ledger.

    Raises:
        FileNotFoundError: the run has no ledger.
        ValueError: a line other than the last is damaged.
    """
    path = run / LEDGER
    if not path.exists():
        what = f"{run} holds no {LEDGER}" if run.is_dir() else f"there is no run folder {run}"
        raise FileNotFoundError(f"{what}; name a run folder, such as runs/demo.")
    rows = json_lines(path)
    for number, row in enumerate(rows, 1):
        if missing_keys := _KEYS[_kind(row)] - row.keys():
            raise damaged_file(path, f"it lacks {', '.join(sorted(missing_keys))}", number)
        if wrong := [name for name in _KEYS[_kind(row)] - _TEXTS if type(row[name]) is not int]:
            raise damaged_file(path, f"{wrong[0]} is no whole number", number)
    return rows


def plan_of(run: Path) -> Row:
    """Return what the plan of a run was made from: `request` and `repeats_first_epoch`.

    Raises:
        FileNotFoundError: the run has no plan.
        ValueError: the plan is damaged.
    """
    path = run / "plan.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{run} holds no plan.json; the run never began to train: `unisono fit` writes it at "
            "the first step. Copy the whole run folder."
        )
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
        order.request_of(plan["request"])
        plan["repeats_first_epoch"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged_file(path, error) from error
    return plan


class Lineage(NamedTuple):
    """The lines of a ledger that led to the final weights."""

    rows: list[Row]  # these lines, in their order
    steps: dict[int, Row]  # step -> its line
    discarded: list[str]  # attempt and steps that a later attempt repeated after a kill
    left_out: dict[int, str]  # step -> why it is not in the weights, though not repeated


def surviving(rows: list[Row]) -> Lineage:
    """Return the lineage of a ledger's lines."""
    lineage: list[Row] = []
    discarded: list[str] = []
    for row in rows:
        if (begin := row.get("resumed_from_step")) is not None:
            lost = [line for line in lineage if _kind(line) == "step" and line["step"] > begin]
            if lost:
                numbers = [line["step"] for line in lost]
                steps_lost = f"steps {min(numbers)} to {max(numbers)}"
                discarded.append(f"attempt {lost[0]['attempt']}, {steps_lost}")
            lineage = [line for line in lineage if line.get("step", 0) <= begin]
        lineage.append(row)
    steps = {line["step"]: line for line in lineage if _kind(line) == "step"}
    # The gradient scaler of float16 skips these steps by itself.
    not_finite = [step for step, line in steps.items() if line.get("is_finite") is False]
    left_out = dict.fromkeys(not_finite, "its loss or gradient is not finite")
    for line in lineage:
        if line.get("event") == "not_applied":
            left_out[line["step"]] = "its update was not applied"
    return Lineage(lineage, steps, discarded, left_out)


def verify_run(run: Path) -> Proof:
    """Compare a run's ledger, plan and checkpoints with each other.

    Digests are recomputed from the plan, epoch by epoch, and compared with those of the training
    steps. A digest is an order-free sum of 63-bit hashes: two different sets agree by chance once
    in 10^19. The hash of each line includes that of the line before, and each checkpoint stores the
    newest hash, so that after an edit of one file the others disagree. The run itself compared the
    targets.

    Raises:
        FileNotFoundError: the run has no ledger or no plan.
        ValueError: the ledger or the plan is damaged.
    """
    rows = read_ledger(run)
    plan, path = plan_of(run), run / "plan_lengths.npy"
    try:
        lengths = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise damaged_file(path, error) from error
    lineage = surviving(rows)
    starts = [row for row in rows if _kind(row) == "start"]
    proof = Proof(discarded=lineage.discarded, attempts=[row["world_size"] for row in starts])
    newest = _check_chain_and_order(proof, rows)
    own = order.plan_hash(plan["request"], plan["repeats_first_epoch"], lengths)
    counted = {line["attempt"] for line in lineage.steps.values()}
    for row in starts:
        is_in_weights = row["attempt"] in counted or (not counted and row is starts[-1])
        if row["plan_hash"] != own and is_in_weights:
            text = f"attempt {row['attempt']} followed another plan than plan.json and its lengths"
            proof.add(Status.OFF_PLAN, text)
    planned = order.num_rows(order.request_of(plan["request"]))
    if len(lengths) == planned:  # else reported: another plan
        _check_epochs(proof, lineage, plan, lengths)
    _check_checkpoints(proof, run, newest)
    if not rows or rows[-1].get("event") not in ("ended", "stopped"):
        proof.add(
            Status.CUT,
            "the last attempt has no end: it runs, it was killed, or the ledger's last lines are "
            "missing",
        )
    return proof


def _check_chain_and_order(proof: Proof, rows: list[Row]) -> dict[str, int]:
    """Check that each line's hash continues the chain, that each attempt resumes from an existing
    step, and that its steps are consecutive. Return hash of a line -> newest step at that line."""
    before, last = "", 0
    newest: dict[str, int] = {}
    for number, row in enumerate(rows, 1):
        if row.get("hash") != chained(row, before):
            proof.add(
                Status.EDITED,
                f"line {number} of the ledger: its hash is not that of its values and the line "
                "before; it was edited, or lines before it were taken out",
            )
        before = str(row.get("hash"))
        if (begin := row.get("resumed_from_step")) is not None:
            if begin > last:
                text = f"steps are missing: attempt {row['attempt']} went on from step {begin}"
                rest = f", the last is {last}" if number > 1 else " of another run: see its ledger"
                proof.add(Status.MISSING if number > 1 else Status.CUT, text + rest)
            last = begin
        elif "event" not in row:
            step, text = row["step"], f"attempt {row['attempt']}: step {row['step']}"
            if step <= last:
                proof.add(Status.DOUBLED, f"{text} follows step {last}")
            elif step > last + 1:
                proof.add(Status.MISSING, f"steps are missing: {text} follows step {last}")
            last = step
        newest[before] = last
    return newest


def _check_epochs(proof: Proof, lineage: Lineage, plan: Row, lengths: np.ndarray) -> None:
    """Check that each step used the samples and targets of its plan and was applied."""
    request, lines = order.request_of(plan["request"]), lineage.steps
    for epoch, group in groupby(sorted(lines), lambda step: lines[step]["epoch"]):
        made = order.planned_epoch(request, lengths, 0 if plan["repeats_first_epoch"] else epoch)
        steps = samples = 0
        seen: set[int] = set()
        for number in group:
            line = lines[number]
            step = line["step_in_epoch"]
            where = f"epoch {epoch}, step {step}"
            if step in seen:
                proof.add(Status.DOUBLED, f"{where}: twice")
                continue
            seen.add(step)
            if number in lineage.left_out:
                why = lineage.left_out[number]
                text = f"step {number}: {why}; {line['samples']} samples are not in the weights"
                proof.add(Status.NOT_APPLIED, text)
            else:
                steps, samples = steps + 1, samples + line["samples"]
            ids = made.step_ids(step) if step < made.num_steps else np.empty(0, np.int64)
            digest = f"{digest_ids(ids):016x}"
            if line["digest"] != digest or line["samples"] != len(ids):
                used = f"used {line['samples']} samples with digest {line['digest']}"
                proof.add(Status.OFF_PLAN, f"{where}: {used}, planned {len(ids)} with {digest}")
            sources = order.of_sources(request, lengths, ids)
            if line.get("sources", {}) != sources:
                text = f"{where}: by sources {line.get('sources')}, planned {sources}"
                proof.add(Status.OFF_PLAN, text)
            elif number not in lineage.left_out:
                order.add_sources(proof.sources, sources)
            if "planned_targets" in line:
                text = f"{where}: the loss counted {line.get('targets')} targets, planned"
                proof.add(Status.OFF_PLAN, f"{text} {line['planned_targets']}")
        goes_on = not proof.epochs and lineage.rows[0].get("resumed_from_step")  # from another run
        gaps = set(range(min(seen) if goes_on else 0, max(seen) + 1)) - seen
        if gaps:
            text = f"epoch {epoch}: steps are missing, the first of {len(gaps)} is {min(gaps)}"
            proof.add(Status.MISSING, text)
        proof.epochs.append(EpochUse(epoch, steps, made.num_steps, samples, request.num_samples))
    if any(use.num_steps < use.planned_steps for use in proof.epochs):
        proof.add(Status.CUT, "not every epoch is whole: the counts above are all that was used")
    if not lines:
        proof.add(Status.CUT, "the ledger holds no step")


def _check_checkpoints(proof: Proof, run: Path, newest: dict[str, int]) -> None:
    """Check that each checkpoint is sound and has the step of the ledger line it was saved at."""
    for path in sorted((run / "checkpoints").glob("[!.]*.ckpt")):
        try:
            content = read_checkpoint(path, mmap=True)
        except (ValueError, OSError) as error:
            proof.add(Status.CHECKPOINT, str(error))
            continue
        step = content.get("global_step")
        name = f"{path.name} (step {step})"
        saved_at = newest.get(content.get("ledger", {}).get("hash"))
        if saved_at is None:
            last = max(newest.values(), default=0)
            lacks = isinstance(step, int) and step > last
            text = f"{name}: the ledger lacks the line it was saved at; its last step is {last}"
            proof.add(Status.MISSING if lacks else Status.CHECKPOINT, text)
        elif step != saved_at:
            text = f"{name} is not what the ledger says: step {step}, not {saved_at}"
            proof.add(Status.CHECKPOINT, text)
        else:
            proof.checkpoints.append(name)
