"""What Throughput costs per step: one run, with and without it in turns of a few steps.

pytest -m benchmark tests/benchmarks/test_throughput_overhead.py -s

Judged by the processor's time of the least disturbed steps: on a shared machine the wall clock of
a step is that of its neighbours. The medians over all steps stand beside it.
"""

import time
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer

from datamodules.core import loader
from lit_models.training.callbacks import Throughput, default_callbacks
from tests.benchmarks.figures import Aim, Figures
from tests.benchmarks.test_training_overhead import BATCH, Ours, RowsData

WIDTH, NUM_LAYERS = 16, 1  # small: what the callback adds does not depend on the network
TURN, TURNS = 20, 300  # steps, turns of which every second one has the callback
LEAST_DISTURBED = 5  # percent of the steps
STEP_S, MOST_SHARE = 0.1, 0.005


def no_load(*_: Any) -> dict[str, int]:
    """Count nothing; batches are made some steps ahead, so that those of the next turn may lack
    their counts."""
    return {"samples": 0, "tokens": 0, "positions": 0}


class Turns(Callback):
    """Takes Throughput out of the run and puts it back, and notes how long each step took."""

    def __init__(self) -> None:
        self.seconds: list[list[np.ndarray]] = [[], []]  # [steps, 2] of turns without, with it
        self._ends: list[tuple[float, float]] = []

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._all, self._profiler = trainer.callbacks, trainer.profiler
        self._few = [c for c in trainer.callbacks if not isinstance(c, Throughput)]
        self._load_of = loader.load_of

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._ends.append((time.perf_counter(), time.process_time()))
        if len(self._ends) <= TURN:
            return
        has_it = trainer.callbacks is self._all
        self.seconds[has_it].append(np.diff(self._ends, axis=0)[1:])  # the first one is colder
        self._turn(trainer, not has_it)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._turn(trainer, True)

    def _turn(self, trainer: Trainer, has_it: bool) -> None:
        trainer.callbacks = self._all if has_it else self._few
        trainer.profiler = self._profiler if has_it else self._profiler.chosen
        loader.load_of = self._load_of if has_it else no_load
        self._ends = []


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_cost_of_throughput_per_step(tmp_path: Any, figures: Figures) -> None:
    torch.set_num_threads(1)
    turns = Turns()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=(TURN + 1) * TURNS,
        max_epochs=-1,
        limit_val_batches=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
        callbacks=[*default_callbacks(), turns],
    )
    trainer.fit(Ours(WIDTH, NUM_LAYERS), RowsData(global_batch_size=BATCH))
    without, measured = (np.concatenate(part[2:]) for part in turns.seconds)
    for percent, steps in ((50, "median step"), (LEAST_DISTURBED, "least disturbed steps")):
        for column, clock in enumerate(("wall clock", "processor")):
            with_it, without_it = (
                1e6 * float(np.percentile(part[:, column], percent)) for part in (measured, without)
            )
            figures.add(
                *("shared", f"a step with Throughput, {clock}, {steps}", "us", [with_it]),
                *("without it", [without_it], Aim(MOST_SHARE * STEP_S * 1e6, of="more")),
            )
