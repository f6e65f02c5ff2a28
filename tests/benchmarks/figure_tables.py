"""The figures of the benchmarks as tables: on the screen, and as the README shows them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.benchmarks.figures import Figure, Of, read

COLUMNS = ("ours", "peer's", "ratio or more", "aim", "")


def show(rows: Sequence[Figure], console: Console) -> None:
    """Print a table for each family."""
    for family in dict.fromkeys(row.family for row in rows):
        console.print(table(family, [row for row in rows if row.family == family]))


def table(family: str, rows: Sequence[Figure]) -> Table:
    """Return the table of one family."""
    shown = Table(title=family, title_justify="left")
    for name in ("what, unit, beside", *COLUMNS):
        shown.add_column(name, justify="right" if name in COLUMNS else "left")
    for row in rows:
        what, unit, peer, *values = cells(row)
        shown.add_row(f"{what}, {unit}" + (f"\n  beside {peer}" if peer else ""), *values)
    return shown


def cells(row: Figure) -> tuple[str, ...]:
    """Return what, unit, peer, ours, the peer's, the ratio with its spread, the aim, the answer."""
    of: Of = "more" if row.aim is not None and row.aim.of == "more" else "ratio"
    beside = row.of(of) if row.theirs else []
    ratio = f"{_median(beside)} ({_spread(beside)})" if beside else ""
    answer = {None: "", True: "met", False: "missed"}[row.is_met]
    theirs = _median(row.theirs) if row.theirs else ""
    aim = str(row.aim or "")
    return row.what, row.unit, row.peer, _median(row.ours), theirs, ratio, aim, answer


def _median(values: Sequence[float]) -> str:
    return _short(statistics.median(values))


def _spread(values: Sequence[float]) -> str:
    return f"{_short(min(values))} to {_short(max(values))}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def markdown(path: Path) -> str:
    """Return the rows of a file as the README shows them, and below them the machines.

    Those of `unisono plan` stand in its card.
    """
    rows, machines = read(path)
    names = ("family", "what, unit", "beside", *COLUMNS)
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in sorted(rows, key=lambda row: row.family):
        what, unit, *values = cells(row)
        if row.family != "forecast":
            lines.append(f"| {row.family} | {what}, {unit} | {' | '.join(values)} |")
    facts = ("device", "threads", "torch", "lightning", "transformers")
    told = dict.fromkeys(
        ", ".join(f"{name} {each[name]}" for name in facts) + f", {each['date'][:10]}"
        for each in machines
    )
    return "\n".join([*lines, "", *told])
