"""Benchmark rows: one row for each figure, one table, one file.

python -m tests.benchmarks.figures prints runs/benchmarks.json as the table of the README.
"""

from __future__ import annotations

import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FILE = Path("runs") / "benchmarks.json"
COLUMNS = ("ours", "peer's", "ratio", "aim", "")
Of = Literal["ratio", "value"]


@dataclass(frozen=True)
class Aim:
    """A bound on a figure.

    Args:
        bound: the number.
        is_least: the figure must be at least `bound`; else at most.
        of: `ratio`, our figure divided by the peer's; `value`, our figure alone.
    """

    bound: float
    is_least: bool = False
    of: Of = "ratio"

    def __str__(self) -> str:
        return f"{'≥' if self.is_least else '≤'} {self.bound:g}{'x' * (self.of == 'ratio')}"

    def is_met(self, value: float) -> bool:
        """Return whether a figure keeps the bound."""
        return value >= self.bound if self.is_least else value <= self.bound


@dataclass(frozen=True)
class Figure:
    """One row.

    Args:
        family: whose table holds the row.
        what: the quantity measured.
        unit: of the values, such as rows/s, ms or GiB.
        ours: one value for each round.
        peer: what ours is compared with, in turns; "" if it stands alone.
        theirs: the peer's value in each round: empty, or as many as ours.
        aim: that the figure should reach; `None` if it is only reported.
        memory_gib: our peak memory, then the peer's.
        note: what a reader must know, such as the size of the work.
    """

    family: str
    what: str
    unit: str
    ours: Sequence[float]
    peer: str = ""
    theirs: Sequence[float] = ()
    aim: Aim | None = None
    memory_gib: tuple[float, float] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if not self.ours or (self.theirs and len(self.theirs) != len(self.ours)):
            raise ValueError(
                f"{self.what}: {len(self.ours)} rounds of ours beside {len(self.theirs)} of the "
                "peer; measure both in turns, equally often."
            )

    def of(self, of: Of) -> list[float]:
        """Return our value, or our value divided by the peer's, for each round."""
        if of == "value" or not self.theirs:
            return [float(value) for value in self.ours]
        return [a / b for a, b in zip(self.ours, self.theirs, strict=True)]

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the aim; `None` without an aim."""
        if self.aim is None:
            return None
        return self.aim.is_met(statistics.median(self.of(self.aim.of)))


@dataclass
class Figures:
    """Collects rows and keeps them in a file, one row for each quantity measured."""

    rows: list[Figure] = field(default_factory=list)

    def add(self, *arguments: Any, **options: Any) -> Figure:
        """Append a row, given by the arguments of `Figure`, and return it."""
        self.rows.append(Figure(*arguments, **options))
        return self.rows[-1]

    def write(self, path: Path) -> None:
        """Write the rows into a file, and keep its rows of other quantities."""
        content = json.loads(path.read_text("utf-8")) if path.exists() else {"figures": []}
        new = [{**asdict(row), "machine": machine()} for row in self.rows]

        def key(row: dict[str, Any]) -> tuple[str, ...]:
            return row["family"], row["what"], row["peer"], row["machine"]["device"]

        keys = [key(row) for row in new]
        old = [row for row in content["figures"] if key(row) not in keys]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"figures": [*old, *new]}, indent=1) + "\n", "utf-8")
        partial.replace(path)


def machine() -> dict[str, Any]:
    """Return what the figures depend on: processor, threads, versions, other load, and the time."""
    import lightning
    import torch
    import transformers

    path = Path("/proc/cpuinfo")  # Linux alone has it
    names = re.findall("model name.*: (.+)", path.read_text("utf-8") if path.exists() else "")
    cpu = f"{len(os.sched_getaffinity(0))} cores of {[*names, platform.machine()][0]}"
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or cpu,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
    }


def figure_of(row: dict[str, Any]) -> Figure:
    """Return the figure that `asdict` turned into this dictionary."""
    return Figure(**{**row, "aim": row["aim"] and Aim(**row["aim"])})


def cells(row: Figure) -> tuple[str, ...]:
    """Return what, unit, peer, ours, the peer's, ratio with spread, aim, met or missed."""
    beside = row.of("ratio") if row.theirs else []
    ratio = f"{_median(beside)} ({_short(min(beside))} to {_short(max(beside))})" if beside else ""
    answer = {None: "", True: "met", False: "missed"}[row.is_met]
    theirs = _median(row.theirs) if row.theirs else ""
    aim = str(row.aim or "")
    return row.what, row.unit, row.peer, _median(row.ours), theirs, ratio, aim, answer


def _median(values: Sequence[float]) -> str:
    return _short(statistics.median(values))


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(rows: Sequence[Figure]) -> str:
    """Return rows as the README shows them."""
    names = ("family", "what, unit", "beside", *COLUMNS)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in sorted(rows, key=lambda row: row.family):
        what, unit, *values = cells(row)
        lines.append(f"| {row.family} | {what}, {unit} | {' | '.join(values)} |")
    return "\n".join(lines)


def read(path: Path) -> list[tuple[Figure, dict[str, Any]]]:
    """Return the rows of a file, each with its machine."""
    content = json.loads(path.read_text("utf-8"))["figures"]
    machines = [row.pop("machine") for row in content]
    return [(figure_of(row), machine) for row, machine in zip(content, machines, strict=True)]


def main(path: Path) -> None:
    """Print the table of a file, and the machines that its rows come from."""
    rows = read(path)
    print(table([row for row, _ in rows]), end="\n\n")
    facts = ("device", "threads", "torch", "lightning", "transformers")
    machines = (
        ", ".join(f"{name} {machine[name]}" for name in facts) + f", {machine['date'][:10]}"
        for _, machine in rows
    )
    print(*dict.fromkeys(machines), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else FILE)
