"""Toy runs whose throughput the tests look at, with sleeps of known length in known places."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lit_models.training.callbacks import (
    BestCheckpoint,
    LastCheckpoint,
    Throughput,
    default_callbacks,
)
from tests.toy import LitToy, ToyData, ToySequences, toy_trainer

NAP_S = 0.06


def throughput_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's throughput.jsonl."""
    return [json.loads(line) for line in (folder / "throughput.jsonl").read_text().splitlines()]


def seconds_in(folder: Path, phase: str) -> float:
    """Return what one phase took in all intervals of a run."""
    return sum(line["split"][phase] for line in throughput_lines(folder))


class Stopwatch(Callback):
    """The wall clock from the moment that the clock of Throughput starts to where it ends."""

    def on_train_start(self, *_: Any) -> None:
        self.begin = time.perf_counter()

    def on_train_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.begin


class SleepyBackward(torch.autograd.Function):
    """Changes nothing, and takes its time in the backward pass."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(NAP_S)
        return gradient


class SleepyAdamW(torch.optim.AdamW):
    """Sleeps in each update."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        time.sleep(NAP_S)
        return result


class SleepyToy(LitToy):
    """Sleeps once per training step, or per validation, in the place that is asked for."""

    place = ""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.place == "other":
            time.sleep(NAP_S)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.place == "forward":
            time.sleep(NAP_S)
        loss = super().training_step(batch, batch_idx)
        return SleepyBackward.apply(loss) if self.place == "backward" else loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.place == "evaluation":
            time.sleep(NAP_S)
        super().validation_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.place == "checkpoint":
            time.sleep(NAP_S)

    def configure_optimizers(self) -> Any:
        if self.place == "optimizer":
            return SleepyAdamW(self.parameters(), lr=0.01)
        return super().configure_optimizers()


class SleepySequences(ToySequences):
    """Sleeps in each micro-batch."""

    def collate(self, examples: Any) -> dict[str, Any]:
        time.sleep(NAP_S)
        return super().collate(examples)


class SleepyData(ToyData):
    """Of the training alone."""

    def build(self, stage: Any) -> Any:
        if stage == "train":
            return SleepySequences(self.num_samples, 0)
        return super().build(stage)


class SleepyCallback(Callback):
    """Sleeps at the end of each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(NAP_S)


def run(folder: Path, place: str = "", **options: Any) -> Stopwatch:
    """Train three epochs of two steps, a validation after each, and a checkpoint where no sleep is
    looked for elsewhere."""
    module, watch = SleepyToy(), Stopwatch()
    module.place = place
    data = (SleepyData if place == "data" else ToyData)(num_samples=16)
    own = [c for c in default_callbacks() if not isinstance(c, Throughput | LastCheckpoint)]
    # The watch before and the sleeper after: time of other callbacks counts, whatever their order.
    own = [own[0], watch, Throughput(), *own[1:]]
    if place in ("", "checkpoint"):
        own.append(LastCheckpoint(every_n_steps=2))
    else:  # a disk that others use takes as long as a sleep
        own = [c for c in own if not isinstance(c, BestCheckpoint)]
    own += [SleepyCallback()] if place == "logging" else []
    settings = {"max_epochs": 3, "log_every_n_steps": 2, "num_sanity_val_steps": 0}
    if place not in ("", "checkpoint"):
        settings["enable_checkpointing"] = False
    trainer = toy_trainer(folder, callbacks=own, **{**settings, **options})
    trainer.fit(module, data)
    return watch
