"""Records of runs of one configuration, and comparison of two records."""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_models.commands.verify import read_ledger, surviving
from lit_models.run_files import LEDGER, Row, json_lines, read_checkpoint

SEEN, TAPES = "seen", "tapes"  # folders that a probe writes into a run
ASPECTS = ("samples", "losses", "norms", "weights", "metrics", "files")
# Bits of precision -> largest distances. Aspects without a bound are not promised, except samples:
# Adam amplifies a gradient that is zero up to rounding, so that float32 promises losses alone.
BOUNDS: dict[str, dict[str, float]] = {
    "64": {"losses": 1e-10, "norms": 1e-9, "weights": 1e-8, "metrics": 1e-9, "files": 0.0},
    "32": {"losses": 1e-5},
    "16": {"losses": 1e-2},
}
NUM_NAMES, NUM_WORDS = 3, 4  # shown of samples, of sentences on one aspect
STEP = "step "
# Results of one run: each of the ASPECTS -> name -> value, where the name of a step is "step 3";
# and "left out" -> evaluation -> why it was not run.
Record = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Comparison of two records in one aspect."""

    aspect: str
    is_same: bool | None  # `None` if there is nothing, or nothing is promised
    apart: float  # largest distance; NaN if there is nothing, infinite for non-numbers
    words: tuple[str, ...]  # what differs
    step: int | None  # the first step that differs

    @property
    def cell(self) -> str:
        """The finding in nine characters at most."""
        text = "equal" if self.apart == 0 else f"{self.apart:.0e}".replace("nan", "-")
        return f"NOT {text}".removesuffix(" inf") if self.is_same is False else text


def read_record(folder: Path) -> Record:
    """Return the record of a run folder: the probe's notes, the ledger's sums if it has one, the
    last weights, the files of predictions and of errors.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged.
    """
    record: Record = {name: {} for name in (*ASPECTS, "left out")}
    attempts: dict[str, list[Row]] = {}
    steps: dict[int, Row] = {}
    for path in sorted((folder / SEEN).glob("*.jsonl")):
        attempts.setdefault(path.name.split("-")[0], []).extend(json_lines(path))
    for notes in attempts.values():
        record = {name: {} for name in record}  # evaluations of the newest attempt count
        starts = [row["resumed_from_step"] for row in notes if "resumed_from_step" in row]
        steps = {step: row for step, row in steps.items() if step <= min(starts, default=step)}
        for row in notes:
            if "step" in row:
                sums = steps.setdefault(row["step"], {**row, "rows": [], "loss": 0.0})
                sums["rows"] += row["rows"]
                sums["loss"] += row["loss"] / len(starts)  # a mean over ranks, as ddp takes it
            for stage, samples in row.get("evaluated", {}).items():
                record["samples"].setdefault(stage, []).extend(samples)
            for stage, answers in row.get("predicted", {}).items():  # ranks come in any order
                lines = record["files"].get(stage, b"").splitlines(keepends=True)
                record["files"][stage] = b"".join(sorted([*lines, *map(str.encode, answers)]))
            record["metrics"] |= row.get("metrics", {})
            record["left out"] |= row.get("left_out", {})
    for stage in record["left out"]:
        record["samples"].pop(stage, None)
    rows = [row for notes in attempts.values() for row in notes]
    ended = {row["ended"] for row in rows if "ended" in row}
    for step, row in steps.items():
        if row["epoch"] in ended:
            record["samples"].setdefault(f"epoch {row['epoch']}", []).extend(row["rows"])
        record["samples"][f"{STEP}{step}"] = row["rows"]
    if (folder / LEDGER).exists():
        steps = surviving(read_ledger(folder)).steps
    for step, row in sorted(steps.items()):
        record["losses"][f"{STEP}{step}"] = row["loss"]
        record["norms"][f"{STEP}{step}"] = row["grad_norm"]
        for name in ("digest", "targets", "learning_rate"):
            record["samples"][f"{STEP}{step}, {name.replace('_', ' ')}"] = row.get(name)
    outputs = [Path(row["output"]) for row in rows if "output" in row]
    for path in [*outputs, *folder.glob("errors-*.csv")]:
        for file in filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path]:
            record["files"][str(file.relative_to(path.parent))] = file.read_bytes()
    record["weights"] = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
    return record


def compare(one: Record, other: Record, bounds: dict[str, float]) -> list[Comparison]:
    """Compare another record with a first one, aspect by aspect, by the largest distances."""
    findings: list[Comparison] = []
    for aspect in ASPECTS:
        left, right = one[aspect], other[aspect]
        bound = 0.0 if aspect == "samples" else bounds.get(aspect)
        gaps = {name: distance(left.get(name), right.get(name)) for name in {**left, **right}}
        beyond = [name for name, gap in gaps.items() if bound is not None and gap > bound]
        words = [difference(name, left.get(name), right.get(name)) for name in beyond[:NUM_WORDS]]
        words += [f"and {len(beyond) - NUM_WORDS} more"] if len(beyond) > NUM_WORDS else []
        if aspect == "metrics" and words and not any(finding.words for finding in findings):
            words.append("of the same samples: a mean of means is not the mean of all")
        steps = [int(name.split()[1].strip(",")) for name in beyond if name.startswith(STEP)]
        is_same = None if bound is None or not gaps else not beyond
        apart = max(gaps.values(), default=math.nan)
        findings.append(Comparison(aspect, is_same, apart, tuple(words), min(steps, default=None)))
    return findings


def distance(one: Any, other: Any) -> float:
    """Return the distance of two values: of numbers relative to the first or to 0.001, whichever is
    larger; of tensors the largest, relative to the first's absolute values plus 0.01; of lists 0 if
    equal in any order. Else infinite: a value is missing, not finite or of another shape."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        left, right = one.double(), other.double()
        is_same = (left == right) | (left.isnan() & right.isnan())
        gaps = ((left - right).abs() / (left.abs() + 0.01)).nan_to_num(math.inf)
        return float(gaps.masked_fill(is_same, 0.0).max()) if gaps.numel() else 0.0
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return math.inf
    if isinstance(one, list) and isinstance(other, list):
        return 0.0 if Counter(one) == Counter(other) else math.inf
    if one == other or (one != one and other != other):
        return 0.0
    if not all(isinstance(value, float) and math.isfinite(value) for value in (one, other)):
        return math.inf
    return abs(one - other) / max(abs(one), 0.001)


def difference(name: str, one: Any, other: Any) -> str:
    """Return a sentence on how a value differs from the first one."""
    if isinstance(one, Tensor):
        return f"{name}: {distance(one, other):.0e} apart"
    if isinstance(one, bytes):
        lines, others = one.splitlines(), (other or b"").splitlines()
        num_same = sum(map(bytes.__eq__, lines, others))
        return f"{name}: {len(others)} lines of {len(lines)}, {num_same} of them the same"
    if not isinstance(one, list):
        return f"{name}: {other} instead of {one}"
    before, now = Counter(one), Counter(other)
    groups = {
        "twice": [sample for sample in now if now[sample] > before[sample] > 0],
        "left out": [sample for sample in before if now[sample] < before[sample]],
        "not its own": [sample for sample in now if not before[sample]],
    }
    words = [f"{now.total()} samples of {before.total()}"]
    if before and now.total() > before.total() and now.total() % before.total() == 0:
        words[0] += ", as if batch_size were per device"
    for what, names in groups.items():
        more = ", …" if len(names) > NUM_NAMES else ""
        words += [f"{len(names)} {what} ({', '.join(names[:NUM_NAMES])}{more})"] if names else []
    return f"{name}: {', '.join(words)}"


def first_difference(one: Path, other: Path, within: float) -> str:
    """Return the first place where the recorded step of two runs differs by more than `within`, ""
    if none does. Weights come first, then outputs of modules, then gradients. Outputs are compared
    sample by sample, in the positions that both have."""
    left, right = (_tape(folder) for folder in (one, other))
    for place, rows in left.items():
        for sample in rows.keys() & right.get(place, {}).keys():
            pair = rows[sample], right[place][sample]
            common = tuple(slice(min(s)) for s in zip(*(t.shape for t in pair), strict=True))
            if (apart := distance(pair[0][common], pair[1][common])) > within:
                return f"{place}{sample and f' for sample {sample}'}: {apart:.0e} apart"
    return ""


def _tape(run: Path) -> dict[str, dict[str, Tensor]]:
    """Return place -> sample, "" for all samples -> tensor, from all ranks."""
    content: dict[str, dict[str, Tensor]] = {}
    for path in sorted((run / TAPES).glob("*.pt")):
        for place, rows in torch.load(path, weights_only=True).items():
            content.setdefault(place, {}).update(rows)
    return content
