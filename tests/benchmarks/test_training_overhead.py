"""What the shared code costs per step: everything on, beside a plain Trainer, one network."""

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
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from datamodules.core.planned import PlannedDataModule, PlannedDataset, Stage
from lit_models.training import default_callbacks
from lit_models.training.exact import ExactModule, LossSum
from lit_models.training.optim import configured, parameter_groups
from tests.benchmarks.figures import Aim, Figures

INPUTS, BATCH, SAMPLES = 64, 32, 4096
WARM_UP, ROUNDS = 10, 5
SIZES = {"small": (64, 2, 120), "large": (2048, 6, 20)}  # width, layers, steps that are measured
AIMS = {"small": Aim(0.5, of="more"), "large": Aim(1.02)}
adamw = partial(torch.optim.AdamW, lr=1e-3)


def network(width: int, num_layers: int) -> nn.Sequential:
    """Return a network of equal hidden layers with one output."""
    sizes = [INPUTS, *[width] * num_layers]
    layers: list[nn.Module] = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def samples() -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(0).normal(size=(SAMPLES, INPUTS)).astype(np.float32)
    return inputs, (inputs**2).mean(1)


class Rows(PlannedDataset):
    """The samples, planned."""

    def __init__(self) -> None:
        self.inputs, self.targets = samples()
        self.lengths = np.ones(SAMPLES, np.int64)
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
    """The network on the shared code."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.network = network(width, num_layers)

    def training_terms(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        predicted = self.network(batch["inputs"]).squeeze(1)
        wrong = F.mse_loss(predicted, batch["targets"], reduction="none")
        return {"loss": LossSum((wrong * batch["weight"]).sum(), batch["weight"].sum())}

    def configure_optimizers(self) -> Any:
        return configured(self, adamw(parameter_groups(self)), None)


class Plain(LightningModule):
    """The network as Lightning's documentation would have it."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.network = network(width, num_layers)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.network(inputs).squeeze(1), targets)

    def configure_optimizers(self) -> Any:
        return adamw(self.parameters())


class Clock(Callback):
    """Notes when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def step_seconds(folder: Path, name: str, width: int, num_layers: int, steps: int) -> float:
    """Return the median seconds of a step of one run."""
    seed_everything(0, verbose=False)
    clock = Clock()
    options = {
        "accelerator": "cpu",
        "max_steps": WARM_UP + steps,
        "limit_val_batches": 0,
        "gradient_clip_val": 1.0,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
    }
    if name == "plain":
        trainer = Trainer(**options, enable_checkpointing=False, callbacks=[clock])
        inputs, targets = map(torch.from_numpy, samples())
        loader = DataLoader(TensorDataset(inputs, targets), BATCH, shuffle=True)
        trainer.fit(Plain(width, num_layers), loader)
    else:
        trainer = Trainer(**options, callbacks=[*default_callbacks(), clock])
        trainer.fit(Ours(width, num_layers), RowsData(global_batch_size=BATCH))
    return statistics.median(np.diff(clock.ends[WARM_UP:]))


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_cost_of_a_step_beside_plain_lightning(tmp_path: Path, figures: Figures) -> None:
    torch.set_num_threads(1)
    for size, (width, num_layers, steps) in SIZES.items():
        times: dict[str, list[float]] = {"plain": [], "unisono": []}
        for number in range(ROUNDS):  # in turns, so that both meet the same machine
            for name in times:
                folder = tmp_path / f"{size}-{name}-{number}"
                times[name].append(step_seconds(folder, name, width, num_layers, steps) * 1e3)
        figures.add(
            *("shared", f"a step of a {size} network", "ms", times["unisono"]),
            *("plain Lightning", times["plain"], AIMS[size]),
        )
