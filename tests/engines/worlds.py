"""A run whose world changes, seen from its ledger, beside one that nobody disturbed."""

import time
from pathlib import Path
from typing import Any

import torch

from lit_models.commands.verify import verify_run
from tests.distributed.chaos import steps_of
from tests.distributed.launch import finished
from tests.distributed.test_matrix import weights

LIMIT_S = 120.0  # until something is seen
RUN = (
    *("-m", "lit_models", "fit", "--config=occupation_coder/debug.yaml"),
    *("--trainer.precision=64-true", "--trainer.limit_train_batches=600"),
    *("--trainer.limit_val_batches=0", "--trainer.strategy=ddp"),
)


def wait_for_world(folder: Path, size: int, attempt: int) -> None:
    """Wait until an attempt in a world of this size has made 20 steps."""
    end = time.monotonic() + LIMIT_S
    while True:
        lines = steps_of(folder)
        starts = [line for line in lines if "resumed_from_step" in line]
        steps = [line for line in lines if line["attempt"] == len(starts) and "digest" in line]
        sizes = [line["world_size"] for line in starts]
        if len(starts) >= attempt and sizes[-1] == size and len(steps) >= 20:
            return
        assert time.monotonic() < end, f"no world of {size} in time; there were {sizes}"
        time.sleep(0.1)


def assert_undisturbed(elastic: Path, whole: Path, started: tuple[Any, str]) -> None:
    """Compare proof and weights of a run with those of another, once that has ended."""
    statuses, outputs = finished(started)
    assert statuses == [0], outputs
    assert verify_run(elastic).findings == verify_run(whole).findings
    torch.testing.assert_close(weights(elastic), weights(whole), rtol=1e-8, atol=1e-8)
