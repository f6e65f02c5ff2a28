"""A run whose world changes, seen from its ledger, beside an undisturbed run."""

import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from lit_models.commands.verify import verify_run
from lit_models.run_files import LEDGER, json_lines
from tests.distributed.launch import PATIENCE_S, finished
from tests.distributed.test_matrix import weights


class Patient(Callback):
    """Each step takes 50 ms until a file ends that, so that no world ends before it is seen."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if not (Path(trainer.default_root_dir) / "over").exists():
            time.sleep(0.05)


def wait_for_world(folder: Path, size: int, attempt: int) -> None:
    """Wait until an attempt in a world of this size has made 20 steps."""
    end = time.monotonic() + PATIENCE_S
    while True:
        lines = json_lines(folder / LEDGER)
        starts = [line for line in lines if "resumed_from_step" in line]
        steps = [line for line in lines if line["attempt"] == len(starts) and "digest" in line]
        sizes = [line["world_size"] for line in starts]
        if len(starts) >= attempt and sizes[-1] == size and len(steps) >= 20:
            return
        assert time.monotonic() < end, f"no world of {size} in time; there were {sizes}"
        time.sleep(0.1)


def assert_undisturbed(elastic: Path, whole: Path, started: tuple[Any, str]) -> None:
    """Wait for a run's end; compare its proof and weights with those of another run."""
    statuses, outputs = finished(started)
    assert statuses == [0], outputs
    assert verify_run(elastic).findings == verify_run(whole).findings
    torch.testing.assert_close(weights(elastic), weights(whole), rtol=1e-8, atol=1e-8)
