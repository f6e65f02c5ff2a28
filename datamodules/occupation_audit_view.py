"""The audit of tables of job descriptions on a terminal."""

from typing import TYPE_CHECKING

import numpy as np

from datamodules.audits import WIDTH, say

if TYPE_CHECKING:
    from rich.console import Console

    from datamodules.occupation_audit import Audit

NUM_CONFLICTS_SHOWN = 5
NUM_LANGUAGES_SHOWN = 12


def show_audit(console: "Console", audit: "Audit") -> None:
    """Print files, texts, codes and contradictions."""
    _show_tables(console, audit)
    _show_texts(console, audit)
    _show_codes(console, audit)
    _show_conflicts(console, audit)


def _show_tables(console: "Console", audit: "Audit") -> None:
    from rich.table import Table

    table = Table(width=WIDTH, title="tables", title_justify="left", title_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("part")
    for name in ("sound rows", "bad rows"):
        table.add_column(name, justify="right")
    for entry in audit.tables:
        table.add_row(entry.file, entry.part, f"{entry.num_rows:,}", f"{entry.num_bad:,}")
    console.print(table)


def _show_texts(console: "Console", audit: "Audit") -> None:
    if len(audit.lengths):
        middle, high, most = np.quantile(audit.lengths, [0.5, 0.95, 1]).round().astype(int)
        say(
            console,
            "texts",
            f"{len(audit.lengths):,} distinct; characters: median {middle}, 95 % up to {high}, "
            f"longest {most}",
        )
    say(console, "truncated", f"{audit.num_truncated:,} longer than {audit.max_length} characters")
    shown = audit.languages.most_common(NUM_LANGUAGES_SHOWN)
    more = len(audit.languages) - len(shown)
    names = ", ".join(f"{name} {count:,}" for name, count in shown)
    say(console, "languages", f"{names}{f', {more} more' if more else ''}")
    for part, count in audit.overlap.items():
        say(console, "overlap", f"{count:,} distinct {part} texts also occur in training")


def _show_codes(console: "Console", audit: "Audit") -> None:
    if not audit.codes:
        return
    once = sum(count == 1 for count in audit.codes.values())
    say(
        console,
        "codes",
        f"{len(audit.codes):,} distinct, {once:,} of them once; rows with two or more codes: "
        f"{audit.num_several:,}",
    )
    if audit.num_unseen_codes is not None:
        say(console, "code book", f"{audit.num_unseen_codes:,} of its codes occur in no row")
    if audit.suspects:
        shown = ", ".join(audit.suspects[:10])
        found = f"{len(audit.suspects)} codes may have lost a leading zero: {shown}"
        say(console, "warning", found, "yellow")


def _show_conflicts(console: "Console", audit: "Audit") -> None:
    if not audit.conflicts:
        return
    say(
        console,
        "warning",
        f"{len(audit.conflicts):,} texts have different codes in different rows; the most "
        "frequent:",
        "yellow",
    )
    ranked = sorted(audit.conflicts.items(), key=lambda item: (-item[1].total(), item[0]))
    for text, sets in ranked[:NUM_CONFLICTS_SHOWN]:
        shown = "; ".join(f"{'+'.join(codes)} × {n}" for codes, n in sets.most_common(4))
        console.print(f"  {text[:40]}: {shown}", markup=False, no_wrap=True, overflow="ellipsis")
