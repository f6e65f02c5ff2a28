"""Test scores with confidence intervals, over all records and per source.

Shapes: B batch, N records, S scores.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics.utilities.distributed import gather_all_tensors

from datamodules.files.tables import write_table
from lit_models.occupation_coder.metrics import SCORES, set_scores
from lit_models.training.ledger import is_distributed, tells_samples
from lit_models.training.metrics import SampleResult

RESAMPLES, SEED = 1000, 0
SHARES = (0.025, 0.975)
NOBODY = -1.0  # sample id of a filler row


class ScoreTable(Callback):
    """Writes `scores-test.csv` to the run's folder: test scores with 95 % bootstrap intervals.

    It has one row for all records and one for each value of `data.columns.source`. An interval
    comes from the means of `RESAMPLES` resamples of the same size, drawn with replacement. Records
    are sorted by sample id and the draws depend only on their number, so the table is the same on
    any number of devices. Records with the same text count as independent.

    Source: Efron 1979, "Bootstrap Methods: Another Look at the Jackknife".
    """

    _rows: list[Tensor]  # [B, 2 + S]

    def on_test_epoch_start(self, *_: Any) -> None:
        self._rows = []

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        assert isinstance(outputs, SampleResult)
        scores = set_scores(batch["code_ids"], outputs.answers["given"])
        counts = (batch["weight"] != 0) & torch.as_tensor(tells_samples(trainer))
        sample_id = batch["sample_id"].double().masked_fill(~counts, NOBODY)
        source = batch.get("source_id", torch.zeros_like(sample_id)).double()
        self._rows.append(torch.stack([sample_id, source, *scores.values()], dim=1))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        rows = torch.cat(self._rows)
        if is_distributed():
            rows = torch.cat(gather_all_tensors(rows))
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        names = trainer.datamodule.datasets["test"].store.sources  # type: ignore[attr-defined]
        table = score_table(rows.cpu().numpy(), names if any(names) else [])
        path = Path(trainer.default_root_dir) / "scores-test.csv"
        write_table(path, table)
        print(f"scores with 95 % intervals: {path}")
        for source, number, *values in table[1:]:
            exact, low, high = values[-3:]  # the last one of `SCORES`
            print(f"  {source[:40]:<40} {number:>8}  exact_match {exact} ({low} to {high})")


def score_table(rows: np.ndarray, sources: list[str]) -> list[list[str]]:
    """Return the table's lines: header, all records, then each source by name. `rows` [N, 2 + S]
    are sample id, source and scores, in any order."""
    rows = rows[rows[:, 0] != NOBODY]
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    named = [part for name in SCORES for part in (name, f"{name}_low", f"{name}_high")]
    table = [["source", "records", *named]]
    groups = [("all", np.ones(len(rows), bool))]
    groups += [(name or "none", rows[:, 1] == i) for i, name in sorted(enumerate(sources), key=str)]
    for name, is_in in groups:
        if is_in.any():
            scores = rows[is_in, 2:]
            low, high = interval(scores)
            columns = zip(scores.mean(0), low, high, strict=True)
            values = [f"{value:.4f}" for column in columns for value in column]
            table.append([name, str(len(scores)), *values])
    return table


def interval(scores: np.ndarray) -> np.ndarray:
    """Return the lower and upper bounds [2, S] of the mean of scores [N, S]."""
    draws = np.random.default_rng(SEED)
    number = len(scores)
    means = [scores[draws.integers(0, number, number)].mean(0) for _ in range(RESAMPLES)]
    return np.quantile(means, SHARES, axis=0)
