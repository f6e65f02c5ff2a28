"""How a run went: its attempts, what was repeated, and how it ended."""

import statistics
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from lit_models.reporting.chart import Interruption
from lit_models.reporting.reading import RunRecord
from lit_models.reporting.wording import counted, duration, shown

FRESH_S = 90.0  # a ledger written to so lately is still being written


@dataclass
class Attempt:
    """One start of the run.

    Attributes:
        number: from 1.
        world_size: devices.
        resumed_from: steps that were done when it began.
        last_step: that it did; `resumed_from` where it did none.
        seconds: of its steps, with what lies between them.
        repeated: steps of earlier attempts that it did again.
        repeated_to: the last of them, or `resumed_from`.
        end: how it ended, in words.
        began: when it began to train; none in a ledger of an earlier version.
    """

    number: int
    world_size: int
    resumed_from: int
    last_step: int
    seconds: float = 0.0
    repeated: int = 0
    repeated_to: int = 0
    end: str = ""
    began: datetime | None = None

    @property
    def last_seen(self) -> datetime | None:
        """When its last step ended, as far as its ledger goes."""
        return None if self.began is None else self.began + timedelta(seconds=self.seconds)


@dataclass
class Ending:
    """How the run stands: one word, its kind (good, warn, bad), and a sentence."""

    word: str
    kind: str
    sentence: str


def attempts(run: RunRecord) -> list[Attempt]:
    """Return the attempts of a run in order."""
    found: list[Attempt] = []
    lineage: set[int] = set()
    for line in run.ledger:
        if "resumed_from_step" in line:
            begin = line["resumed_from_step"]
            lost = {step for step in lineage if step > begin}
            lineage -= lost
            if found and not found[-1].end:
                found[-1].end = "broke off" if lost else "ended"
            found.append(Attempt(line["attempt"], line["world_size"], begin, begin))
            found[-1].repeated, found[-1].repeated_to = len(lost), max(lost, default=begin)
            if "started_at" in line:
                found[-1].began = datetime.fromisoformat(line["started_at"])
        elif found and line.get("event") == "stopped":
            found[-1].end = f"stopped by {line['reason']}"
        elif found and "event" not in line:
            lineage.add(line["step"])
            found[-1].last_step = line["step"]
            found[-1].seconds += line.get("seconds", 0.0)
    if found and not found[-1].end:
        found[-1].end = ending(run).word
    return found


def interruptions(run: RunRecord) -> list[Interruption]:
    """Return what the charts mark: each attempt after the first."""
    return [
        Interruption(one.resumed_from, f"attempt {one.number}", one.repeated_to)
        for one in attempts(run)[1:]
    ]


def ending(run: RunRecord) -> Ending:
    """Return how the run stands, from the ledger, topology.json and failure.json."""
    last = max(run.lineage, default=0)
    newest = run.ledger[-1] if run.ledger else {}
    at = f"after {counted(last, 'step')}"
    if newest.get("event") == "stopped":
        return Ending("stopped", "warn", f"Stopped by {newest['reason']} {at}; --ckpt_path auto "
                      "goes on.")  # fmt: skip
    if run.failure:
        where = f"rank {run.failure.get('rank')}, step {run.failure.get('step')}"
        return Ending("failed", "bad", f"Failed {at} ({where}): {run.failure.get('error')}")
    is_over = run.topology.get("is_over")
    planned = planned_steps(run)
    if is_over or (is_over is None and planned is not None and last >= planned > 0):
        return Ending("finished", "good", f"Finished {at}.")
    of = f" of {shown(planned)}" if planned else ""
    if run.age_s < max(FRESH_S, 20 * typical_seconds(run)):
        return Ending("in progress", "warn", f"In progress: {shown(last)}{of} steps so far; the "
                      f"newest was written {duration(max(round(run.age_s), 1))} ago.")  # fmt: skip
    return Ending("not finished", "bad", f"Not finished: {shown(last)}{of} steps, and no word for "
                  f"{duration(run.age_s)}. It was killed, or it hangs.")  # fmt: skip


def planned_steps(run: RunRecord) -> int | None:
    """Return the optimizer steps that the configuration asks for, or None without an end."""
    trainer: dict[str, Any] = run.config.get("trainer") or {}
    per_epoch = run.plan.get("steps_per_epoch")
    limits = []
    if (trainer.get("max_steps") or -1) > 0:
        limits.append(int(trainer["max_steps"]))
    if (trainer.get("max_epochs") or -1) > 0 and per_epoch:
        limits.append(int(trainer["max_epochs"]) * int(per_epoch))
    return min(limits) if limits else None


def typical_seconds(run: RunRecord) -> float:
    """Return the median seconds of a surviving step; 0 without steps."""
    found = [line["seconds"] for line in run.lineage.values() if "seconds" in line]
    return statistics.median(found) if found else 0.0


def total_seconds(run: RunRecord) -> float:
    """Return the seconds of all steps, the repeated ones too, with what lies between them."""
    return sum(line.get("seconds", 0.0) for line in run.steps)


def events(run: RunRecord) -> list[str]:
    """Return what happened beside the steps, a sentence each: updates left out, weights put back"""
    out = []
    for line in run.ledger:
        if line.get("event") == "not_applied":
            samples = ", ".join(map(str, line.get("sample_ids", [])[:8]))
            out.append(f"Step {line['step']}: loss or gradient was not finite; its update was not "
                       f"applied ({line.get('policy')}; samples {samples}).")  # fmt: skip
        elif line.get("event") == "rolled_back":
            out.append(f"Attempt {line['attempt']}: the weights of step {line['to_step']} were put "
                       "back.")  # fmt: skip
    return out
