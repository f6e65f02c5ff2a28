"""What is in tables of job descriptions, and what is wrong with them: all of it, not the first."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from datamodules.audits import WIDTH, say
from datamodules.files.bad_rows import BadRow, BadRows
from datamodules.files.splitting import PART_NAMES, TRAIN
from datamodules.files.tables import check_file
from datamodules.occupations.rows import Job, RowRules
from datamodules.occupations.store import StoreRequest
from datamodules.tokenizers.codes import (
    CodeBook,
    CodeSystem,
    build_code_book,
    lost_zero_suspects,
)

if TYPE_CHECKING:
    from rich.console import Console

NUM_CONFLICTS_SHOWN = 5
NUM_LANGUAGES_SHOWN = 12


@dataclass
class TableAudit:
    """One file: the part that it belongs to, its sound and its bad rows."""

    file: str
    part: str
    num_rows: int = 0
    num_bad: int = 0


@dataclass
class Audit:
    """Findings over all tables with codes, and over the tables to code.

    Attributes:
        tables: one entry per file.
        bad_rows: every one, in order.
        lengths: characters of each distinct text.
        languages: rows per language.
        codes: rows per code.
        num_several: rows with two or more codes.
        conflicts: text -> code sets with their numbers of rows, where there are two or more.
        suspects: codes that look as if they had lost a leading zero.
        num_unseen_codes: codes of the book that no row has; none without a book.
        overlap: part -> distinct texts that also occur in a training file.
        notes: sentences on rows to code.
    """

    max_length: int
    tables: list[TableAudit] = field(default_factory=list)
    bad_rows: list[BadRow] = field(default_factory=list)
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    languages: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    num_several: int = 0
    conflicts: dict[str, Counter[tuple[str, ...]]] = field(default_factory=dict)
    suspects: list[str] = field(default_factory=list)
    num_unseen_codes: int | None = None
    overlap: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def num_truncated(self) -> int:
        """Distinct texts that are cut."""
        return int((self.lengths > self.max_length).sum())

    def show(self, console: "Console") -> None:
        """Print the findings."""
        show_audit(console, self)


def audit_tables(request: StoreRequest, predict_files: list[Path]) -> Audit:
    """Reads every table to its end and returns what is in it.

    Args:
        request: the tables with codes, and what their rows must fulfil.
        predict_files: tables to code; only text and language are read.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file cannot be read at all, or lacks a column.
    """
    audit = Audit(request.text.max_length)
    reader = _Reader(request, audit)
    for part, paths in request.files.items():
        for path in paths:
            reader.read(path, part)
    for path in predict_files:
        reader.read_inputs(path)
    reader.finish()
    return audit


class _Reader:
    def __init__(self, request: StoreRequest, audit: Audit) -> None:
        self.request, self.audit = request, audit
        self.book: CodeBook | None = None
        if request.book.path is not None:
            check_file(Path(request.book.path), "data.code_book")
            self.book = build_code_book(request.system, Path(request.book.path), ())
        self.code_sets: dict[str, Counter[tuple[str, ...]]] = {}
        self.texts: dict[int, set[str]] = {}
        self.lengths: dict[str, int] = {}

    def read(self, path: Path, part: int) -> None:
        """Takes a table with codes."""
        bad = BadRows("collect")
        rules = self._rules(self.request.system if self.book is None else self.book.system, bad)
        table = TableAudit(str(path), PART_NAMES[part])
        for job in rules.jobs(path, part == TRAIN and self.request.columns.split is not None):
            table.num_rows += 1
            self._take(job, part if job.part is None else job.part)
        self._close(table, bad)

    def read_inputs(self, path: Path) -> None:
        """Takes a table to code."""
        bad = BadRows("collect")
        rules = self._rules(CodeSystem(), bad)
        rules.is_prediction = True
        table = TableAudit(str(path), "predict")
        for batch in rules.input_batches(path):
            for text, language in rules.inputs(batch):
                if text is not None:
                    table.num_rows += 1
                    self.lengths[text] = len(text)
                    self.audit.languages[language] += 1
        self.audit.notes += [f"{path}: {note}" for note in rules.notes()]
        self._close(table, bad)

    def finish(self) -> None:
        """Fills what needs all rows."""
        audit = self.audit
        audit.lengths = np.fromiter(self.lengths.values(), np.int64, len(self.lengths))
        audit.conflicts = {text: sets for text, sets in self.code_sets.items() if len(sets) > 1}
        if self.book is None:
            if self.request.system.length is None:
                audit.suspects = lost_zero_suspects(audit.codes)
        else:
            ordinary = set(self.book.codes) - set(self.book.system.specials)
            audit.num_unseen_codes = len(ordinary - set(audit.codes))
        train = self.texts.get(TRAIN, set())
        for part, texts in self.texts.items():
            if part != TRAIN:
                audit.overlap[PART_NAMES[part]] = len(texts & train)

    def _rules(self, system: CodeSystem, bad: BadRows) -> RowRules:
        request = self.request
        normalise, book = request.text.normalisation, self.book
        return RowRules(request.columns, normalise, system, bad, book, request.table)

    def _take(self, job: Job, part: int) -> None:
        self.lengths[job.text] = len(job.text)
        self.audit.languages[job.language] += 1
        self.audit.codes.update(job.codes)
        self.audit.num_several += len(job.codes) > 1
        self.texts.setdefault(part, set()).add(job.text)
        self.code_sets.setdefault(job.text, Counter())[tuple(sorted(job.codes))] += 1

    def _close(self, table: TableAudit, bad: BadRows) -> None:
        table.num_bad = bad.count
        self.audit.tables.append(table)
        self.audit.bad_rows += bad.rows


def show_audit(console: "Console", audit: Audit) -> None:
    """Print files, texts, codes and contradictions."""
    _show_tables(console, audit)
    _show_texts(console, audit)
    _show_codes(console, audit)
    _show_conflicts(console, audit)


def _show_tables(console: "Console", audit: Audit) -> None:
    from rich.table import Table

    table = Table(width=WIDTH, title="tables", title_justify="left", title_style="bold")
    table.add_column("file", overflow="fold")
    table.add_column("part")
    for name in ("sound rows", "bad rows"):
        table.add_column(name, justify="right")
    for entry in audit.tables:
        table.add_row(entry.file, entry.part, f"{entry.num_rows:,}", f"{entry.num_bad:,}")
    console.print(table)


def _show_texts(console: "Console", audit: Audit) -> None:
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
    for note in audit.notes:
        say(console, "warning", note, "yellow")


def _show_codes(console: "Console", audit: Audit) -> None:
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


def _show_conflicts(console: "Console", audit: Audit) -> None:
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
