"""How long training stands still for a checkpoint, written at once and in the background."""

import statistics
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lit_models.training import LastCheckpoint, Ledger
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.test_training_overhead import BATCH, Ours, RowsData

WIDTH, LAYERS = 2048, 7  # 25 million parameters: 0.3 GB with the moments of AdamW
WRITTEN = {False: "written at once", True: "written in the background"}
EVERY, SAVES, WARM_UP, ROUNDS = 8, 3, 3, 3


class Timed(LastCheckpoint):
    """Notes how long the training thread stands still, and how long each step takes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(every_n_minutes=None, every_epoch=False, **options)
        self.stalls: list[float] = []
        self.steps: list[tuple[float, bool]] = []  # seconds, whether a thread was writing
        self._began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, *arguments: Any) -> None:
        is_writing = any(thread.name == "checkpoint" for thread in threading.enumerate())
        self.steps.append((time.perf_counter() - self._began, is_writing))
        super().on_train_batch_end(trainer, *arguments)

    def _save(self, trainer: Trainer) -> None:
        begin = time.perf_counter()
        super()._save(trainer)
        self.stalls.append(time.perf_counter() - begin)


def losses(folder: Path, asynchronous: bool) -> tuple[float, float]:
    """Return the seconds that a save stops the training, and those it costs by slower steps."""
    seed_everything(0, verbose=False)
    timed = Timed(every_n_steps=EVERY, asynchronous=asynchronous)
    callbacks: list[Callback] = [Ledger(), timed]
    trainer = Trainer(
        accelerator="cpu",
        max_steps=EVERY * SAVES + EVERY - 1,  # steps follow the last save, too
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=callbacks,
        default_root_dir=str(folder),
    )
    trainer.fit(Ours(WIDTH, LAYERS), RowsData(global_batch_size=BATCH))
    alone = statistics.median(
        seconds for seconds, is_writing in timed.steps[WARM_UP:] if not is_writing
    )
    meanwhile = [seconds - alone for seconds, is_writing in timed.steps if is_writing]
    return statistics.median(timed.stalls), float(np.sum(meanwhile)) / SAVES


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_time_lost_to_checkpoints(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    interval_s = LastCheckpoint().every_n_minutes * 60
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for number in range(ROUNDS):  # in turns, so that both meet the same machine
        for asynchronous in found:
            found[asynchronous].append(losses(tmp_path / f"{asynchronous}-{number}", asynchronous))
    for asynchronous, rounds in found.items():
        shares = [(stall + slower) / interval_s for stall, slower in rounds]
        name = f"checkpoint of 25 M weights, {WRITTEN[asynchronous]}"
        unit = f"share of {interval_s:.0f} s"
        figures.add("shared", name, unit, shares, aim=Aim(0.01, of="value"))
