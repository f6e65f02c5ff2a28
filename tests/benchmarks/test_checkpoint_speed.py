"""How long training stands still for a checkpoint, and waits when it goes on from one.

pytest -m benchmark tests/benchmarks/test_checkpoint_speed.py
"""

import hashlib
import statistics
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import nn

from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from lit_models.training import LastCheckpoint, Ledger, default_callbacks
from lit_models.training.checkpoints import AtomicCheckpointIO
from lit_models.training.exact import ExactModule, LossSum
from lit_models.training.optim import configured, parameter_groups
from tests.benchmarks.figures import Aim, Figures
from tests.toy import toy_trainer

INPUTS, BATCH, SAMPLES = 64, 32, 4096
WIDTH, LAYERS = 2048, 7  # 25 million parameters: 0.3 GB with the moments of AdamW
EVERY, SAVES, ROUNDS = 8, 3, 3
STEP, FEW = 1_000_000, 2  # of the resumed run, and its rows in a step
adamw = partial(torch.optim.AdamW, lr=1e-3)


def network(width: int, num_layers: int) -> nn.Sequential:
    """Return a network of equal hidden layers with one output."""
    sizes = [INPUTS, *[width] * num_layers]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


class Rows(PlannedDataset):
    """The samples, planned; more of them are the same ones again.

    Args:
        number: of samples.
    """

    def __init__(self, number: int) -> None:
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
        self.targets = (self.inputs**2).mean(1)
        self.lengths = np.ones(number, np.int8)
        self.fingerprint = hashlib.sha256(self.inputs.tobytes()).hexdigest()
        self.target_counts = {"loss": None}

    def example(self, sample_id: int, epoch: int) -> int:
        return sample_id % SAMPLES

    def collate(self, examples: list[int]) -> dict[str, Any]:
        inputs, targets = self.inputs[examples], self.targets[examples]
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


class RowsData(PlannedDataModule):
    num_samples = SAMPLES

    def build(self, stage: Stage) -> PlannedDataset:
        return Rows(self.num_samples)


class ManyRowsData(RowsData):
    num_samples = FEW * (STEP + 1000)  # so many that the millionth step lies inside the epoch


class Ours(ExactModule):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.network = network(width, num_layers)

    def training_terms(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        predicted = self.network(batch["inputs"]).squeeze(1)
        wrong = F.mse_loss(predicted, batch["targets"], reduction="none")
        return {"loss": LossSum((wrong * batch["weight"]).sum(), batch["weight"].sum())}

    def configure_optimizers(self) -> Any:
        return configured(self, adamw(parameter_groups(self)), None)


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
    options = {"max_steps": EVERY * SAVES + EVERY - 1, "max_epochs": -1, "precision": 32}
    options |= {"limit_val_batches": 0, "enable_checkpointing": False}
    trainer = toy_trainer(folder, callbacks=[Ledger(), timed], **options)
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
    callbacks = [*default_callbacks(), first]
    options = {"max_steps": max_steps, "max_epochs": -1, "precision": 32, "limit_val_batches": 0}
    trainer = toy_trainer(folder, callbacks=callbacks, **options)
    begun = time.perf_counter()
    data = ManyRowsData(global_batch_size=FEW)
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
