"""What is in files of scored texts, and what is wrong with them: all of it, not the first."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from datamodules.audits import say
from datamodules.files.bad_rows import BadRow, BadRows
from datamodules.files.splitting import stem_key
from datamodules.scored.labels import LabelReader
from datamodules.scored.rows import RowReader
from datamodules.scored.store import StoreRequest

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class ScoredTextAudit:
    """Findings over all files with labels.

    Attributes:
        num_rows: sound rows of each file.
        lengths: characters of each sound text.
        num_repeated: rows whose text has the same words as one before.
        num_groups: distinct groups; none where no column is named.
        heads: one line on the labels of each head.
        errors: what is wrong with a head as a whole.
        bad_rows: every one, in order.
    """

    num_rows: dict[str, int] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    num_repeated: int = 0
    num_groups: int | None = None
    heads: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    bad_rows: Sequence[BadRow] = ()

    def show(self, console: "Console") -> None:
        """Print the findings."""
        for name, count in self.num_rows.items():
            say(console, "file", f"{name}: {count:,} sound rows")
        if self.lengths:
            cuts = np.percentile(self.lengths, [50, 95, 100])
            say(
                console,
                "text",
                "characters: median {:,.0f}, 95 % {:,.0f}, most {:,.0f}".format(*cuts),
            )
        if self.num_repeated:
            say(console, "repeated", f"{self.num_repeated:,} texts have the words of another one")
        if self.num_groups is not None:
            say(console, "groups", f"{self.num_groups:,}")
        for name, line in self.heads.items():
            say(console, "head", f"{name}: {line}")
        for error in self.errors:
            say(console, "errors", error, "red")


def audit_scored_texts(request: StoreRequest) -> ScoredTextAudit:
    """Read every file to its end and return what is in it.

    Raises:
        FileNotFoundError, ValueError: a file or a column is missing, or a file is damaged.
    """
    audit, bad_rows = ScoredTextAudit(), BadRows("collect")
    heads = [LabelReader(name, options) for name, options in request.heads.items()]
    reader = RowReader(request.columns, heads, bad_rows)
    values: list[list[list[float]]] = [[] for _ in heads]
    keys: set[str] = set()
    groups: set[str] = set()
    for _, path in request.files:
        audit.num_rows[str(path)] = 0
        for row in reader.rows(path):
            if row is None:
                continue
            audit.num_rows[str(path)] += 1
            audit.lengths.append(len(row.text))
            key = stem_key(row.text)
            audit.num_repeated += key in keys
            keys.add(key)
            groups.add(row.group)
            for column, labels in zip(values, row.labels, strict=True):
                column.append(labels)
    audit.num_groups = len(groups) if request.columns.group else None
    audit.bad_rows = bad_rows.rows
    for head, column in zip(heads, values, strict=True):
        try:
            audit.heads[head.name] = _described(head, column)
        except ValueError as error:
            audit.errors.append(str(error))
    return audit


def _described(head: LabelReader, values: list[list[float]]) -> str:
    numbers = np.array(values, np.float64).reshape(len(values), head.width)
    numbers, classes = head.finish(numbers)
    known = ~np.isnan(numbers)
    count = f"{head.options.kind}, {known.any(1).sum():,} of {len(values):,} rows labelled"
    if not known.any():
        return count
    if classes is None:
        least, mean, most = (f(numbers[known]) for f in (np.min, np.mean, np.max))
        return f"{count}; {least:g} to {most:g}, mean {mean:g}"
    if head.options.kind == "multilabel":
        totals = np.nansum(numbers, 0)
    else:
        totals = np.bincount(numbers[known].astype(np.int64), minlength=len(classes))
    shown = ", ".join(f"{n} {int(t):,}" for n, t in zip(classes, totals, strict=True))
    return f"{count}; {shown}"
