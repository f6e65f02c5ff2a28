"""Accuracy of `occupation_coder/table.yaml` on tables of several sizes, beside the linear SVM.

python -m tests.benchmarks.own_tables FOLDER --rows=200 --seeds=1,2,3 prints one line per run.
FOLDER holds train.csv and dev.csv with the columns occ1 and hisco_1. `--rows=N` draws N rows of
train.csv and tests on its other strings; `--rows=0` takes all of it and tests on those of dev.csv.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

Row = tuple[str, str]  # text, code


def read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return [(" ".join(r["occ1"].lower().split()), r["hisco_1"]) for r in csv.DictReader(file)]


def divided(folder: Path, num_rows: int, seed: int) -> tuple[list[Row], list[Row]]:
    """Return training rows, and each other string once with the code that most of its rows have."""
    rows = read(folder / "train.csv")
    order = np.random.default_rng(seed).permutation(len(rows)).tolist()
    chosen, rest = [rows[i] for i in order], read(folder / "dev.csv")
    if num_rows:
        chosen, rest = chosen[:num_rows], [rows[i] for i in order[num_rows:]]
    seen = {text for text, _ in chosen}
    code_of: dict[str, str] = {}
    for (text, code), _ in Counter(rest).most_common():
        if text not in seen:
            code_of.setdefault(text, code)
    return chosen, list(code_of.items())


def run(folder: Path, num_rows: int, seed: int, options: list[str]) -> dict[str, float]:
    """Train and test by the shipped command; return both accuracies and the seconds of it all."""
    with tempfile.TemporaryDirectory() as name:
        parts = dict(zip(("train", "test"), divided(folder, num_rows, seed), strict=True))
        for part, rows in parts.items():
            with (Path(name) / f"{part}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("text", "code_1"), *rows])
        files = [f"--data.{part}_files={name}/{part}.csv" for part in parts]
        config = ["--config", "occupation_coder/table.yaml", f"--seed_everything={seed}"]
        where = f"--trainer.default_root_dir={name}/run"
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "lit_models", "fit", *config, *files, where, *options],
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        seconds = time.perf_counter() - start
        with (Path(name) / "run" / "metrics.csv").open(newline="") as file:
            found = {k: float(v) for row in csv.DictReader(file) for k, v in row.items() if v}
    model, svm = found["test/accuracy"], found["test/baseline_f1"]
    return {
        **{"rows": len(parts["train"]), "seed": seed, "strings": len(parts["test"])},
        **{"model": model, "svm": svm, "ahead": model - svm, "seconds": seconds},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--seeds", default="1,2,3")
    given, others = parser.parse_known_args()  # what follows goes to `fit`
    for one in given.seeds.split(","):
        print(json.dumps(run(given.folder, given.rows, int(one), others)), flush=True)
