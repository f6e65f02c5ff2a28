"""How long a run waits that goes on in the middle of an epoch, at its millionth step.

pytest -m benchmark tests/benchmarks/test_resume_speed.py
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer

from datamodules.core.planned import PlannedDataset, Stage
from lit_models.training import default_callbacks
from lit_models.training.checkpoints import AtomicCheckpointIO
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.test_training_overhead import Ours, Rows, RowsData

STEP, BATCH, ROUNDS = 1_000_000, 2, 3


class ManyRows(Rows):
    """The same few samples, so often that the millionth step lies inside the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = np.ones(BATCH * (STEP + 1000), np.int8)

    def example(self, sample_id: int, epoch: int) -> int:
        return sample_id % len(self.inputs)


class ManyRowsData(RowsData):
    def build(self, stage: Stage) -> PlannedDataset:
        return ManyRows()


class FirstStep(Callback):
    """Notes when the first step ended, and which it was."""

    def __init__(self) -> None:
        self.ended, self.number = 0.0, 0

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if not self.ended:
            self.ended, self.number = time.perf_counter(), trainer.global_step


def first_step(folder: Path, max_steps: int, ckpt_path: Path | None = None) -> tuple[float, int]:
    """Return the seconds from the call of `fit` until the first step is done, and its number."""
    first = FirstStep()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[*default_callbacks(), first],
    )
    begun = time.perf_counter()
    data = ManyRowsData(global_batch_size=BATCH)
    trainer.fit(Ours(64, 2), data, ckpt_path=ckpt_path, weights_only=True)
    return first.ended - begun, first.number


def moved(checkpoint: Path, target: Path) -> Path:
    """Write a checkpoint of a few steps as if it were one of the millionth, and return it.

    A run would take an hour to get there. The sample position decides where a run goes on; the
    counters of Lightning's loop follow from it.
    """
    content = torch.load(checkpoint, weights_only=True)
    content["ManyRowsData"]["step"] = content["global_step"] = STEP
    loop = content["loops"]["fit_loop"]
    progress = loop["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]["step"]
    for counters in progress.values():
        counters.update(ready=STEP, completed=STEP)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = STEP
    AtomicCheckpointIO().save_checkpoint(content, target)
    return target


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`", "ignore:The dirpath has changed")
def test_resuming_at_the_millionth_step(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    first_step(tmp_path / "first", 3)  # makes the plan, which both find in the cache
    late = moved(tmp_path / "first" / "checkpoints" / "last.ckpt", tmp_path / "late.ckpt")
    times: dict[str, list[float]] = {"fresh": [], "resumed": []}
    for turn in range(ROUNDS):
        times["fresh"].append(first_step(tmp_path / f"fresh{turn}", 2)[0])
        seconds, number = first_step(tmp_path / f"resumed{turn}", STEP + 2, late)
        assert number == STEP + 1
        times["resumed"].append(seconds)
    figures.add(
        *("shared", "to the first step, resumed at step 10⁶ of an epoch", "s", times["resumed"]),
        *("a fresh start", times["fresh"], Aim(1.0, of="more")),
    )
