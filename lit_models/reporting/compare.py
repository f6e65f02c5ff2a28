"""What differs between two runs."""

import math
from dataclasses import dataclass
from typing import Any

from lit_models.reporting.reading import Points, RunRecord
from lit_models.reporting.wording import shown

OWN_FOLDER = "trainer.default_root_dir"  # differs by nature: the runs' names say it
DATA = "data"


@dataclass
class Difference:
    """One aspect of two runs.

    Attributes:
        aspect: such as data.
        is_known: both runs wrote it down.
        rows: name and both values of what differs; none means that they are the same.
    """

    aspect: str
    is_known: bool
    rows: list[tuple[str, str, str]]


def differences(first: RunRecord, second: RunRecord) -> list[Difference]:
    """Return data, seed, configuration, code, devices and versions, in this order."""
    runs = (first, second)
    seeds = [{"seed_everything": run.config.get("seed_everything")} for run in runs]
    configs = [_flat(run.config) for run in runs]
    for config in configs:
        config.pop(OWN_FOLDER, None)
        config.pop("seed_everything", None)
    has_config = all(run.config for run in runs)
    return [
        _difference(DATA, *(_data(run) for run in runs), all(run.plan for run in runs)),
        _difference("seed", *seeds, has_config),
        _difference("configuration", *configs, has_config),
        _difference("code", *(run.topology.get("code") or {} for run in runs),
                    all(run.topology.get("code") for run in runs)),
        _difference("devices", *(_devices(run) for run in runs),
                    all(run.topology for run in runs)),
        _difference("versions", *(run.topology.get("versions") or {} for run in runs),
                    all(run.topology for run in runs)),
    ]  # fmt: skip


def loss_gap(first: RunRecord, second: RunRecord) -> tuple[float, int] | None:
    """Return the largest relative difference of the loss over the steps that both have, and their
    number; None where they follow different plans, so that steps have different samples."""
    digests = [run.plan.get("digest") for run in (first, second)]
    steps = sorted(first.lineage.keys() & second.lineage.keys())
    if digests[0] is None or digests[0] != digests[1] or not steps:
        return None
    pairs = [(first.lineage[s]["loss"], second.lineage[s]["loss"]) for s in steps]
    gaps = [abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in pairs
            if math.isfinite(a) and math.isfinite(b)]  # fmt: skip
    return (max(gaps), len(gaps)) if gaps else None


def common_metrics(first: RunRecord, second: RunRecord) -> tuple[list[str], int]:
    """Return the metrics of evaluations that both have, and how many only one has."""
    names = [{n for n in run.metrics if not n.startswith(("train/", "throughput/"))}
             for run in (first, second)]  # fmt: skip
    return sorted(names[0] & names[1]), len(names[0] ^ names[1])


def family_of(run: RunRecord) -> str:
    """Return the class of the run's module."""
    return str((run.config.get("model") or {}).get("class_path", "unknown")).rpartition(".")[2]


def last_of(points: Points) -> float | None:
    """Return the last value."""
    return points[-1][1] if points else None


def _difference(
    aspect: str, first: dict[str, Any], second: dict[str, Any], is_known: bool
) -> Difference:
    absent = object()
    rows = []
    for name in dict.fromkeys([*first, *second]):
        one, other = first.get(name, absent), second.get(name, absent)
        if one != other:
            rows.append((name, *("absent" if v is absent else _said(v) for v in (one, other))))
    return Difference(aspect, is_known, rows)


def _said(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, int | float):
        return shown(value, 8)
    return str(value)


def _data(run: RunRecord) -> dict[str, Any]:
    request = dict(run.plan.get("request", {}))
    request.pop("seed", None)  # the seed's own line says it
    return {
        "plan digest (order and batches)": run.plan.get("digest"),
        "fingerprint of the samples": request.pop("fingerprint", None),
        "samples": request.pop("num_samples", None),
        "steps per epoch": run.plan.get("steps_per_epoch"),
        **{name.replace("_", " "): value for name, value in request.items()},
    }


def _devices(run: RunRecord) -> dict[str, Any]:
    top = run.topology
    plan = top.get("plan", {})
    return {
        "devices": top.get("world_size"),
        "nodes": top.get("num_nodes"),
        "kind": ", ".join(sorted({place.rpartition(":")[2] if "cuda" not in place else "cuda"
                                  for place in top.get("host_rank_device", [])})),
        "strategy": top.get("strategy"),
        "precision": top.get("precision"),
        "batch per device": plan.get("micro_batch_size"),
        "accumulation": plan.get("accumulate_grad_batches"),
    }  # fmt: skip


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return dotted key -> value of a nested configuration; a list is one value, `init_args` no
    part of a key, as on the command line."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    found: dict[str, Any] = {}
    for name, inner in value.items():
        at = prefix if name == "init_args" else f"{prefix}.{name}".strip(".")
        found |= _flat(inner, at)
    return found
