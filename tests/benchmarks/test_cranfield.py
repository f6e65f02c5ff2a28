"""Cranfield from scratch: three seeds on dev, and five folds of the training queries, beside BM25.

Rows are NDCG@10 of the retriever and of both fused, beside BM25; the note has the gain with its
95 % interval over queries. The options are those of configs/seo/cranfield.yaml, which were chosen
on training queries alone.
"""

import csv
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from datamodules.core.plan import hash_ids
from lit_models.seo.metrics import paired_bootstrap
from tests.benchmarks.figures import Figures

pytestmark = [pytest.mark.benchmark, pytest.mark.real_data]
ROOT = Path(__file__).parents[2]
CRANFIELD = ROOT.parent / "shared" / "data" / "cranfield"
SEEDS, NUM_FOLDS, METRIC = (1, 2, 3), 5, "ndcg@10"
Scores = dict[str, dict[str, float]]  # system -> query -> NDCG@10


def run(folder: Path, seed: int, train: Path, test: Path) -> Scores:
    """Train on some queries and return what the others score."""
    options = {
        "data.collection.folder": CRANFIELD,
        "data.collection.files.train": train,
        "data.collection.files.test": test,
        "seed_everything": seed,
        "trainer.default_root_dir": folder,
    }
    command = [sys.executable, "-m", "lit_models", "fit", "--config", "seo/cranfield.yaml"]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    scores: Scores = {}
    with (folder / "queries-test.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            scores.setdefault(row["system"], {})[row["query"]] = float(row[METRIC])
    return scores


def folds(folder: Path) -> list[tuple[Path, Path]]:
    """Write judgements of all folds but one, and of that one."""
    header, *lines = (CRANFIELD / "qrels" / "train.tsv").read_text().splitlines()
    queries = sorted({line.split("\t")[0] for line in lines}, key=int)
    order = np.argsort(hash_ids(np.arange(len(queries))), kind="stable")
    fold_of = {queries[place]: rank % NUM_FOLDS for rank, place in enumerate(order)}
    written = []
    for fold in range(NUM_FOLDS):
        paths = folder / f"train-{fold}.tsv", folder / f"test-{fold}.tsv"
        for path, is_held_out in zip(paths, (False, True), strict=True):
            chosen = [x for x in lines if (fold_of[x.split("\t")[0]] == fold) == is_held_out]
            path.write_text("\n".join([header, *chosen]) + "\n")
        written.append(paths)
    return written


def add_rows(figures: Figures, name: str, runs: list[Scores]) -> None:
    """Add the mean of each system over queries, one for each run, beside that of BM25."""
    queries = sorted(runs[0]["bm25"])
    baseline = np.array([runs[0]["bm25"][query] for query in queries])
    for system in runs[0]:
        if system == "bm25":
            continue
        values = np.array([[run[system][query] for query in queries] for run in runs])
        gain = paired_bootstrap(values.mean(0), baseline, 0)
        note = "{:+.3f} [{:+.3f}, {:+.3f}], 95 %".format(*gain)
        means, theirs = values.mean(1).tolist(), [float(baseline.mean())] * len(runs)
        what = f"Cranfield, {name}, {system}"
        figures.add("seo", what, "NDCG@10", means, "BM25", theirs, note=note)


@pytest.mark.skipif(not CRANFIELD.is_dir(), reason="no ../shared/data/cranfield")
def test_cranfield_from_scratch(tmp_path: Path, figures: Figures) -> None:
    train, dev = CRANFIELD / "qrels" / "train.tsv", CRANFIELD / "qrels" / "dev.tsv"
    runs = [run(tmp_path / f"seed-{seed}", seed, train, dev) for seed in SEEDS]
    out_of_fold: Scores = {}
    for number, (others, held_out) in enumerate(folds(tmp_path)):
        for system, scores in run(tmp_path / f"fold-{number}", 1, others, held_out).items():
            out_of_fold.setdefault(system, {}).update(scores)
    add_rows(figures, f"dev ({len(runs[0]['bm25'])} queries)", runs)
    add_rows(figures, f"folds ({len(out_of_fold['bm25'])} queries)", [out_of_fold])
    assert len(out_of_fold["bm25"]) == 110
