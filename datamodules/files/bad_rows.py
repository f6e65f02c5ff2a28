"""What happens to rows that break a rule: named and refused, or written down and left out."""

import csv
import logging
import shutil
from collections import Counter
from pathlib import Path
from typing import Literal, NamedTuple

NUM_NAMED = 20
NUM_IN_FULL = 3  # more rows than this get one line each
COLUMNS = 80
REJECTED_FILE = "rejected.csv"
OnBadRows = Literal["error", "reject", "collect"]

log = logging.getLogger(__name__)


class BadRow(NamedTuple):
    """One row that breaks a rule: where it stands, the value, the rule with the way out."""

    file: str
    line: int
    value: str
    rule: str
    kind: str = "columns"

    def __str__(self) -> str:
        return self.shown(max_file=200, max_value=60)

    def shown(self, max_file: int, max_value: int) -> str:
        """File, line, value and rule; a long path loses its beginning, a long value its end."""
        file = self.file if len(self.file) <= max_file else "…" + self.file[1 - max_file :]
        value = self.value if len(self.value) <= max_value else self.value[: max_value - 1] + "…"
        is_in_rule = self.value and f'"{self.value}"' in self.rule
        return f"{file}:{self.line}: " + ("" if is_in_rule else f'"{value}": ') + self.rule


class BadRows:
    """Takes bad rows while a table is read, and settles the matter at the end.

    Args:
        mode: `error` raises in `settle`, `reject` writes them down, `collect` only keeps them.
    """

    def __init__(self, mode: OnBadRows = "error") -> None:
        if mode not in ("error", "reject", "collect"):
            raise ValueError(f'on_bad_rows must be "error" or "reject", got "{mode}".')
        self.mode = mode
        self.rows: list[BadRow] = []
        self.count = 0
        self._times: Counter[tuple[str, str]] = Counter()  # (file, rule) -> rows

    def add(self, row: BadRow) -> None:
        """Takes one row; where they end in an error, only those that it will name are kept."""
        self.count += 1
        self._times[row.file, row.rule] += 1
        is_named = self._times[row.file, row.rule] == 1 and len(self.rows) < NUM_NAMED
        if self.mode != "error" or is_named:
            self.rows.append(row)

    def settle(self, folder: Path) -> None:
        """Raises, or writes `rejected.csv` into the folder where there is something to write.

        Raises:
            ValueError: there are bad rows and the mode is `error`; the first 20 are named.
        """
        if self.count and self.mode == "error":
            raise ValueError(self.message())
        if self.count:
            with (folder / REJECTED_FILE).open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(["file", "line", "value", "kind", "reason"])
                writer.writerows(
                    (row.file, row.line, row.value, row.kind, row.rule) for row in self.rows
                )

    def message(self) -> str:
        """One line per rule and file with the first row and the number of rows, on one screen."""
        noun = "1 row breaks" if self.count == 1 else f"{self.count} rows break"
        first = f"; the first {NUM_NAMED} kinds" if len(self._times) > NUM_NAMED else ""
        head = f"{noun} the rules of the data{first}:"
        way_out = f"--data.on_bad_rows=reject writes them to {REJECTED_FILE} and goes on without."
        if len(self._times) <= NUM_IN_FULL:
            return "\n".join([head, *(f"{row}{self._more(row)}" for row in self.rows), way_out])
        lines = [_one_line(row, self._more(row)) for row in self.rows]
        return "\n".join([head, *lines, way_out, "`unisono check` explains each."])

    def _more(self, row: BadRow) -> str:
        more = self._times[row.file, row.rule] - 1
        return f" [and {more:,} more]" if more else ""


def _one_line(row: BadRow, more: str) -> str:
    line, width = "  " + row.shown(max_file=30, max_value=20), COLUMNS - len(more)
    return (line if len(line) <= width else line[: width - 1] + "…") + more


def read_rejected(folder: Path) -> list[BadRow]:
    """Returns the rows that `settle` wrote into a folder."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            BadRow(row["file"], int(row["line"]), row["value"], row["reason"], row["kind"])
            for row in csv.DictReader(file)
        ]


def hand_over_rejected(cache_folder: Path, run_folder: Path) -> int:
    """Copies the rejected rows of a cache to the run folder, says so and returns their number."""
    source = cache_folder / REJECTED_FILE
    if not source.exists():
        return 0
    with source.open(encoding="utf-8", newline="") as file:
        count = sum(1 for _ in csv.reader(file)) - 1
    run_folder.mkdir(parents=True, exist_ok=True)
    target = run_folder / REJECTED_FILE
    shutil.copyfile(source, target)
    log.warning("%d rows were rejected; they are listed with the reason in %s", count, target)
    return count
