"""Reads a run folder: ledger, metrics, topology, plan, config, throughput, failure."""

import csv
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lit_models.config_files import read_config
from lit_models.training.lineage import read_ledger, surviving

Line = dict[str, Any]
Points = list[tuple[float, float]]  # step and value; a value may be NaN or infinite


@dataclass
class RunRecord:
    """What lies in a run folder.

    Attributes:
        folder: the run folder.
        ledger: its lines, in the order in which they were written.
        lineage: step -> line of what led to the newest weights.
        topology: content of topology.json.
        plan: content of plan.json.
        config: the configuration of the newest training.
        config_text: its file as it is.
        config_name: the name of that file, or "".
        metrics: metric -> step and value, by step.
        throughput: lines of throughput.jsonl.
        failure: content of failure.json, or nothing.
        notes: what is missing or could not be read, a sentence each.
        age_s: seconds since the ledger was written to.
    """

    folder: Path
    ledger: list[Line]
    lineage: dict[int, Line]
    topology: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    config_name: str = ""
    metrics: dict[str, Points] = field(default_factory=dict)
    throughput: list[Line] = field(default_factory=list)
    failure: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    age_s: float = 0.0

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def starts(self) -> list[Line]:
        """The lines with which attempts begin."""
        return [line for line in self.ledger if "resumed_from_step" in line]

    @property
    def steps(self) -> list[Line]:
        """All lines of optimizer steps, those that were repeated later too."""
        return [ln for ln in self.ledger if "event" not in ln and "resumed_from_step" not in ln]


def read_run(folder: Path, config: Path | None, now_s: float) -> RunRecord:
    """Return what a run folder holds; files other than the ledger may be missing.

    Args:
        folder: the run folder.
        config: the file of its newest training's configuration.
        now_s: the time, to say how old the newest line is.

    Raises:
        FileNotFoundError: no such folder, or no ledger in it.
        ValueError: a damaged line in the ledger that is not the last.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no run folder; name one, such as runs/demo.")
    path = folder / "ledger.jsonl"
    ledger, is_torn = read_ledger(path)
    run = RunRecord(folder, ledger, surviving(ledger)[0], age_s=now_s - path.stat().st_mtime)
    if is_torn:
        run.notes.append("The ledger's last line is torn, as a kill leaves it; it is not counted.")
    run.topology = _json_of(folder / "topology.json", run.notes)
    run.plan = _json_of(folder / "plan.json", run.notes)
    if (folder / "failure.json").exists():
        run.failure = _json_of(folder / "failure.json", run.notes)
    run.metrics = read_metrics(folder / "metrics.csv", max(run.lineage, default=0), run.notes)
    if (folder / "throughput.jsonl").exists():
        run.throughput = _survivors(_json_lines(folder / "throughput.jsonl", run.notes), run.starts)
    if config is None:
        run.notes.append("There is no config.yaml: a run of a script has none.")
        return run
    run.config_text, run.config_name = config.read_text("utf-8", "replace"), config.name
    try:
        run.config = read_config(config)
    except ValueError as error:
        run.notes.append(str(error))
    return run


def read_metrics(path: Path, last_step: int, notes: list[str]) -> dict[str, Points]:
    """Return metric -> steps done and values; an empty cell is no value.

    Lightning numbers an evaluation inside a training by the step before it from 0, all other rows
    by the steps done.

    Args:
        path: metrics.csv.
        last_step: of the run.
        notes: gets a sentence where there is nothing.
    """
    if not path.exists():
        notes.append("There is no metrics.csv: metrics of evaluations are not shown.")
        return {}
    found: dict[str, dict[float, float]] = {}
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for row in csv.DictReader(file, restval=""):
            step = _number(row.pop("step", None))
            if step is None or None in row:  # a row that a kill cut short, or a foreign one
                continue
            row.pop("epoch", None)
            is_training = bool(row.get("train/loss"))
            for name, text in row.items():
                if (value := _number(text)) is not None:
                    inside = not is_training and name.startswith("val/")
                    at = min(step + 1, last_step) if inside else step
                    found.setdefault(name, {})[at] = value
    if not found:
        notes.append("metrics.csv holds no value.")
    return {name: sorted(points.items()) for name, points in found.items()}


def ledger_series(run: RunRecord, key: str) -> Points:
    """Return a value of each surviving step; None and absent ones are left out."""
    pairs = ((float(step), line.get(key)) for step, line in sorted(run.lineage.items()))
    return [(step, float(value)) for step, value in pairs if value is not None]


def term_series(run: RunRecord) -> dict[str, Points]:
    """Return term of the loss -> its mean at each surviving step."""
    found: dict[str, Points] = {}
    for step, line in sorted(run.lineage.items()):
        for name, value in line.get("terms", {}).items():
            found.setdefault(name, []).append((float(step), float(value)))
    return found


def best_of(points: Points, mode: str) -> tuple[float, float] | None:
    """Return step and value of the best finite point, the first of equals."""
    finite = [point for point in points if math.isfinite(point[1])]
    if not finite:
        return None
    return (max if mode == "max" else min)(finite, key=lambda point: point[1])


def monitored(run: RunRecord) -> tuple[str, str] | None:
    """Return name and mode of the metric that chose the best checkpoint; `val/loss` where the run
    did not write it down."""
    facts = run.topology.get("monitor")
    if facts and facts["name"] in run.metrics:
        return facts["name"], facts["mode"]
    return ("val/loss", "min") if "val/loss" in run.metrics else None


def _survivors(lines: list[Line], starts: list[Line]) -> list[Line]:
    """Return lines, `is_discarded` added: a later attempt began before their step."""
    for line in lines:
        later = [s for s in starts if s["attempt"] > line.get("attempt", 0)]
        line["is_discarded"] = any(line["step"] > s["resumed_from_step"] for s in later)
    return lines


def _json_of(path: Path, notes: list[str]) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"There is no {path.name}: what it would say is left out.")
        return {}
    except ValueError as error:
        notes.append(f"{path.name} is damaged ({error}): what it would say is left out.")
        return {}
    if not isinstance(content, dict):
        notes.append(f"{path.name} holds no mapping: what it would say is left out.")
        return {}
    return content


def _json_lines(path: Path, notes: list[str]) -> list[Line]:
    lines, num_damaged = [], 0
    whole, _, last = path.read_text(encoding="utf-8", errors="replace").rpartition("\n")
    for text in whole.splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and "step" in line:
            lines.append(line)
        else:
            num_damaged += 1
    if num_damaged or last:
        notes.append(f"{path.name} has {num_damaged + bool(last)} damaged lines; not counted.")
    return lines


def _number(text: Any) -> float | None:
    try:
        return float(text)
    except (TypeError, ValueError):
        return None
