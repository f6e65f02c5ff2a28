"""Rows of csv, tsv, jsonl and parquet files: a text, its labels and its group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from datamodules.files.rows import (
    HALF_RULE,
    JSON_SUFFIXES,
    BadRow,
    BadRows,
    half_character,
    read_json_rows,
)
from datamodules.files.tables import SUFFIXES as TABLES
from datamodules.files.tables import Table
from datamodules.scored.labels import LabelError, LabelReader

SUFFIXES = (*TABLES, *JSON_SUFFIXES)
NOTHING = "holds no text; fill it or drop the row."


@dataclass(frozen=True)
class TextColumns:
    """Which columns hold what, besides the labels.

    Args:
        text: of the text; several are joined by line breaks, such as title and body.
        group: rows of one group are never on two sides of a split, such as pages of one site;
            none groups texts of the same words.
    """

    text: str | list[str] = "text"
    group: str | None = None

    @property
    def texts(self) -> list[str]:
        """The text columns."""
        return [self.text] if isinstance(self.text, str) else list(self.text)


class ScoredRow(NamedTuple):
    """One sound row: labels are one list of numbers per head."""

    text: str
    group: str
    labels: list[list[float]]


@dataclass
class RowReader:
    """What a row must fulfil.

    Args:
        columns: of text and group.
        heads: readers of the labels; none where there is nothing to learn (prediction).
        bad_rows: takes the rows that break a rule.
    """

    columns: TextColumns
    heads: Sequence[LabelReader]
    bad_rows: BadRows

    def rows(self, path: Path) -> Iterator[ScoredRow | None]:
        """Yield the rows of a file in order, none for each that breaks a rule.

        Raises:
            ValueError: the file lacks a column, or is damaged.
        """
        group = [self.columns.group] if self.columns.group and self.heads else []
        wanted = [*self.columns.texts, *group]
        wanted += [column for head in self.heads for column in head.columns]
        wanted = list(dict.fromkeys(wanted))
        for line, cells in self._cells(path, wanted):
            try:
                yield self._row(cells)
            except LabelError as error:
                self.bad_rows.add(BadRow(str(path), line, error.value, str(error), "label"))
                yield None

    def _cells(self, path: Path, wanted: list[str]) -> Iterator[tuple[int, dict[str, str]]]:
        if path.suffix.lower() in JSON_SUFFIXES:
            separators = {
                column: head.options.separator for head in self.heads for column in head.columns
            }
            for row in read_json_rows(path):
                cells = {c: cell_text(row.values.get(c), separators.get(c)) for c in wanted}
                yield row.line, cells
            return
        table = Table(path)
        table.check(self.columns.texts, "columns.text")
        for head in self.heads:
            table.check(head.columns, f"heads.{head.name}.columns")
        for batch in table.rows(wanted, self.bad_rows.add):
            columns = [batch.texts(name) for name in wanted]
            for line, *values in zip(batch.line.tolist(), *columns, strict=True):
                yield line, dict(zip(wanted, values, strict=True))

    def _row(self, cells: dict[str, str]) -> ScoredRow:
        parts = [cells[name] for name in self.columns.texts]
        text = "\n".join(part for part in parts if part.strip())
        if not text:
            raise LabelError("", f"the column {' or '.join(self.columns.texts)} {NOTHING}")
        if (half := half_character(text)) is not None:
            raise LabelError(half, HALF_RULE)
        group = cells.get(self.columns.group or "", "") if self.heads else ""
        if self.columns.group and self.heads and not group.strip():
            raise LabelError(
                "", f'the column "{self.columns.group}" holds no group; fill it or drop the row.'
            )
        labels = [head.parse([cells[c] for c in head.columns]) for head in self.heads]
        return ScoredRow(text, group.strip(), labels)


def cell_text(value: Any, separator: str | None = None) -> str:
    """Return a JSON value as the cell of a table: null is empty, a list is joined."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        if separator is None:
            raise LabelError(str(value), "a list must be joined: name a separator for this head.")
        return separator.join(map(str, value)) or separator
    return str(value)
