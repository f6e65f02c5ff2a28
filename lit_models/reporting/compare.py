"""What differs between two runs."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lit_models.reporting.reading import Points, RunRecord

OWN_FOLDER = "default_root_dir"  # differs by nature: the runs' names say it
ABSENT = "absent"
Row = tuple[str, str, str]


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
    rows: list[Row]


def differences(first: RunRecord, second: RunRecord) -> list[Difference]:
    """Return data, plan, seed, configuration, code, devices and versions, in this order."""

    def compared(aspect: str, of: Callable[[RunRecord], dict[str, Any]], *parts: str) -> Difference:
        is_known = all(getattr(run, part) for run in (first, second) for part in parts)
        is_known = is_known and (aspect != "code" or bool(of(first) and of(second)))
        return Difference(aspect, is_known, list(_rows(of(first), of(second))))

    return [
        compared("data", _data, "plan"),
        compared("plan", _plan, "plan"),
        compared("seed", lambda run: {"seed": run.config.get("seed_everything")}, "config"),
        compared("configuration", _config, "config"),
        compared("code", lambda run: run.topology.get("code") or {}, "topology"),
        compared("devices", _devices, "topology"),
        compared("versions", lambda run: run.topology.get("versions") or {}, "topology"),
    ]


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


def _rows(first: dict[str, Any], second: dict[str, Any], prefix: str = "") -> Iterator[Row]:
    """Yield dotted key and both values of what differs; `init_args` is no part of a key, as on the
    command line, and what only one of them has is one row."""
    for name in dict.fromkeys([*first, *second]):
        one, other = first.get(name, ABSENT), second.get(name, ABSENT)
        at = prefix if name == "init_args" else f"{prefix}.{name}".strip(".")
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _rows(one, other, at)
        elif one != other and not _both_nan(one, other):
            yield at, said(one), said(other)


def _both_nan(one: Any, other: Any) -> bool:
    return one != one and other != other


def said(value: Any) -> str:
    """Return a value as a configuration would have it, a class as NAME(key: value, …)."""
    if isinstance(value, dict):
        inner = value.get("init_args") or {} if "class_path" in value else value
        words = ", ".join(f"{name}: {said(v)}" for name, v in inner.items())
        return f"{value.get('class_path', '')}({words})"
    if isinstance(value, list):
        return f"[{', '.join(map(said, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def _config(run: RunRecord) -> dict[str, Any]:
    """Return the configuration without what other lines say."""
    trainer = run.config.get("trainer") or {}
    kept = {name: value for name, value in run.config.items() if name != "seed_everything"}
    return {**kept, "trainer": {n: v for n, v in trainer.items() if n != OWN_FOLDER}}


def _data(run: RunRecord) -> dict[str, Any]:
    request = run.plan.get("request", {})
    return {"fingerprint": request.get("fingerprint"), "samples": request.get("num_samples")}


def _plan(run: RunRecord) -> dict[str, Any]:
    """Return what decides which sample is in which step, besides the data and the seed."""
    own = ("fingerprint", "num_samples", "seed")
    request = {n: v for n, v in run.plan.get("request", {}).items() if n not in own}
    digest, steps = run.plan.get("digest"), run.plan.get("steps_per_epoch")
    return {"digest": digest, "steps_per_epoch": steps, **request}


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
