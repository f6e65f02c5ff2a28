"""What Throughput costs per step: one network with and without it, in turns.

pytest -m benchmark tests/benchmarks/test_throughput_overhead.py -s
"""

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from rich.console import Console
from rich.table import Table

from lit_models.training.callbacks import Throughput, default_callbacks
from tests.benchmarks.test_training_overhead import BATCH, Clock, Ours, RowsData

WARM_UP, STEPS, ROUNDS = 20, 600, 8
WIDTH, NUM_LAYERS = 16, 1  # small: what the callback adds does not depend on the network
MOST_S = 30e-6
STEP_S, MOST_SHARE = 0.1, 0.005


def step_seconds(folder: Path, is_measured: bool) -> float:
    """Return the median seconds of a step of one run."""
    seed_everything(0, verbose=False)
    callbacks = [c for c in default_callbacks() if is_measured or not isinstance(c, Throughput)]
    clock = Clock()
    options: dict[str, Any] = {"accelerator": "cpu", "limit_val_batches": 0, "logger": False}
    trainer = Trainer(
        **options,
        max_steps=WARM_UP + STEPS,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
        callbacks=[*callbacks, clock],
    )
    trainer.fit(Ours(WIDTH, NUM_LAYERS), RowsData(global_batch_size=BATCH))
    return statistics.median(np.diff(clock.ends[WARM_UP:]))


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore:.*have no `validation_step`")
def test_cost_of_throughput_per_step(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    times: dict[bool, list[float]] = {False: [], True: []}
    for number in range(ROUNDS):  # in turns, so that both meet the same machine
        for is_measured in (number % 2 == 0, number % 2 == 1):
            folder = tmp_path / f"{is_measured}-{number}"
            times[is_measured].append(step_seconds(folder, is_measured))
    more = statistics.median(np.subtract(times[True], times[False]))
    table = Table("without, us", "with, us", "more, us", f"of a {STEP_S * 1e3:.0f} ms step")
    without, measured = (statistics.median(times[key]) * 1e6 for key in (False, True))
    table.add_row(f"{without:.0f}", f"{measured:.0f}", f"{more * 1e6:.1f}", f"{more / STEP_S:.4%}")
    Console().print(table)
    assert more < MOST_S
    assert more / STEP_S < MOST_SHARE
