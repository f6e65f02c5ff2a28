"""The audit of a language model's data on a terminal."""

from typing import TYPE_CHECKING

import numpy as np

from datamodules.audits import WIDTH, say

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from datamodules.text_audit import Run, TextAudit

BAR = 40  # columns of the longest bar
BEYOND = "*"  # marks lengths that exceed the context
NUM_CHARACTERS = 1200  # of the excerpt
TRAINED_STYLE = "bold green"
OPENS, CLOSES = "⟦", "⟧"  # mark what is trained on where there is no colour


def show_audit(console: "Console", audit: "TextAudit") -> None:
    """Print counts, lengths, what is lost, repetition, packing and an excerpt."""
    _show_parts(console, audit)
    _show_lengths(console, audit)
    for loss in (loss for part in audit.parts for loss in part.losses):
        say(console, loss.label, loss.sentence, "yellow")
    _show_repetition(console, audit)
    for warning in audit.warnings:
        say(console, "warning", warning, "yellow")
    _show_excerpt(console, audit)


def _show_parts(console: "Console", audit: "TextAudit") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    title = f"{audit.noun}, rows of {audit.context_length:,} positions ({audit.layout})"
    # Counts of ten digits must fit beside the names.
    table = Table(
        width=WIDTH,
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("part", no_wrap=True)
    for name in (audit.noun, "tokens", "trained on", "bytes/\ntoken", "rows", "used"):
        table.add_column(name, justify="right", no_wrap=True)
    for part in audit.parts:
        table.add_row(
            part.name,
            f"{len(part.lengths):,}",
            f"{part.num_tokens:,}",
            f"{part.num_targets:,}",
            "–" if part.num_bytes is None else f"{part.num_bytes / part.num_tokens:.2f}",
            f"{part.num_rows:,}",
            "–" if part.used_share is None else f"{100 * part.used_share:.1f} %",
        )
    console.print(table)
    say(console, "tokenizer", f"{audit.vocab_size:,} tokens")


def _show_lengths(console: "Console", audit: "TextAudit") -> None:
    """A histogram over powers of two, since lengths range over several."""
    lengths = np.concatenate([part.lengths for part in audit.parts] or [np.zeros(0, np.int64)])
    if not len(lengths):
        return
    middle, high, most = np.quantile(lengths, [0.5, 0.95, 1]).round().astype(int)
    say(
        console,
        "lengths",
        f"median {middle:,} tokens, 95 % up to {high:,}, longest {most:,}",
    )
    powers = np.ceil(np.log2(np.maximum(lengths, 1))).astype(int)
    counts = np.bincount(powers)
    for power in range(int(powers.min()), len(counts)):
        first, last = 2**power // 2 + 1, 2**power
        label = f"{first:,}–{last:,}" if power else "1"
        bar = _bar(counts[power] / counts.max()) + " " * bool(counts[power])
        beyond = f" {BEYOND}" if first > audit.context_length + 1 else ""
        console.print(f"{label:>17} {bar}{counts[power]:,}{beyond}", markup=False)
    if beyond:
        say(console, "", f"{BEYOND} longer than the context of {audit.context_length:,} positions")


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    if share and not eighths:
        eighths = 1
    rest = "▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else ""
    return "█" * (eighths // 8) + rest


def _show_repetition(console: "Console", audit: "TextAudit") -> None:
    counts = ", ".join(f"{part.name} {part.num_duplicates:,}" for part in audit.parts)
    say(console, "duplicates", f"{counts} ({audit.noun} that repeat an earlier one exactly)")
    for part in audit.parts[1:]:
        count = audit.overlap(part)
        found = f"{count:,} different {part.name} {audit.noun} are also in training"
        say(console, "overlap", found, "yellow" if count else "")


def _show_excerpt(console: "Console", audit: "TextAudit") -> None:
    from rich.panel import Panel

    if not audit.excerpt:
        return
    title = f"a row of training: {OPENS}trained on{CLOSES}, not trained on"
    console.print(Panel(_marked(audit.excerpt), title=title, title_align="left", width=WIDTH))


def _marked(runs: "list[Run]") -> "Text":
    from rich.text import Text

    text, left = Text(), NUM_CHARACTERS
    for run in runs:
        shown = run.text if len(run.text) <= left else run.text[: max(left, 1)] + " …"
        style = TRAINED_STYLE if run.is_trained else "dim"
        text.append(f"{OPENS}{shown}{CLOSES}" if run.is_trained else shown, style)
        left -= len(run.text)
        if left <= 0:
            break
    return text
