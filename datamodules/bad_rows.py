"""What happens to rows that break a rule: named and refused, or written down and left out."""

import csv
import logging
import shutil
from pathlib import Path
from typing import Literal

from datamodules.sources import BadRow

NUM_NAMED = 20
REJECTED_FILE = "rejected.csv"
OnBadRows = Literal["error", "reject", "collect"]

log = logging.getLogger(__name__)


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

    def add(self, row: BadRow) -> None:
        """Takes one row; where they end in an error, only those that it will name are kept."""
        self.count += 1
        if self.mode != "error" or len(self.rows) < NUM_NAMED:
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
                writer.writerow(["file", "line", "value", "reason"])
                writer.writerows((row.file, row.line, row.value, row.rule) for row in self.rows)

    def message(self) -> str:
        """The first rows with file, line, value and rule, and the way out."""
        noun = "row breaks" if self.count == 1 else "rows break"
        more = self.count - NUM_NAMED
        return "\n".join(
            [
                f"{self.count} {noun} the rules of the data:",
                *(f"  {row}" for row in self.rows[:NUM_NAMED]),
                *([f"  … and {more} more"] if more > 0 else []),
                "Correct them, or leave them out with --data.on_bad_rows=reject, which writes them "
                f"to {REJECTED_FILE}; `unisono check` lists all.",
            ]
        )


def hand_over_rejected(cache_folder: Path, run_folder: Path) -> int:
    """Copies the rejected rows of a cache into the run folder, says so, and returns their number."""
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
