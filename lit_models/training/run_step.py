"""A step in a run folder: its line, the checkpoint before it, and whether the data still fit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datamodules.plan import digest_ids
from datamodules.planned import PlannedDataModule
from lit_models.training.checkpoint import read_checkpoint
from lit_models.training.lineage import plan_of, read_ledger, surviving


@dataclass(frozen=True)
class LedgerStep:
    """A line of the ledger, the line that began its attempt, and whether a kill discarded it."""

    line: dict[str, Any]
    start: dict[str, Any]
    is_discarded: bool


@dataclass(frozen=True)
class Start:
    """Where the weights come from: a checkpoint and its step, or the untrained network."""

    checkpoint: Path | None
    step: int
    damaged: list[str]


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
    return LedgerStep(chosen, starts[chosen["attempt"]], lineage.get(step) is not chosen)


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


def find_start(run: Path, before: int) -> Start:
    """Return the newest checkpoint of a run that holds at most `before` steps.

    Damaged ones are passed over and named.
    """
    found: list[tuple[int, Path]] = []
    damaged = []
    for path in sorted((run / "checkpoints").glob("*.ckpt")):
        if path.name.startswith("."):
            continue
        try:
            content = read_checkpoint(path, mmap=True)
        except (ValueError, FileNotFoundError):
            damaged.append(path.name)
            continue
        if content.get("global_step", 0) <= before and "loops" in content:
            found.append((int(content["global_step"]), path))
    if not found:
        return Start(None, 0, damaged)
    step, path = max(found)
    return Start(path, step, damaged)


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
