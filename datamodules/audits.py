"""What `unisono check` says of a datamodule's files: the part that all audits share."""

import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from datamodules.files.bad_rows import BadRow

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
NUM_BAD_SHOWN = 20
TOO_LONG = "too long"  # kind of a bad row, which data.too_long decides on
LABEL = 11  # columns of the word that a line begins with
INDENT: dict[str, Any] = {
    "initial_indent": "  ",
    "subsequent_indent": "  ",
    "break_on_hyphens": False,
}

MakeModel = Callable[[], Any]  # builds the module of the run, where an audit depends on it


class Audit(Protocol):
    """Findings over all files of a datamodule, which its `audit(make_model)` returns."""

    @property
    def bad_rows(self) -> Sequence[BadRow]:
        """Every row that breaks a rule, in order."""

    def show(self, console: "Console") -> None:
        """Print the findings, `WIDTH` columns wide, without the bad rows."""


def say(console: "Console", label: str, text: str, style: str = "") -> None:
    """Print one finding: its label, and its text in a column of its own."""
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=0)
    line.add_column(width=LABEL, no_wrap=True)
    line.add_column(width=WIDTH - LABEL)
    line.add_row(Text(label, style=style), Text(text))
    console.print(line)


def show_bad_rows(console: "Console", rows: Sequence[BadRow]) -> None:
    """Print how many rows break each rule, and the first; those too long say what helps."""
    if not rows:
        say(console, "sound", "every row can be used", "green")
        return
    kinds = Counter(row.kind for row in rows).most_common()
    counts = ", ".join(f"{kind} {count:,}" for kind, count in kinds)
    say(console, "errors", f"{len(rows):,} bad rows ({counts})", "red")
    times = Counter((row.file, row.rule) for row in rows)
    first = {(row.file, row.rule): row for row in reversed(rows)}
    for key, count in list(times.items())[:NUM_BAD_SHOWN]:
        shown = f"{first[key]} [and {count - 1:,} more]" if count > 1 else str(first[key])
        # Broken between words alone: a path with a line break in it cannot be copied.
        line = textwrap.fill(shown, WIDTH, break_long_words=False, **INDENT)
        console.print(line, markup=False, soft_wrap=True)
    if len(times) > NUM_BAD_SHOWN:
        console.print(f"  … and {len(times) - NUM_BAD_SHOWN:,} other faults")
    num_long = sum(row.kind == TOO_LONG for row in rows)
    if num_long < len(rows):
        console.print(
            "Correct them, or leave them out of a run with --data.on_bad_rows=reject, which "
            "writes them to rejected.csv."
        )
