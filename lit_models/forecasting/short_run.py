"""The first steps of a run in real ranks on this machine, in a folder that is thrown away."""

import json
import math
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from datamodules.plan_cache import cached_plan
from lit_models.forecasting.probe import bare_trainer
from lit_models.forecasting.rehearsal import step_widths
from lit_models.training.local_ranks import run_ranks

WARM_UP = 3  # steps that build kernels and touch memory for the first time
LEAST_STEPS, MOST_STEPS = 5, 60  # that are timed
ENOUGH_S = 15.0  # of the steps that are timed
RANK = "lit_models.commands._short_run"  # the program of a rank: it builds what a config names
TIMEOUT_S = 120.0  # beside them, in which ranks wait for each other


@dataclass(frozen=True)
class Order:
    """What each rank runs.

    Args:
        model: as a run's config has it.
        data: likewise.
        trainer: of its values those that change a step; see `probe.trainer_options`.
        seed: of the run.
        devices: ranks, all on this machine.
        strategy: `ddp` or `fsdp`.
        steps: optimizer steps, `WARM_UP` included; at most those of one epoch.
        folder: of the run.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]
    seed: int
    devices: int
    strategy: str
    steps: int = 0
    folder: str = ""


def num_steps(step_s: float, steps_per_epoch: int) -> int:
    """Return how many steps a short run takes, `WARM_UP` included; 0 where an epoch has too few.

    Args:
        step_s: expected seconds of one.
        steps_per_epoch: of the run.
    """
    timed = min(max(math.ceil(ENOUGH_S / step_s), LEAST_STEPS), MOST_STEPS)
    steps = min(WARM_UP + timed, steps_per_epoch)
    return steps if steps >= WARM_UP + LEAST_STEPS else 0


def measured_s(order: Order, expected_s: float, threads: int) -> float:
    """Return the mean seconds of a step of an epoch, all that a run has in one included.

    Args:
        order: with its steps, without a folder.
        expected_s: of a step; a run that takes ten times as long is given up.
        threads: of each rank on a CPU.

    Raises:
        RuntimeError: a rank failed, or did not end.
    """
    timeout_s = TIMEOUT_S + 10 * expected_s * order.steps
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "order.json"
        path.write_text(json.dumps(asdict(order) | {"folder": folder}), "utf-8")
        command = ["-m", RANK, str(path)]
        environ = {"OMP_NUM_THREADS": str(threads)}
        try:
            statuses, printed = run_ranks(
                order.devices, command, timeout_s, True, environ, Path(folder)
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{order.steps} steps did not end in {timeout_s:.0f} s") from error
        if any(statuses):
            raise RuntimeError(_failure(statuses, Path(folder)))
    return float(json.loads(printed.splitlines()[-1])["seconds"])


def _failure(statuses: list[int], folder: Path) -> str:
    """Return why ranks failed: the last two lines of the first one that said anything."""
    for rank, status in enumerate(statuses):
        lines = (folder / f"rank-{rank}.err").read_text("utf-8").strip().splitlines()
        if status > 0 and lines:
            return f"rank {rank} ended with {status}: {' '.join(lines[-2:]).rstrip('.')}"
    return f"ranks ended with {statuses}, where -9 is often too little memory"


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


def train(order: Order, module: LightningModule, data: Any) -> float:
    """Train as one rank of those that were started, and return the mean seconds of a step.

    Args:
        order: what `measured_s` has written.
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
    return watch.seconds * _width_ratio(data, order.steps)


def _width_ratio(data: Any, steps: int) -> float:
    """Return how much wider the steps of an epoch are than those that were timed."""
    lengths = data.datasets["train"].lengths
    widths = step_widths(cached_plan(data.request("train"), lengths, 0), lengths)
    return float(widths.mean() / widths[WARM_UP:steps].mean())
