"""The surviving lineage of a ledger, and the proof that it used each sample exactly once."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.plan import PlanRequest, digest_ids, make_plan


@dataclass
class Verdict:
    """What `verify_run` found.

    Attributes:
        finished_epochs: epochs whose every step is in the surviving lineage.
        num_steps: steps of the surviving lineage.
        num_samples: samples that they used.
        discarded: steps that a kill made a later attempt repeat, as attempt and step range.
        attempts: the world size of each attempt.
        faults: one sentence each; none means that the proof holds.
    """

    finished_epochs: int = 0
    num_steps: int = 0
    num_samples: int = 0
    discarded: list[str] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def read_ledger(path: Path) -> tuple[list[dict[str, Any]], bool]:
    """Return the whole lines of a ledger, and whether a torn last line was passed over.

    Raises:
        FileNotFoundError: no ledger.
        ValueError: a line that is damaged but not the last.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} holds no {path.name}; name a run folder, such as runs/demo."
        )
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    is_torn = lines[-1] != ""
    rows = []
    for number, line in enumerate(lines[:-1], 1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(
                f'{path}, line {number} is damaged ({error.msg}): "{line[:30]}". Only the run '
                "writes its ledger; copy it again from where it was whole."
            ) from error
    return rows, is_torn


def surviving(rows: list[dict[str, Any]]) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Return step -> line of the lineage that led to the final weights, and what was discarded."""
    lineage: dict[int, dict[str, Any]] = {}
    discarded = []
    for row in rows:
        if "resumed_from_step" in row:
            lost = [step for step in lineage if step > row["resumed_from_step"]]
            if lost:
                attempt = lineage[lost[0]]["attempt"]
                discarded.append(f"attempt {attempt}, steps {min(lost)} to {max(lost)}")
            lineage = {s: line for s, line in lineage.items() if s <= row["resumed_from_step"]}
        elif "event" not in row:
            lineage[row["step"]] = row
    return lineage, discarded


def stop_reason(run: Path) -> str | None:
    """Return the signal that ended the newest attempt of a run, none where it ended by itself."""
    path = run / "ledger.jsonl"
    rows = read_ledger(path)[0] if path.exists() else []
    return rows[-1]["reason"] if rows and rows[-1].get("event") == "stopped" else None


def verify_run(run: Path) -> Verdict:
    """Return whether each sample of each finished epoch was used exactly once.

    The digests are made anew from the plan, epoch by epoch, and compared with what the training
    steps consumed. An order-free sum of 63-bit hashes: two different sets agree by chance once
    in 10^19.

    Args:
        run: a run folder.

    Raises:
        FileNotFoundError: it holds no ledger or no plan.
        ValueError: a damaged ledger.
    """
    rows, _ = read_ledger(run / "ledger.jsonl")
    if not (run / "plan.json").exists():
        raise FileNotFoundError(
            f"{run} holds no plan.json; the run never began to train: `unisono fit` "
            "writes it at the first step."
        )
    plan = json.loads((run / "plan.json").read_text(encoding="utf-8"))
    lengths = np.load(run / "plan_lengths.npy", mmap_mode="r")
    lineage, discarded = surviving(rows)
    starts = [row for row in rows if "resumed_from_step" in row]
    verdict = Verdict(discarded=discarded, attempts=[row["world_size"] for row in starts])
    request = PlanRequest(**plan["request"])
    if request.digest() != plan["digest"]:
        verdict.faults.append("plan.json does not match its own digest")
    counted = {line["attempt"] for line in lineage.values()} or {
        row["attempt"] for row in starts[-1:]
    }
    for row in starts:
        if row["attempt"] in counted and row["plan_digest"] != plan["digest"]:
            verdict.faults.append(f"attempt {row['attempt']} followed another plan")
    verdict.num_steps = len(lineage)
    verdict.num_samples = sum(line["samples"] for line in lineage.values())
    _check_epochs(verdict, lineage, plan, request, lengths)
    return verdict


def _check_epochs(
    verdict: Verdict,
    lineage: dict[int, dict[str, Any]],
    plan: dict[str, Any],
    request: PlanRequest,
    lengths: np.ndarray,
) -> None:
    per_epoch = plan["steps_per_epoch"]
    by_epoch: dict[int, dict[int, dict[str, Any]]] = {}
    for step in sorted(lineage):
        line = lineage[step]
        epoch_lines = by_epoch.setdefault(line["epoch"], {})
        if line["step_in_epoch"] in epoch_lines:
            verdict.faults.append(f"epoch {line['epoch']}, step {line['step_in_epoch']}: twice")
        epoch_lines[line["step_in_epoch"]] = line
    if sorted(lineage) != list(range(1, len(lineage) + 1)):
        verdict.faults.append("steps are missing from the surviving lineage")
    for epoch, lines in by_epoch.items():
        made = make_plan(request, lengths, 0 if plan["repeats_first_epoch"] else epoch)
        for step, line in lines.items():
            ids = made.step_ids(step)
            if line["digest"] != f"{digest_ids(ids):016x}" or line["samples"] != len(ids):
                verdict.faults.append(
                    f"epoch {epoch}, step {step}: used {line['samples']} samples with digest "
                    f"{line['digest']}, planned {len(ids)} with {digest_ids(ids):016x}"
                )
        missing = per_epoch - len(lines)
        if missing == 0:
            verdict.finished_epochs += 1
        elif epoch != max(by_epoch):
            verdict.faults.append(f"epoch {epoch}: {missing} of {per_epoch} steps never used")
