"""The newest state of a run, by steps and by minutes, with the one before it kept."""

import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_models.training.background import BackgroundWriter, written_behind
from lit_models.training.ledger import ledger_of
from lit_models.training.sharded_checkpoint import put_in_place

FRESH = "next.ckpt"


class LastCheckpoint(Callback):
    """Saves `checkpoints/last.ckpt` at ends of optimizer steps; `previous.ckpt` is the one before.

    Lightning's ModelCheckpoint refuses steps and minutes together and lets `last` grow old when
    the monitored metric worsens. The clock is rank 0's, and all ranks learn of it by the ledger.

    Args:
        every_n_steps: optimizer steps between saves; none for no such rule.
        every_n_minutes: minutes between saves; none for no such rule.
        every_epoch: save at the end of each epoch too.
        asynchronous: take a copy of the state and let a thread write it while the training goes
            on; needs the memory for one more copy on the host of rank 0.

    Raises:
        ValueError: an interval that is not positive.
        OSError: at a step, a save or the end: the storage refused what was being written.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = 10.0,
        every_epoch: bool = True,
        asynchronous: bool = False,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("every_n_minutes", every_n_minutes)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; leave it out for none.")
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.every_epoch = every_epoch
        self.asynchronous = asynchronous
        self._writer = BackgroundWriter()
        self._seen_step = self._saved_step = -1
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen_step:
            return  # in the middle of an accumulation
        self._writer.check()
        self._seen_step = trainer.global_step
        ledger = ledger_of(trainer)
        by_steps = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if by_steps or (ledger is not None and ledger.save_now):
            self._save(trainer)
        if ledger is not None:
            ledger.save_now = False
            ledger.wants_save = ledger.wants_save or self._is_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger = ledger_of(trainer)
        is_left = ledger is not None and ledger.is_stopping and self._saved_step != self._seen_step
        if self.every_epoch or is_left:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that ends has its last checkpoint."""
        self.settle(trainer)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Let the thread end, without hiding why the run does."""
        try:
            self._writer.wait()
        except Exception as error:
            rank_zero_warn(str(error))

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._writer.wait()

    def settle(self, trainer: Trainer) -> None:
        """Return when all that was saved is on disk, on every rank; a collective.

        Raises:
            OSError: it could not be written.
        """
        self._writer.wait()
        if self.asynchronous:
            trainer.strategy.barrier("LastCheckpoint.settle")

    def _is_due(self, trainer: Trainer) -> bool:
        if self.every_n_minutes is None or not trainer.is_global_zero:
            return False
        waited = timedelta(seconds=time.monotonic() - self._saved_at)
        return waited >= timedelta(minutes=self.every_n_minutes)

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        self._writer.wait()
        folder = Path(trainer.default_root_dir) / "checkpoints"
        rotate = partial(_rotate, folder) if trainer.is_global_zero else _nothing
        # The old ones give way when the new one is whole: a full disk takes none of them.
        if self.asynchronous:
            with written_behind(trainer.strategy, self._writer, rotate):
                trainer.save_checkpoint(folder / FRESH, weights_only=False)
        else:
            trainer.save_checkpoint(folder / FRESH, weights_only=False)
            rotate()
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step


def settle_checkpoints(trainer: Trainer) -> None:
    """Wait until all that a run saved so far can be read, on every rank; a collective."""
    for callback in trainer.callbacks:
        if isinstance(callback, LastCheckpoint):
            callback.settle(trainer)


def _rotate(folder: Path) -> None:
    """Make the fresh checkpoint the last one, and that one the previous."""
    last = folder / "last.ckpt"
    if last.exists():
        put_in_place(last, folder / "previous.ckpt")
    put_in_place(folder / FRESH, last)


def _nothing() -> None:
    """What the ranks do that write nothing."""
