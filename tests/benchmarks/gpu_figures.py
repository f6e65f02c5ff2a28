"""What the rows of the GPU benchmark say: speed, shares of what can be, time beside computing."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.benchmarks.figures import Aim, Figures

FAMILY = "GPU"
OF_CEILING = "of the ceiling"
AIMS = {
    ("gpt2-124m, compiled", OF_CEILING): 0.50,
    ("1b, compiled", "MFU"): 0.45,
    ("7b, LoRA, compiled", "TFLOP/s"): 400.0,
}
MOST_OVERHEAD, MOST_PADDING, MOST_WAIT = 1.02, 0.02, 0.01
SHAKESPEARE_NATS = 1.47  # what nanoGPT states for this size
LEAST_SHOWN = 0.001  # of the time


class Limits(NamedTuple):
    """FLOP/s of a matrix product that was measured, and of the data sheet; none where unknown."""

    ceiling: float | None = None
    peak: float | None = None


def add_row(figures: Figures, name: str, found: dict[str, Any], limits: Limits) -> None:
    """Add all that a training says.

    Args:
        figures: takes the rows.
        name: of the row.
        found: fields of `gpu_rows.Found`, and `halvings`.
        limits: of the device.
    """
    memory = (found["memory_gib"],) * 2 if found["memory_gib"] else None
    halved = f"rows of a step halved {found['halvings']} x; " if found.get("halvings") else ""
    note = halved + split(found["lines"])
    figures.add(FAMILY, name, found["unit"], found["rates"], memory_gib=memory, note=note)
    for unit, values in _shares(found, limits).items():
        least = AIMS.get((name, unit))
        aim = None if least is None else Aim(least, is_least=True, of="value")
        figures.add(FAMILY, name, unit, values, aim=aim)
    if found["loop_ms"]:
        figures.add(
            *(FAMILY, f"{name}, a step, all on", "ms", found["steps_ms"]),
            *("plain loop over its module and batches", found["loop_ms"], Aim(MOST_OVERHEAD)),
        )
    if found["lines"]:
        _add_waste(figures, name, found["lines"])


def add_shakespeare(figures: Figures, found: dict[str, float]) -> None:
    """Add the published run: its loss, how long it took, and its speed."""
    aim = Aim(SHAKESPEARE_NATS, of="value")
    name = "shakespeare_gpu.yaml"
    figures.add(FAMILY, f"{name}, best val/loss", "nats", [found["loss"]], aim=aim)
    figures.add(FAMILY, f"{name}, start and end included", "s", [found["seconds"]])
    figures.add(FAMILY, name, "tokens/s", [found["rate"]])


def beside(
    figures: Figures, name: str, ours: dict[str, Any], peer: str, theirs: dict[str, Any]
) -> None:
    """Add our speed beside that of a peer on the same shape; rows were measured one by one.

    Memory is that of both. Where one of them had to take fewer rows in a step, the note says so.
    """
    aim = None if peer == "eager" else Aim(1.0, is_least=True)
    memory = (ours["memory_gib"], theirs["memory_gib"])
    rates = (ours["rates"], peer, theirs["rates"])
    halvings = [found.get("halvings", 0) for found in (ours, theirs)]
    words = f"rows of a step halved {halvings[0]} x, of {peer} {halvings[1]} x"
    note = words if len(set(halvings)) > 1 else ""
    options = {"aim": aim, "memory_gib": memory if all(memory) else None, "note": note}
    figures.add(FAMILY, name, ours["unit"], *rates, **options)


def split(lines: list[dict[str, Any]]) -> str:
    """Return where the time went, the longest first, such as `backward 61 %, forward 30 %`."""
    if not lines:
        return ""
    shares = {phase: _share(lines, phase) for phase in lines[0]["split"]}
    shown = sorted((s, name) for name, s in shares.items() if s >= LEAST_SHOWN)
    return "time: " + ", ".join(f"{name} {100 * s:.1f} %" for s, name in reversed(shown))


def _shares(found: dict[str, Any], limits: Limits) -> dict[str, list[float]]:
    """Return unit -> a value for each round; by the throughput's own count of the arithmetic where
    none is given."""
    shares: dict[str, list[float]] = {}
    if found["flops"]:
        used = [rate * found["flops"] for rate in found["rates"]]
        shares["TFLOP/s"] = [value / 1e12 for value in used]
        for unit, limit in ((OF_CEILING, limits.ceiling), ("MFU", limits.peak)):
            if limit is not None:
                shares[unit] = [value / limit for value in used]
        return shares
    values = [line.get("mfu") for line in found["lines"]]
    if values and None not in values:
        shares["MFU"] = values
    return shares


def _add_waste(figures: Figures, name: str, lines: list[dict[str, Any]]) -> None:
    """Add what a run computes for nothing, and what it waits for data."""
    padding = [line["padding_share"] for line in lines]
    waits = [_share([line], "data") for line in lines]
    for what, values, most in (
        ("positions of padding", padding, MOST_PADDING),
        ("time waited for data", waits, MOST_WAIT),
    ):
        figures.add(FAMILY, f"{name}, {what}", "share", values, aim=Aim(most, of="value"))


def _share(lines: list[dict[str, Any]], phase: str) -> float:
    spent = sum(line["split"][phase] or 0.0 for line in lines)
    return spent / sum(line["seconds"] for line in lines)
