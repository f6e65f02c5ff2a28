"""Loggers that survive a resume: every step stands once in metrics.csv and in TensorBoard."""

import csv
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only


class AppendingCSVLogger(Logger):
    """Appends rows of metrics to `metrics.csv`; Lightning's own deletes the file on reopening.

    Args:
        folder: the run folder.
        resumed_step: steps that the checkpoint holds; rows from there on run again, and go.
    """

    def __init__(self, folder: str, resumed_step: int | None = None) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.resumed_step = resumed_step
        self._columns: list[str] | None = None

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.folder)

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / "metrics.csv"

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *_: Any, **__: Any) -> None:
        """Does nothing: config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Appends one row; a new metric becomes a new column."""
        row: dict[str, Any] = {"step": "" if step is None else step, **metrics}
        if self._columns is None:
            self._columns = self._reopen()
        new = sorted(set(row) - set(self._columns))
        if new:
            self._columns += new
            self._rewrite(self._read())
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _reopen(self) -> list[str]:
        """Returns the columns of the file as an earlier run left it, replayed rows removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = self._read()
        self._columns = list(rows[0]) if rows else ["step", "epoch"]
        # Written anew in any case: a kill may have cut the last row short.
        self._rewrite([r for r in rows if self.resumed_step is None or not self._runs_again(r)])
        return self._columns

    def _runs_again(self, row: dict[str, str]) -> bool:
        """Returns whether the resumed run will write this row once more.

        Ledger and Throughput number steps from 1, Lightning the rows of an evaluation from 0.
        """
        assert self.resumed_step is not None
        if not row["step"].isdigit() or int(row["step"]) < self.resumed_step:
            return False
        is_of_done_step = row.get("train/loss") or row.get("throughput/seconds")
        return int(row["step"]) > self.resumed_step or not is_of_done_step

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file, restval="")
                if "step" not in (reader.fieldnames or ["step"]):
                    raise ValueError("no column step")
                # A row that a kill cut short has None where values are missing.
                return [row for row in reader if None not in row]
        except (ValueError, csv.Error) as error:
            raise ValueError(
                f"{self.path} is damaged ({error}); only the run writes it. Move it away, and the "
                "run goes on with a new one."
            ) from error

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        assert self._columns is not None
        temporary = self.path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)


def default_loggers(folder: str, resumed_step: int | None = None) -> list[Logger]:
    """Returns the loggers of a run folder: metrics.csv and tensorboard/.

    Args:
        folder: the run folder.
        resumed_step: steps that the checkpoint holds; later ones run again and replace their rows.
    """
    purge = {} if resumed_step is None else {"purge_step": resumed_step + 1}
    board = TensorBoardLogger(folder, name="tensorboard", version="", **purge)
    return [AppendingCSVLogger(folder, resumed_step), board]
