"""`python -m lit_models.seo.fold_table RUN RUN …`: what each fold's run measured, mean and spread.

Each run is a folder of `unisono fit --data.fold k --data.num_folds n --test_after_fit=true`.
"""

import argparse
import csv
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

TEST = "test/"


def tested_measures(folder: Path) -> dict[str, float]:
    """Return the last value of each `test/` measure in a run's metrics.csv.

    Raises:
        FileNotFoundError: the folder is no run.
        ValueError: the run was never tested.
    """
    path = folder / "metrics.csv"
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; name the folders of finished runs.")
    found: dict[str, float] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            found |= {n: float(v) for n, v in row.items() if n.startswith(TEST) and v}
    if not found:
        raise ValueError(
            f"{path} holds no test measures; fit with --test_after_fit=true, or run unisono test."
        )
    return found


def fold_table(folders: Sequence[Path]) -> dict[str, tuple[float, float, list[float]]]:
    """Return measure -> mean, standard deviation over the folds (n - 1 in the denominator), and
    the value of each fold; NaN where a fold lacks it.

    Args:
        folders: of the runs, one per fold.

    Raises:
        FileNotFoundError, ValueError: as `tested_measures`; or fewer than two runs, or one twice.
    """
    if len(folders) < 2:
        raise ValueError(f"a table over folds needs two runs or more, got {len(folders)}.")
    counts = Counter(folder.resolve() for folder in folders)
    if twice := [str(folder) for folder, count in counts.items() if count > 1]:
        raise ValueError(
            f"{twice[0]} is named {counts[Path(twice[0])]} times; each fold counts once: name the "
            "folder of every run once."
        )
    runs = [tested_measures(folder) for folder in folders]
    names = sorted({name for run in runs for name in run})
    table = {}
    for name in names:
        values = [run.get(name, math.nan) for run in runs]
        table[name] = (float(np.mean(values)), float(np.std(values, ddof=1)), values)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the folders that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m lit_models.seo.fold_table")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of the runs, one per fold")
    try:
        rows = fold_table(parser.parse_args(arguments).runs)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")
    num_folds = len(next(iter(rows.values()))[2])
    table = Table("measure", "mean", "std", *(f"fold {k}" for k in range(num_folds)))
    for name, (mean, spread, values) in rows.items():
        numbers = [f"{value:.4f}" for value in (mean, spread, *values)]
        table.add_row(name.removeprefix(TEST), *numbers)
    Console(width=max(80, 50 + 10 * num_folds)).print(table)


if __name__ == "__main__":
    main()
