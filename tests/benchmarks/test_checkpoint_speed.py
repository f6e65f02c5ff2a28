"""How long training stands still for a checkpoint."""

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
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from lit_models.training import LastCheckpoint, Ledger
from lit_models.training.exact import ExactModule
from lit_models.training.metrics import LossSum
from lit_models.training.optim import configured, parameter_groups
from tests.benchmarks.figures import Aim, Figures
from tests.toy import toy_trainer

INPUTS, BATCH, SAMPLES = 64, 32, 4096
WIDTH, LAYERS = 2048, 7  # 25 million parameters: 0.3 GB with the moments of AdamW
EVERY, SAVES, ROUNDS = 8, 3, 3
adamw = partial(torch.optim.AdamW, lr=1e-3)


def network() -> nn.Sequential:
    """Return a network of equal hidden layers with one output."""
    sizes = [INPUTS, *[WIDTH] * LAYERS]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


class Rows(PlannedDataset):
    """Random rows; the target of each is the mean of squares."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.inputs = rng.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
        self.targets = (self.inputs**2).mean(1)
        self.lengths = np.ones(SAMPLES, np.int8)
        self.fingerprint = hashlib.sha256(self.inputs.tobytes()).hexdigest()
        self.target_counts = {"loss": None}

    def example(self, sample_id: int, epoch: int) -> int:
        return sample_id

    def collate(self, examples: list[int]) -> dict[str, Any]:
        inputs, targets = self.inputs[examples], self.targets[examples]
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}


class RowsData(PlannedDataModule):
    def build(self, stage: Stage) -> PlannedDataset:
        return Rows()


class Ours(ExactModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

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


def seconds_of_save(folder: Path) -> float:
    """Return the seconds for which a save stops the training."""
    seed_everything(0, verbose=False)
    timed = Timed(every_n_steps=EVERY)
    options = {"max_steps": EVERY * SAVES + EVERY - 1, "max_epochs": -1, "precision": 32}
    options |= {"limit_val_batches": 0, "enable_checkpointing": False}
    trainer = toy_trainer(folder, callbacks=[Ledger(), timed], **options)
    trainer.fit(Ours(), RowsData(global_batch_size=BATCH))
    return statistics.median(timed.stalls)


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_time_lost_to_checkpoints(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    interval_s = LastCheckpoint().every_n_minutes * 60
    shares = [seconds_of_save(tmp_path / str(number)) / interval_s for number in range(ROUNDS)]
    unit = f"share of {interval_s:.0f} s"
    figures.add("shared", "checkpoint of 25 M weights", unit, shares, aim=Aim(0.01, of="value"))
