"""How long training stands still for a checkpoint."""

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lit_models.training import LastCheckpoint, Ledger
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.test_training_overhead import BATCH, Ours, RowsData

WIDTH, LAYERS = 2048, 7  # 25 million parameters: 0.3 GB with the moments of AdamW
EVERY, SAVES, ROUNDS = 8, 3, 3


class Timed(LastCheckpoint):
    """Notes how long the training stands still."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_minutes=None, every_epoch=False, **options)
        self.stalls: list[float] = []

    def _save(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        super()._save(trainer)
        self.stalls.append(time.perf_counter() - begin)


def loss(folder: Path) -> float:
    """Return the seconds that a save stops the training."""
    seed_everything(0, verbose=False)
    timed = Timed(every_n_steps=EVERY)
    callbacks: list[Callback] = [Ledger(), timed]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=EVERY * SAVES + EVERY - 1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
        default_root_dir=str(folder),
    )
    trainer.fit(Ours(WIDTH, LAYERS), RowsData(global_batch_size=BATCH))
    return statistics.median(timed.stalls)


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_time_lost_to_checkpoints(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    interval_s = LastCheckpoint().every_n_minutes * 60
    shares = [loss(tmp_path / str(number)) / interval_s for number in range(ROUNDS)]
    unit = f"share of {interval_s:.0f} s"
    figures.add("shared", "checkpoint of 25 M weights", unit, shares, aim=Aim(0.01, of="value"))
