"""The audit of a collection on a terminal."""

from typing import TYPE_CHECKING

import numpy as np

from datamodules.audits import WIDTH, say

if TYPE_CHECKING:
    from rich.console import Console

    from datamodules.search.audit import Audit

NUM_GRADES_SHOWN = 8
BAR_WIDTH = 24


def show_audit(console: "Console", audit: "Audit") -> None:
    """Print parts, grades, texts, and what may be a mistake."""
    _show_parts(console, audit)
    _show_grades(console, audit)
    _show_texts(console, audit)
    _show_doubts(console, audit)


def _show_parts(console: "Console", audit: "Audit") -> None:
    from rich.table import Table

    table = Table(width=WIDTH, title="judgements", title_justify="left", title_style="bold")
    table.add_column("part")
    for name in ("queries", "judgements", "relevant", "relevant per query"):
        table.add_column(name, justify="right")
    for part in audit.parts:
        mean = part.num_relevant / part.num_queries if part.num_queries else 0.0
        counts = (part.num_queries, part.num_judgements, part.num_relevant)
        table.add_row(part.part, *(f"{count:,}" for count in counts), f"{mean:.1f}")
    console.print(table)


def _show_grades(console: "Console", audit: "Audit") -> None:
    for part in audit.parts:
        if not part.grades:
            continue
        say(console, "grades", f"of {part.part}")
        most = max(part.grades.values())
        shown = list(part.grades.items())[-NUM_GRADES_SHOWN:]
        for grade, count in shown:
            bar = "█" * max(1, round(BAR_WIDTH * count / most))
            console.print(f"  {grade:>8g}  {bar:<{BAR_WIDTH}}  {count:,}", markup=False)
        if len(part.grades) > len(shown):
            console.print(f"  … and {len(part.grades) - len(shown):,} lower grades")


def _show_texts(console: "Console", audit: "Audit") -> None:
    for name, lengths in (
        ("documents", audit.document_lengths),
        ("queries", audit.query_lengths),
    ):
        middle, high, most = np.quantile(lengths, [0.5, 0.95, 1]).round().astype(int)
        say(
            console,
            name,
            f"{len(lengths):,}; bytes: median {middle:,}, 95 % up to {high:,}, longest {most:,}",
        )
    if audit.num_triples:
        say(console, "triples", f"{audit.num_triples:,}")
    say(
        console,
        "unjudged",
        f"{audit.num_unjudged:,} queries have no judgement and are in no part",
    )


def _show_doubts(console: "Console", audit: "Audit") -> None:
    doubts = [
        (audit.num_empty, "documents with neither title nor text"),
        (audit.num_repeated_texts, "documents with the words of an earlier one"),
        (audit.num_merged_queries, "queries that stand in two files alike, and are taken once"),
        (audit.num_merged_judgements, "judgements that repeat another, and are taken once"),
        (
            audit.num_fractional_grades,
            "grades that are no whole numbers, and are taken as they are",
        ),
    ]
    for part in audit.parts:
        doubts.append((part.num_without, f"{part.part} queries with no document above grade 0"))
    for (first, second), count in audit.overlap.items():
        doubts.append((count, f"queries of {first} with the words of one of {second}"))
    for count, sentence in doubts:
        if count:
            say(console, "warning", f"{sentence}: {count:,}", "yellow")
