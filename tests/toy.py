"""Smallest module and datamodule on the shared code: ragged sequences, two loss terms."""

import copy
import csv
import hashlib
import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor, nn
from torchmetrics.aggregation import SumMetric

from datamodules.core.plan import PlanOptions, rng_for
from datamodules.core.planned import LoaderOptions, PlannedDataModule, PlannedDataset, Stage
from lit_models.commands.verify import read_ledger, surviving
from lit_models.training import LastCheckpoint, default_callbacks
from lit_models.training.exact import ExactModule, missing_kinds
from lit_models.training.metrics import LossSum, SampleResult, SumCount
from lit_models.training.optim import configured, parameter_groups

WIDTH = 4


class ToySequences(PlannedDataset):
    """Sequences of 1 to 9 numbers; the target of each is the sum of squares."""

    def __init__(self, num_samples: int, seed: int, nan_sample: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.lengths = rng.integers(1, 10, num_samples)
        self.values = [rng.normal(size=n) for n in self.lengths]
        if nan_sample is not None:
            self.values[nan_sample][0] = np.nan
        self.fingerprint = hashlib.sha256(np.concatenate(self.values).tobytes()).hexdigest()
        self.target_counts = {"sum": None, "values": self.lengths}
        self.seed = seed

    def example(self, sample_id: int, epoch: int) -> np.ndarray:
        return self.values[sample_id] + 0.01 * rng_for(self.seed, epoch, sample_id).normal()

    def collate(self, examples: list[np.ndarray]) -> dict[str, Any]:
        width = max(len(values) for values in examples)
        padded = np.zeros((len(examples), width))
        mask = np.zeros((len(examples), width), bool)
        for row, values in enumerate(examples):
            padded[row, : len(values)], mask[row, : len(values)] = values, True
        return {"values": torch.from_numpy(padded), "mask": torch.from_numpy(mask)}


class ToyData(PlannedDataModule):
    """Toy sequences for every stage."""

    def __init__(
        self,
        num_samples: int = 50,
        global_batch_size: int = 8,
        micro_batch_size: int | None = None,
        predict_output: str = "toy.csv",
        plan: PlanOptions = PlanOptions(seed=3, bucket_window=2),  # noqa: B008 - frozen
        num_workers: int = 0,
        num_evaluated: int = 21,
        nan_sample: int | None = None,
    ) -> None:
        super().__init__(
            global_batch_size,
            micro_batch_size or "auto",
            plan,
            LoaderOptions(num_workers=num_workers),
        )
        self.num_samples, self.num_evaluated = num_samples, num_evaluated
        self.nan_sample = nan_sample
        self.predict_output = predict_output

    def build(self, stage: Stage) -> PlannedDataset:
        size = self.num_samples if stage == "train" else self.num_evaluated
        seed = {"train": 0, "validation": 1, "test": 2, "predict": 3}[stage]
        return ToySequences(size, seed, self.nan_sample if stage == "train" else None)

    def write_predictions(self, results: dict[str, np.ndarray], path: Path) -> None:
        path.write_text("".join(f"{value:.6f}\n" for value in results["prediction"]))


class LitToy(ExactModule):
    """A small network applied to every value, summed over the sequence."""

    def __init__(
        self,
        optimizer: OptimizerCallable = partial(torch.optim.AdamW, lr=0.01),  # noqa: B008
        lr_scheduler: LRSchedulerCallable | None = None,
        init_from: str | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.dropout = dropout
        self.optimizer, self.lr_scheduler, self.init_from = optimizer, lr_scheduler, init_from
        self.model: nn.Module | None = None
        self.val_loss, self.test_loss = SumCount(), SumCount()
        self.test_count = SumMetric()

    def build(self, recipe: dict[str, Any], data: Any) -> None:
        generator = torch.Generator().manual_seed(5)
        self.model = nn.Sequential(nn.Linear(1, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        for parameter in self.model.parameters():
            start = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(start)
        if self.dropout:
            self.model.insert(2, nn.Dropout(self.dropout))
        self.twin = self.model[0]  # weights under two names, as in a tied head

    def forward(self, batch: dict[str, Any]) -> Tensor:
        values = batch["values"].to(self.model[0].weight.dtype)
        each = self.model(values.unsqueeze(-1)).squeeze(-1)  # [B, T]
        return each * batch["mask"]

    def losses(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        each, weight = self(batch), batch["weight"].to(batch["values"])
        target = batch["values"] ** 2
        per_value = ((each - target) ** 2 * batch["mask"]).sum(1) * weight
        per_sum = self.sample_result(batch, each).loss * weight
        return {
            "sum": LossSum(per_sum.sum(), weight.sum()),
            "values": LossSum(per_value.sum(), (batch["mask"].sum(1) * weight).sum()),
        }

    def sample_result(self, batch: dict[str, Any], each: Tensor) -> SampleResult:
        sums = each.sum(1)
        return SampleResult((sums - (batch["values"] ** 2).sum(1)) ** 2, {"sum": sums})

    def training_terms(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        return self.losses(batch)

    def term_weights(self) -> dict[str, float]:
        return {"sum": 0.5}

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.val_loss.update(*self.losses(batch)["sum"])
        self.log("val/loss", self.val_loss)

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> SampleResult:
        self.test_loss.update(*self.losses(batch)["sum"])
        self.test_count.update(batch["weight"].sum())
        self.log_dict({"test/loss": self.test_loss, "test/count": self.test_count})
        return self.sample_result(batch, self(batch))

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Tensor]:
        return {"prediction": self(batch).sum(1)}

    def configure_optimizers(self) -> Any:
        return configured(self, self.optimizer(parameter_groups(self)), self.lr_scheduler)


def callbacks_with(*own: Callback) -> list[Callback]:
    """Return the project's callbacks, with these in place of those of their classes."""
    return [*missing_kinds(default_callbacks(), [*own]), *own]


def toy_trainer(folder: Path, **options: Any) -> Trainer:
    """Return a quiet Trainer with the project's callbacks, in float64."""
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "precision": 64}
    defaults |= dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    defaults |= {"callbacks": default_callbacks(), "default_root_dir": str(folder)}
    return Trainer(**{**defaults, **options})


class PowerCut(RuntimeError):
    """The power cut that `CutAt` simulates."""


class CutAt(Callback):
    """Ends a run after an optimizer step and its callbacks, before the validation."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise PowerCut

    on_train_epoch_end = on_train_batch_start = on_validation_start


class AfterSteps(Callback):
    """Keeps copies of the weights by name at the start and after each step; of the optimizer's
    moments after each step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []
        self.moments: list[dict[int, Any]] = [{}]

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.weights.append({n: p.detach().clone() for n, p in pl_module.named_parameters()})

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)
        self.moments.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))


def fit(
    folder: Path,
    module: LitToy | None = None,
    data: ToyData | None = None,
    every: int = 4,
    cut_at: int | None = None,
    resume: bool = False,
    **options: Any,
) -> LitToy:
    """Train to `max_steps`, or until the cut, with a checkpoint every few steps; resume from the
    last checkpoint if asked to; return the module."""
    module = module or LitToy()
    callbacks = [LastCheckpoint(every_n_steps=every), *([CutAt(cut_at)] if cut_at else [])]
    trainer = toy_trainer(folder, callbacks=callbacks, enable_checkpointing=False, **options)
    last = folder / "checkpoints" / "last.ckpt" if resume else None
    with nullcontext() if cut_at is None else pytest.raises(PowerCut):
        trainer.fit(module, data or ToyData(), ckpt_path=last, weights_only=True)
    return module


def ledger_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the surviving lines of a run's ledger, in the order of their steps."""
    steps = surviving(read_ledger(folder)).steps
    return [steps[step] for step in sorted(steps)]


def csv_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a table, by the names of its columns."""
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def json_rows(path: str | Path) -> list[Any]:
    """Return the rows of a file with one JSON object on each line."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in ledger_lines(folder)]


def assert_same_samples(
    expected: list[dict[str, Any]], found: list[dict[str, Any]], rel: float = 1e-10
) -> None:
    """Assert that two ledgers have the same samples in each step, and nearly the same losses."""
    for left, right in zip(expected, found, strict=True):
        for key in ("step", "digest", "targets"):
            assert right[key] == left[key]
        assert right["loss"] == pytest.approx(left["loss"], rel=rel)
