"""The shipped demo beats the nearest training target on unseen spellings."""

import numpy as np
import pytest

from datamodules import Seq2SeqDataModule
from datamodules.files.splitting import PART_NAMES, TextSplit
from datamodules.tokenizers.text import TokenizerOptions
from tests.toy import csv_rows

MARGIN = 0.15


def edit_distances(text: str, others: np.ndarray) -> np.ndarray:
    """Return the Levenshtein distances of a text to others [N, L], padded with 0: [N]."""
    row = np.tile(np.arange(others.shape[1] + 1), (len(others), 1))
    for number, letter in enumerate(text, start=1):
        above, row = row, np.full_like(row, number)
        kept = above[:, :-1] + (others != ord(letter))
        for place in range(others.shape[1]):
            best = np.minimum(above[:, place + 1], row[:, place]) + 1
            row[:, place + 1] = np.minimum(best, kept[:, place])
    return row[np.arange(len(others)), (others != 0).sum(1)]


@pytest.mark.soak
def test_the_demo_beats_the_nearest_target_of_its_training(tmp_path, done):
    run = tmp_path / "run"
    options = ["--trainer.accelerator=cpu", f"--trainer.default_root_dir={run}"]
    done("fit", "--config", "seq2seq/demo.yaml", *options)
    (score,) = [float(v) for row in csv_rows(run / "metrics.csv") if (v := row["test/exact_match"])]
    data = Seq2SeqDataModule(tokenizer=TokenizerOptions("characters"), split=TextSplit(0.05, 0.05))
    data.prepare_data()
    data.setup("fit")
    parts = [data.part_dataset(PART_NAMES.index(name)) for name in ("train", "test")]
    train, test = ([part.describe(i, 0) for i in range(len(part.samples))] for part in parts)
    known = sorted({sample["target"] for sample in train})
    longest = max(map(len, known))
    padded = np.array([[*map(ord, text.ljust(longest, "\0"))] for text in known])
    nearest = [known[edit_distances(sample["text"], padded).argmin()] for sample in test]
    found = [near == sample["target"] for near, sample in zip(nearest, test, strict=True)]
    assert not {sample["text"] for sample in train} & {sample["text"] for sample in test}
    print(f"exact match {score:.3f}, nearest training target {np.mean(found):.3f}")
    assert score >= np.mean(found) + MARGIN
