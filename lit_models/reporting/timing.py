"""Where the time went, and what was foreseen beside what was measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_models.reporting.markup import Html, joined, table, tag
from lit_models.reporting.outcome import planned_steps, total_seconds, typical_seconds
from lit_models.reporting.reading import Line, RunRecord
from lit_models.reporting.wording import GIB, duration, share, shown

NUM_FILLS = 9


def split_of(run: RunRecord) -> tuple[list[tuple[str, float]], str]:
    """Return what took how many seconds, and a sentence on what that is."""
    lines = [line for line in run.throughput if isinstance(line.get("split"), dict)]
    if lines:
        seconds: dict[str, float] = {}
        is_hidden = False  # a run under fsdp cannot tell how long ranks talk
        for line in lines:
            for name, value in line["split"].items():
                seconds[name] = seconds.get(name, 0.0) + (value or 0.0)
                is_hidden |= name == "communication" and value is None
        words = f"Sum of {shown(len(lines))} intervals in throughput.jsonl, repeated steps too."
        if is_hidden:
            words += " Under fsdp, communication is inside forward and backward."
        return [(n, s) for n, s in seconds.items() if s > 0], words
    lineage = [line.get("seconds", 0.0) for line in run.lineage.values()]
    steps = typical_seconds(run) * len(lineage)
    repeated = total_seconds(run) - sum(lineage)
    parts = [("steps at their median time", min(steps, sum(lineage))),
             ("beyond it: evaluation, checkpoints, waiting", max(0.0, sum(lineage) - steps)),
             ("steps that were repeated", repeated)]  # fmt: skip
    words = "From the ledger's seconds; there is no throughput.jsonl that would say more."
    return [(name, value) for name, value in parts if value > 0], words


def time_split(run: RunRecord) -> Html:
    """Return a bar of the seconds, and the same as a table."""
    parts, words = split_of(run)
    whole = sum(seconds for _, seconds in parts)
    if not whole:
        return tag("p", "No step has a time.", class_="note")
    fills = [f"s{place % NUM_FILLS}" for place in range(len(parts))]
    bar = (tag("i", class_=fill, style=f"flex:{seconds / whole:.5f}", title=name)
           for fill, (name, seconds) in zip(fills, parts, strict=True))  # fmt: skip
    label = ", ".join(f"{name} {share(seconds / whole)}" for name, seconds in parts)
    rows = [
        [joined([tag("i", class_=f"swatch {fill}", aria_hidden="true"), name]),
         duration(seconds), share(seconds / whole)]
        for fill, (name, seconds) in zip(fills, parts, strict=True)
    ]  # fmt: skip
    return joined([
        tag("div", *bar, class_="split", role="img", aria_label=label),
        table(["what", "time", "share"], rows, "where the time went"),
        tag("p", words, class_="note"),
    ])  # fmt: skip


def throughput_facts(run: RunRecord) -> list[tuple[str, str | None]]:
    """Return names and values of the rates, from throughput.jsonl or the ledger."""
    lines = run.throughput
    if not lines:
        seconds, samples = total_seconds(run), sum(line["samples"] for line in run.steps)
        return [("samples per second", shown(samples / seconds) if seconds else None)]

    def mean(key: str) -> float | None:
        pairs = [(ln[key], ln["seconds"]) for ln in lines if ln.get(key) is not None]
        weight = sum(seconds for _, seconds in pairs)
        return sum(value * seconds for value, seconds in pairs) / weight if weight else None

    def in_percent(key: str) -> str | None:
        value = mean(key)
        return None if value is None else share(value)

    slow = [line["slowest_rank"] for line in lines if line.get("slowest_rank") is not None]
    named = max(set(slow), key=slow.count) if slow else None
    return [
        ("samples per second", shown(mean("samples_per_s"))),
        ("tokens per second", shown(mean("tokens_per_s"))),
        ("padding", in_percent("padding_share")),
        ("of the device's peak (MFU)", in_percent("mfu")),
        ("of its measured matmul speed", in_percent("matmul_share")),
        ("processor busy", _busy(lines, "cpu_percent")),
        ("GPUs busy", _busy(lines, "utilization_percent")),
        ("slowest rank", None if named is None else
         f"{named}, in {slow.count(named)} of {len(lines)} intervals"),
    ]  # fmt: skip


def _busy(lines: list[Line], key: str) -> str | None:
    """Return the mean of a reading of the machine, or of each of its GPUs."""
    found = []
    for line in lines:
        machine = line.get("machine") or {}
        readings = [machine, *(machine.get("gpu") or [])]
        found += [one[key] for one in readings if one and one.get(key) is not None]
    return f"{sum(found) / len(found):.0f} %" if found else None


def read_forecast(path: Path) -> dict[str, Sequence[Any]]:
    """Return label -> value per number of devices, as `unisono plan --json` prints them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds something else.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"--forecast {path} does not exist; write it: unisono plan --config … --json > {path}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"--forecast {path} is no JSON ({error}).") from error
    rows = content.get("rows", content) if isinstance(content, dict) else None
    if not isinstance(rows, dict) or not isinstance(rows.get("devices"), list):
        raise ValueError(
            f'--forecast {path} lacks the list "devices"; give the output of `unisono plan --json`.'
        )
    found: dict[str, Sequence[Any]] = {n: v for n, v in rows.items() if isinstance(v, list)}
    short = [name for name, values in found.items() if len(values) != len(found["devices"])]
    if short:
        raise ValueError(
            f'--forecast {path}: "{short[0]}" has {len(found[short[0]])} values for '
            f"{len(found['devices'])} numbers of devices; write the file anew with `unisono plan`."
        )
    return found


def forecast_of(run: RunRecord, path: Path) -> dict[str, Any]:
    """Return label -> value that a file foresees for a run: the column of its number of devices.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it holds something else, or has no column for this number.
    """
    forecast = read_forecast(path)
    world = run.topology.get("world_size") or (run.starts[-1]["world_size"] if run.starts else 0)
    if not world:
        raise ValueError(
            f"--forecast has a column per number of devices, and {run.folder} names no such "
            "number: no attempt has begun there. Leave --forecast out until one has."
        )
    if world not in forecast["devices"]:
        raise ValueError(
            f"--forecast has columns for {', '.join(map(str, forecast['devices']))} devices, "
            f"the run used {world}: unisono plan --devices={world} …"
        )
    column = forecast["devices"].index(world)
    own, others = _labels(run), set(_LABELS["ddp"] + _LABELS["fsdp"])
    foretold = {name: values[column] for name, values in forecast.items() if name != "devices"}
    return {
        name: value
        for name, value in foretold.items()
        if name.partition(":")[0] in own or name.partition(":")[0] not in others
    }


def measured(run: RunRecord) -> dict[str, float | None]:
    """Return what the run has shown, under the labels of `unisono plan`."""
    epochs: dict[int, int] = {}
    for line in run.lineage.values():
        epochs[line["epoch"]] = epochs.get(line["epoch"], 0) + 1
    ranks = run.topology.get("memory") or []
    used = [one.get("allocated_bytes") or one.get("resident_bytes") or 0 for one in ranks]
    seconds, per_epoch = typical_seconds(run), max(epochs.values(), default=0)
    checkpoint = run.folder / "checkpoints" / "last.ckpt"
    size = checkpoint.stat().st_size if checkpoint.is_file() else 0
    memory, step, *_ = _labels(run)
    found = {
        "global batch": max((ln["samples"] for ln in run.lineage.values()), default=0),
        "steps per epoch": per_epoch,
        "steps in all": len(run.lineage),
        "samples seen": sum(line["samples"] for line in run.lineage.values()),
        "learning rate": max((ln["learning_rate"] for ln in run.lineage.values()), default=0),
        memory: max(used, default=0) / GIB,
        "GiB, checkpoint": size / GIB,
        step: seconds,
        "min per epoch": seconds * per_epoch / 60,
        "h in all": total_seconds(run) / 3600,
    }
    return {name: value or None for name, value in found.items()}


# Memory, seconds and efficiency, which `unisono plan` foresees for two strategies; the length of a
# run only for ddp.
_LABELS = {
    "ddp": ("GiB, ddp", "s per step", "efficiency", "min per epoch", "h in all", "jobs"),
    "fsdp": ("GiB, fsdp", "s per step, fsdp", "efficiency, fsdp"),
}


def _labels(run: RunRecord) -> tuple[str, ...]:
    """Return the labels of what a strategy decides; a plan has none for others than two."""
    strategy = run.topology.get("strategy")
    return _LABELS["fsdp" if strategy == "fsdp" else "ddp"]


def foreseen(run: RunRecord) -> dict[str, float | None]:
    """Return what plan.json and topology.json foresee, under the labels of `unisono plan`."""
    plan, per_epoch = run.topology.get("plan", {}), run.plan.get("steps_per_epoch")
    return {
        "global batch": plan.get("global_batch_size"),
        "steps per epoch": per_epoch,
        "steps in all": planned_steps(run),
    }


def plan_rows(run: RunRecord, forecast: dict[str, Any] | None) -> list[list[str]]:
    """Return label, foreseen, measured and their ratio; a forecast is of `forecast_of`."""
    before, after = foreseen(run) | (forecast or {}), measured(run)
    rows = []
    for name in dict.fromkeys([*before, *after]):
        planned, found = before.get(name), after.get(name)
        if planned is None and (forecast is None or found is None):
            continue
        is_both = isinstance(planned, int | float) and planned and found is not None
        ratio = f"{(found or 0.0) / planned:.2f}" if is_both and planned else "–"
        value = shown(planned) if isinstance(planned, int | float) else str(planned or "–")
        rows.append([name, value, shown(found), ratio])
    return rows
