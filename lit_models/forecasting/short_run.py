"""The first steps of a run in real ranks on this machine, in a folder that is thrown away."""

import math
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamodules.core.planned import cached_plan
from lit_models.forecasting.orders import Order, answer_of
from lit_models.forecasting.probe import bare_trainer
from lit_models.forecasting.rehearsal import step_widths
from lit_models.training.callbacks.rehearsal import largest_over_ranks
from lit_models.training.meters import most_bytes

WARM_UP = 3  # steps that build kernels and touch memory for the first time
LEAST_STEPS, MOST_STEPS = 5, 60  # that are timed
ENOUGH_S = 15.0  # of the steps that are timed
TIMEOUT_S = 120.0  # beside them, in which ranks wait for each other


@dataclass(frozen=True)
class ShortRun:
    """What real ranks took.

    Args:
        step_s: mean seconds of an optimizer step of an epoch, all that a run has in one included.
        peak_bytes: the most that the largest rank held: on a GPU by tensors, on a CPU resident.
    """

    step_s: float
    peak_bytes: int


def num_steps(step_s: float, steps_per_epoch: int) -> int:
    """Return how many steps a short run takes, `WARM_UP` included; 0 where an epoch has too few.

    Args:
        step_s: expected seconds of one.
        steps_per_epoch: of the run.
    """
    timed = min(max(math.ceil(ENOUGH_S / step_s), LEAST_STEPS), MOST_STEPS)
    steps = min(WARM_UP + timed, steps_per_epoch)
    return steps if steps >= WARM_UP + LEAST_STEPS else 0


def measured(order: Order, expected_s: float, threads: int) -> ShortRun:
    """Return what the first steps of a run took.

    Args:
        order: with a strategy and steps, without a folder.
        expected_s: of a step; a run that takes ten times as long is given up.
        threads: of each rank on a CPU.

    Raises:
        RuntimeError: a rank failed, or did not end.
    """
    timeout_s = TIMEOUT_S + 10 * expected_s * order.steps
    environ = {"OMP_NUM_THREADS": str(threads)}
    try:
        answer, _ = answer_of(order, order.devices, timeout_s, environ)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{order.steps} steps did not end in {timeout_s:.0f} s") from error
    return ShortRun(**answer)


class Stopwatch(Callback):
    """Notes when optimizer steps end; `seconds` is the mean of those after the first few."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.ends):
            self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> float:
        return (self.ends[-1] - self.ends[WARM_UP - 1]) / (len(self.ends) - WARM_UP)


def train(order: Order, module: LightningModule, data: Any) -> ShortRun:
    """Train as one rank of those that were started, and return what it took.

    Args:
        order: what `measured` was given.
        module: built from it.
        data: likewise.
    """
    from lit_models.training.callbacks import default_callbacks

    watch = Stopwatch()
    kept = [c for c in default_callbacks() if not isinstance(c, Checkpoint)]
    options = order.trainer | {"max_steps": order.steps}
    world = {"devices": order.devices, "strategy": order.strategy}
    trainer = bare_trainer(order.folder, [*kept, watch], **world, **options)
    trainer.fit(module, data)
    device = trainer.strategy.root_device
    peak = largest_over_ranks(most_bytes(device), device)
    return ShortRun(watch.seconds * _width_ratio(data, order.steps), int(peak))


def _width_ratio(data: Any, steps: int) -> float:
    """Return how much wider the steps of an epoch are than those that were timed."""
    lengths = data.datasets["train"].lengths
    widths = step_widths(cached_plan(data.request("train"), lengths, 0), lengths)
    return float(widths.mean() / widths[WARM_UP:steps].mean())
