"""Audit of a datamodule's files: counts, lengths, duplicates, leakage, labels and bad rows."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from datamodules.files.rows import BadRow, first_of_each

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 80
LABEL = 11  # width of the label at the beginning of a line
NUM_BAD_SHOWN, NUM_LABELS_SHOWN = 20, 12


@dataclass
class AuditPart:
    """Figures of one part of the data."""

    name: str  # train, validation, test or predict
    lengths: np.ndarray | Sequence[int]  # [N] lengths of the examples, in the audit's unit
    keys: np.ndarray | Sequence[int]  # [N] integers, equal for equal examples
    # Further columns of the table, by name.
    columns: dict[str, int | str] = field(default_factory=dict)
    # [N] keys of the examples' inputs, without answers, to compare with `predict`; `None`: `keys`.
    questions: np.ndarray | None = None

    @property
    def num_duplicates(self) -> int:
        """Number of examples that repeat an earlier one."""
        return len(self.keys) - len(np.unique(self.keys))


@dataclass
class Audit:
    """Findings over all files of a datamodule, which its `audit()` returns."""

    noun: str  # plural of an example, such as rows
    unit: str  # of the lengths, such as tokens
    parts: list[AuditPart] = field(default_factory=list)  # the parts with examples
    limit: int | None = None  # longest example that is used uncut
    # Number of valid rows in each file, if files have rows.
    files: dict[str, int] = field(default_factory=dict)
    # Counts of the labels, by name of the column.
    labels: dict[str, Mapping[str, int]] = field(default_factory=dict)
    # Further findings: label and sentence.
    notes: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # one sentence each
    bad_rows: list[BadRow] = field(default_factory=list)  # every row that breaks a rule, in order

    @property
    def is_sound(self) -> bool:
        """Whether a run can use all rows."""
        return not self.bad_rows

    def leaks(self) -> Iterator[tuple[str, str, int]]:
        """Yield two parts, and how many distinct examples of the second are also in the first."""
        for first, second in combinations(self.parts, 2):
            keys = first.keys
            if second.name == "predict" and first.questions is not None:
                keys = first.questions
            both = np.intersect1d(np.asarray(keys), np.asarray(second.keys))
            yield first.name, second.name, len(both)

    def show(self, console: "Console") -> None:
        """Print the findings, `WIDTH` columns wide; bad rows as counts by kind, with the first row
        of each rule."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        bad = Counter(row.file for row in self.bad_rows)
        for name in dict.fromkeys([*self.files, *bad] if self.files else ()):
            rows = f"{self.files.get(name, 0):,} sound rows, {bad[name]:,} bad"
            console.print(f"{'file':<{LABEL}}{name}: {rows}", markup=False, soft_wrap=True)
        table = Table("part", width=WIDTH, box=SIMPLE_HEAD, padding=0)
        names = list(dict.fromkeys(name for part in self.parts for name in part.columns))
        for name in (self.noun, *names):
            table.add_column(name, justify="right")
        for part in self.parts:
            values = [len(part.lengths), *(part.columns.get(name, "–") for name in names)]
            cells = (f"{value:,}" if isinstance(value, int) else value for value in values)
            table.add_row(part.name, *cells)
        console.print(table)
        lengths = np.concatenate([[], *(part.lengths for part in self.parts)]).astype(np.int64)
        if len(lengths):
            middle, high, most = np.quantile(lengths, [0.5, 0.95, 1]).round().astype(int)
            sentence = f"median {middle:,} {self.unit}, 95 % up to {high:,}, longest {most:,}"
            if self.limit is not None:
                sentence += f"; {(lengths > self.limit).sum():,} longer than {self.limit:,}"
            _say(console, "lengths", sentence)
        for name, counts in self.labels.items():
            once = sum(count == 1 for count in counts.values())
            frequent = Counter(counts).most_common(NUM_LABELS_SHOWN)
            more = f", {len(counts) - len(frequent):,} more" * (len(counts) > len(frequent))
            shown = ", ".join(f"{label} {count:,}" for label, count in frequent) or "none"
            _say(console, name, f"{len(counts):,} distinct, {once:,} of them once: {shown}{more}")
        for label, sentence in self.notes:
            _say(console, label, sentence)
        if self.parts:
            shown = ", ".join(f"{part.name} {part.num_duplicates:,}" for part in self.parts)
            _say(console, "duplicates", f"{shown} ({self.noun} that repeat an earlier one)")
        for first, second, count in self.leaks():
            sentence = f"{count:,} different {second} {self.noun} are also in {first}"
            _say(console, "overlap", sentence, "yellow" if count else "")
        for warning in self.warnings:
            _say(console, "warning", warning, "yellow")
        if self.is_sound:
            _say(console, "sound", "every row can be used", "green")
            return
        kinds = Counter(row.kind for row in self.bad_rows)
        counted = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
        _say(console, "errors", f"{len(self.bad_rows):,} bad rows ({counted})", "red")
        # Breaks only between words, so that paths can be copied.
        paragraph = textwrap.TextWrapper(
            WIDTH, "  ", "  ", break_long_words=False, break_on_hyphens=False
        )
        for line in first_of_each(self.bad_rows, NUM_BAD_SHOWN):
            console.print(paragraph.fill(line), markup=False, soft_wrap=True)
        console.print(
            "Correct them, or leave them out of a training: --data.on_bad_rows=reject "
            "writes them to rejected.csv."
        )


def _say(console: "Console", label: str, text: str, style: str = "") -> None:
    """Print one finding: label and text in two columns."""
    from rich.text import Text

    first = f"{label:<{LABEL - 1}} "
    shown = Text(textwrap.fill(first + text, WIDTH, subsequent_indent=" " * LABEL))
    shown.stylize(style, 0, len(label))
    console.print(shown)
