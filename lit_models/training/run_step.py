"""A step in a run folder: its line, the checkpoint before it, and whether the data still fit."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datamodules.core.plan import digest_ids
from datamodules.core.planned import PlannedDataModule
from lit_models.training.checkpoint import read_checkpoint
from lit_models.training.lineage import left_out, plan_of, read_ledger, surviving


@dataclass(frozen=True)
class LedgerStep:
    """A step in a ledger.

    Attributes:
        line: its own.
        start: the line that began its attempt.
        is_discarded: a later attempt repeated it.
        before: lines of the lineage that led to it, without steps that a kill discarded.
        left_out: why it is not in the final weights though it was not repeated, or "".
    """

    line: dict[str, Any]
    start: dict[str, Any]
    is_discarded: bool
    before: list[dict[str, Any]] = field(default_factory=list)
    left_out: str = ""


@dataclass(frozen=True)
class Start:
    """Where the weights come from.

    Attributes:
        checkpoint: None for the untrained network.
        step: of the checkpoint, or 0.
        damaged: names of checkpoints that were passed over.
        num_older: updates between these weights and the step's own.
    """

    checkpoint: Path | None
    step: int
    damaged: list[str]
    num_older: int = 0


def find_step(run: Path, step: int, attempt: int | None = None) -> LedgerStep:
    """Return a step of the surviving lineage, or of one attempt.

    Args:
        run: a run folder.
        step: optimizer step, from 1.
        attempt: from 1; none takes the one that led to the final weights.

    Raises:
        FileNotFoundError: no such run, or it has no ledger.
        ValueError: the ledger has no such step.
    """
    if not run.is_dir():
        raise FileNotFoundError(f"there is no run folder {run}; name one, such as runs/demo.")
    rows, _ = read_ledger(run / "ledger.jsonl")
    starts = {row["attempt"]: row for row in rows if "resumed_from_step" in row}
    lineage, _ = surviving(rows)
    lines = [row for row in rows if "digest" in row]
    chosen = lineage.get(step)
    if attempt is not None:
        own = [row for row in lines if row["attempt"] == attempt]
        chosen = next((row for row in own if row["step"] == step), None)
    if chosen is None:
        raise ValueError(_no_step(run, step, attempt, lines, sorted(lineage)))
    before: list[dict[str, Any]] = []
    for row in rows[: next(place for place, row in enumerate(rows) if row is chosen)]:
        if "resumed_from_step" in row:
            before = [line for line in before if line.get("step", 0) <= row["resumed_from_step"]]
        before.append(row)
    is_discarded = lineage.get(step) is not chosen
    why = "" if is_discarded else left_out(rows).get(step, "")
    return LedgerStep(chosen, starts[chosen["attempt"]], is_discarded, before, why)


def _no_step(
    run: Path, step: int, attempt: int | None, lines: list[dict[str, Any]], lineage: list[int]
) -> str:
    where = f"attempt {attempt} of {run}" if attempt is not None else f"{run}"
    own = [row["step"] for row in lines if attempt in (None, row["attempt"])]
    own = lineage if attempt is None else own
    range_ = f"it has steps {min(own)} to {max(own)}" if own else "it has no step at all"
    others = sorted({row["attempt"] for row in lines if row["step"] == step})
    hint = f"; attempt {others[0]} has it, use --attempt={others[0]}" if others else ""
    return f"{where} has no step {step}: {range_}{hint}."


def find_start(run: Path, found: LedgerStep, advance: bool = False) -> Start:
    """Return the checkpoint whose weights are nearest to those that a step began with.

    Checkpoints of steps that a kill discarded or a rollback undid are of another lineage, and
    damaged ones are passed over and named.

    Args:
        run: a run folder.
        found: the step.
        advance: the steps between are to be trained.

    Raises:
        ValueError: the step follows a rollback whose weights are not kept, or from which no
            training can go on.
    """
    last = found.line["step"] - 1
    places = {row.get("hash"): place for place, row in enumerate(found.before)}
    undone = [place for place, row in enumerate(found.before) if row.get("event") == "rolled_back"]
    rollback = found.before[undone[-1]] if undone else {}
    usable: list[Start] = []
    damaged: list[str] = []
    for path in sorted((run / "checkpoints").glob("*.ckpt")):
        if path.name.startswith("."):
            continue
        try:
            content = read_checkpoint(path, mmap=True)
        except (ValueError, FileNotFoundError):
            damaged.append(path.name)
            continue
        step = int(content.get("global_step", 0))
        place = places.get(content.get("ledger", {}).get("hash"), -1)
        if "loops" not in content or step > last or (place < 0 and "ledger" in content):
            continue
        if not undone or place > undone[-1]:
            usable.append(Start(path, step, damaged, last - step))
        elif step == rollback["to_step"] and not (advance and last > rollback["step"]):
            usable.append(Start(path, step, damaged, last - rollback["step"]))
    if usable:
        return min(usable, key=lambda start: (start.num_older, str(start.checkpoint)))
    if rollback:
        way_out = "leave --advance out" if advance else "replay a step before it"
        raise ValueError(
            f"step {last + 1} follows the rollback of step {rollback['step']} to step "
            f"{rollback['to_step']}, and {run} keeps no checkpoint from which its weights can be "
            f"made; {way_out}, or train with more checkpoints (LastCheckpoint.every_n_steps)."
        )
    return Start(None, 0, damaged, last)


def check_data(data: PlannedDataModule, found: LedgerStep, run: Path, epoch: int) -> None:
    """Raise where the plan does not give the samples that the ledger says were used.

    Raises:
        ValueError: the data or the batch options have changed, or the ledger's step has others.
    """
    line, request = found.line, data.request("train")
    if request.digest() != found.start["plan_digest"]:
        then = plan_of(run)["request"]
        changes = [
            f"{k}: {then.get(k)} -> {v}" for k, v in vars(request).items() if v != then.get(k)
        ]
        raise ValueError(
            f"the data are not those of {run}: its plan cannot be made again "
            f"({'; '.join(changes) or 'another attempt followed this one'}). Restore the files and "
            "options of the run's config.yaml, and start the command in the folder that the run "
            "was started in."
        )
    plan = data.plan("train", epoch)
    ids = plan.step_ids(line["step_in_epoch"])
    digest = f"{digest_ids(ids):016x}"
    if digest != line["digest"]:
        raise ValueError(
            f"step {line['step']} of {run} used {line['samples']} samples with digest "
            f"{line['digest']}, but the plan has {len(ids)} with {digest} there; `unisono verify "
            f"{run}` says which other steps differ."
        )
