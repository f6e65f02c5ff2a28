"""What every rank was doing: said once when a rank fails, written down when one hangs."""

import contextlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from lit_models.training.strategies import ManagedProcesses
from lit_models.training.watch import (
    PHASE,
    STACKS,
    SlowPhase,
    Watch,
    check_limits,
    check_slow_phases,
)

FAILURE = "failure.json"
SHOWN_IDS = 20
# What gloo and nccl say on the ranks that are left when another one is gone.
LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Connection refused",
    "NCCL",
    "Socket Timeout",
    "wait timeout",
)
WAIT_FOR_CAUSE_S = 3.0


class FailureReport(Callback):
    """Names rank, step and samples of the first failure, and ends ranks that hang.

    A rank that fails writes `failure.json` and adds a note to its error; the others, which lose the
    connection, keep silent about theirs. With several processes a rank that makes no progress for
    `timeout_s` writes its stack to `stacks/rank-N.txt` and ends.

    Two clocks run. This one looks at what a rank itself does, and may have another limit for each
    slow phase. The process group's, `trainer.strategy.timeout`, is one number for all that ranks
    do together: after it a rank ends that waits for a slow one. So a run with slow phases has the
    longest of them as the group's timeout, and the ordinary limit as `timeout_s` here. Preparing
    data, the time before the first batch and the merge of predictions have no limit: no rank waits
    for them in a collective of the group, or they come after the last one.

    Args:
        timeout_s: none takes that of the strategy's process group.
        slow_phases_s: phase -> its own, longer limit: `checkpoint`, from the beginning of a save
            to the next batch; `evaluation_end`, from the last batch of a validation or a test to
            the next batch.

    Raises:
        ValueError: timeout_s is not positive, or a phase has another name.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        slow_phases_s: dict[SlowPhase, float] | None = None,
    ) -> None:
        if timeout_s is not None and timeout_s <= 0:
            raise ValueError(
                f"timeout_s must be above 0, got {timeout_s}; leave it out to take the strategy's."
            )
        self.timeout_s, self.slow_phases_s = timeout_s, slow_phases_s or {}
        check_slow_phases(self.slow_phases_s)
        self._place: dict[str, Any] = {}
        self._batch: Any = None
        self._watch: Watch | None = None
        self._timeout_s: float | None = None  # of this call; None where nobody waits for this rank

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._place, self._batch = {"rank": trainer.global_rank, "verb": stage}, None
        self._timeout_s = None
        if trainer.world_size > 1:
            timeout = getattr(trainer.strategy, "timeout", None)
            group_s = timeout.total_seconds() if timeout else None
            self._timeout_s = self.timeout_s or group_s
            if self._timeout_s:
                check_limits(self._timeout_s, self.slow_phases_s, group_s)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take away what an earlier attempt left in the folder, which is chosen by now."""
        if trainer.is_global_zero:
            (Path(trainer.default_root_dir) / FAILURE).unlink(missing_ok=True)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._enter(trainer, batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._beat()

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._enter(trainer, batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._begin("checkpoint")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("evaluation_end")

    on_test_epoch_end = on_validation_epoch_end

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merging may take rank 0 any time, and no rank waits for it: nothing hangs from here."""
        self._end_watch()

    on_train_end = on_predict_end

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Say what failed where, on the rank that failed first."""
        ended = "it was killed, or it hangs"
        if isinstance(trainer.strategy, ManagedProcesses):
            ended = trainer.strategy.ended_children() or ended
            trainer.strategy.unwatch_children()
        self._end_watch()
        if not isinstance(exception, Exception):
            return
        run = Path(trainer.default_root_dir)
        exception.__dict__.setdefault("run_folder", str(run))  # for its traceback
        if is_echo(exception) and wait_for_cause(run):
            exception.__dict__["is_echo"] = True
            return
        if not self._batch:
            return
        report = {**self._place, "sample_ids": real_ids([self._batch])}
        report["error"] = f"{type(exception).__name__}: {exception}"
        is_lost = exception.__dict__["is_lost"] = is_echo(exception)
        exception.add_note(told(report, run, ended if is_lost else None))
        if not is_lost:
            write_once(run / FAILURE, report)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_watch()

    def _enter(self, trainer: Trainer, batch: Any) -> None:
        is_training = trainer.training  # looked up once: it compares texts
        verb = "fit" if is_training else str(trainer.state.stage)
        step = trainer.global_step + is_training
        self._place |= {"verb": verb, "epoch": trainer.current_epoch, "step": step}
        self._batch = batch
        if self._watch is None and self._timeout_s:
            run, rank = Path(trainer.default_root_dir), trainer.global_rank
            self._watch = Watch(run, rank, self._timeout_s, self.slow_phases_s)
        self._beat()

    def _beat(self) -> None:
        if self._watch is not None:
            self._watch.beat = (time.monotonic(), dict(self._place))

    def _begin(self, phase: SlowPhase) -> None:
        """Enter a slow phase, which lasts until the next sign of life."""
        if self._watch is not None:
            self._watch.beat = (time.monotonic(), {**self._place, PHASE: phase})

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.is_over.set()
            self._watch = None


def is_echo(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in LOST)


def wait_for_cause(run: Path) -> bool:
    """Return whether another rank has written why it failed, after waiting a little for it."""
    end = time.monotonic() + WAIT_FOR_CAUSE_S
    while not (run / FAILURE).exists() and time.monotonic() < end:
        time.sleep(0.1)
    return (run / FAILURE).exists()


def told(report: dict[str, Any], run: Path, lost: str | None = None) -> str:
    """Return what the user reads beside the error.

    Args:
        report: the place.
        run: its folder.
        lost: what became of the other rank, where the error is that it does not answer.
    """
    ids = ", ".join(map(str, report["sample_ids"][:SHOWN_IDS]))
    ids += " …" if len(report["sample_ids"]) > SHOWN_IDS else ""
    where = f"rank {report['rank']}, {report['verb']}, epoch {report['epoch']}"
    where += f", step {report['step']}"
    if lost is not None:
        stacks = f" Stacks are in {run / STACKS}." if (run / STACKS).is_dir() else ""
        return (
            f"{where}: the connection to another rank is lost; {lost}.{stacks} What is saved is "
            "whole: --ckpt_path auto goes on."
        )
    again = f" `unisono replay {run} --step {report['step']}` rebuilds this step on one device."
    return f"{where}, samples {ids}.{again if report['verb'] == 'fit' else ''}"


def real_ids(batches: Iterable[Any]) -> list[int]:
    """Return the sample ids of planned batches, without fillers."""
    found: list[int] = []
    for batch in batches:
        if isinstance(batch, dict) and "sample_id" in batch:
            pairs = zip(batch["sample_id"].tolist(), batch["weight"].tolist(), strict=True)
            found += [i for i, weight in pairs if weight > 0]
    return found


def write_once(path: Path, report: dict[str, Any]) -> None:
    """Write a report unless another rank has written its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    with contextlib.suppress(FileExistsError):  # the first report stays
        os.link(temporary, path)
    temporary.unlink()
