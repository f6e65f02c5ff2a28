"""A finding: what is there, what it means, and what to do."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Level = Literal["ok", "warning", "error"]
STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        check: its name, such as "disk"; several findings may share it.
        level: ok, warning (a run works, perhaps not as hoped) or error (a run fails or is wrong).
        what: what is there, with the values.
        means: what follows from it; empty where it is ok.
        todo: the way out; empty where it is ok.
    """

    check: str
    level: Level
    what: str
    means: str = ""
    todo: str = ""


def ok(check: str, what: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(check, "ok", what)


def worst(findings: Sequence[Finding]) -> Level:
    """Return the gravest level."""
    levels: tuple[Level, ...] = ("error", "warning")
    return next((level for level in levels if any(f.level == level for f in findings)), "ok")


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return plain values for scripts."""
    return {"worst": worst(findings), "findings": [asdict(finding) for finding in findings]}


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a line per finding, with its meaning and its way out below where there are any."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.what)
        for line in (finding.means, finding.todo and f"-> {finding.todo}"):
            if line:
                text.append(f"\n{line}")
        table.add_row(Text(finding.level, STYLES[finding.level]), finding.check, text)
    console.print(table)
    counts = {level: sum(f.level == level for f in findings) for level in STYLES}
    console.print(
        f"{len(findings)} findings: {counts['ok']} ok, {counts['warning']} warnings, "
        f"{counts['error']} errors"
    )
