"""What the benchmarks measure: one row for each figure, one table for each family, one file.

python -m tests.benchmarks.figures prints runs/benchmarks.json as the table of the README.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

FILE = Path("runs") / "benchmarks.json"
Of = Literal["ratio", "more", "value"]


@dataclass(frozen=True)
class Aim:
    """A bound on a figure.

    Args:
        bound: the number.
        is_least: the figure must not be below it; else it must not be above it.
        of: `ratio`, ours by the peer's; `more`, ours less the peer's; `value`, ours alone.
    """

    bound: float
    is_least: bool = False
    of: Of = "ratio"

    def __str__(self) -> str:
        words = {"ratio": "x", "more": " more", "value": ""}[self.of]
        return f"{'≥' if self.is_least else '≤'} {self.bound:g}{words}"

    def is_met(self, value: float) -> bool:
        """Return whether a figure keeps the bound."""
        return value >= self.bound if self.is_least else value <= self.bound


@dataclass(frozen=True)
class Figure:
    """One row.

    Args:
        family: of the table that it stands in.
        what: was measured.
        unit: of the values, such as rows/s, ms or GiB.
        ours: one value for each round.
        peer: what was measured beside, in turns; "" where there is none.
        theirs: its value in each round; none, or as many as ours.
        aim: that the figure should reach; none where it is only told.
        memory_gib: the most memory that ours took, then the peer's.
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
        """Return ours, or ours beside the peer's, for each round.

        Args:
            of: see `Aim`.
        """
        if of == "value" or not self.theirs:
            return [float(value) for value in self.ours]
        pairs = zip(self.ours, self.theirs, strict=True)
        return [a / b if of == "ratio" else a - b for a, b in pairs]

    @property
    def is_met(self) -> bool | None:
        """Whether the median keeps the aim; none without an aim."""
        if self.aim is None:
            return None
        return self.aim.is_met(statistics.median(self.of(self.aim.of)))


@dataclass
class Figures:
    """Collects rows and keeps them in a file, one row for each thing measured."""

    rows: list[Figure] = field(default_factory=list)

    def add(self, *arguments: Any, **options: Any) -> Figure:
        """Append a row, given as `Figure` takes it, and return it."""
        self.rows.append(Figure(*arguments, **options))
        return self.rows[-1]

    def write(self, path: Path) -> None:
        """Write the rows into a file, whose rows of other things stay.

        Args:
            path: JSON, made if it is not there.
        """
        content = json.loads(path.read_text("utf-8")) if path.exists() else {"figures": []}
        new = [{**asdict(row), "machine": machine()} for row in self.rows]
        keys = [_key(row) for row in new]
        old = [row for row in content["figures"] if _key(row) not in keys]
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps({"figures": [*old, *new]}, indent=1) + "\n", "utf-8")
        partial.replace(path)


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return (row["family"], row["what"], row["peer"], row["machine"]["device"])


def machine() -> dict[str, Any]:
    """Return what the figures depend on, the processor, threads, versions, the other load, and
    when they were measured."""
    import lightning
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "device": gpu or f"{len(os.sched_getaffinity(0))} cores of {_processor()}",
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "transformers": transformers.__version__,
        "date": now(),
    }


def now() -> str:
    """Return the date and time in UTC, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text("utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def read(path: Path) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Return the rows of a file, and the machine of each."""
    rows = json.loads(path.read_text("utf-8"))["figures"]
    machines = [row.pop("machine") for row in rows]
    return [Figure(**{**row, "aim": row["aim"] and Aim(**row["aim"])}) for row in rows], machines


def measured_since(begun: str, path: Path) -> Figures:
    """Return the rows of a file that were measured then or later; none where it is not there.

    Args:
        begun: as `now` gives it.
        path: of the file.
    """
    if not path.exists():
        return Figures()
    rows, machines = read(path)
    together = zip(rows, machines, strict=True)
    return Figures([row for row, machine in together if machine["date"] >= begun])


if __name__ == "__main__":
    from tests.benchmarks.figure_tables import markdown

    print(markdown(Path(sys.argv[1]) if sys.argv[1:] else FILE))
