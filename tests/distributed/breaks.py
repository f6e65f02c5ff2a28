"""Callbacks that slow a run down, or really break something in it."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

from lightning.pytorch import Callback


class SignalledAt(Callback):
    """Sends a signal to one rank while the others are elsewhere: rank 0 is slower."""

    def __init__(self, step: int, signal_name: str, rank: int) -> None:
        self.step, self.signum, self.rank = step, signal.Signals[signal_name], rank

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_rank == 0:
            time.sleep(0.02)
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)


class FailsAt(Callback):
    """Makes the last rank fail, hang, be killed, be stopped, or lose a loader worker.

    SIGKILL arrives as from a cluster: no handler runs, and the other ranks must notice.
    """

    def __init__(self, step: int, how: str) -> None:
        self.step, self.how = step, how

    def on_train_batch_end(self, trainer, *_):
        is_mine = trainer.global_rank == trainer.world_size - 1
        if trainer.global_step == self.step and is_mine:
            if self.how == "raise":
                raise LookupError("a word that no dictionary has")
            if self.how == "lose a worker":
                multiprocessing.active_children()[0].kill()
            elif self.how != "hang":
                os.kill(os.getpid(), {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}[self.how])
            self.hang_for_ever()

    def hang_for_ever(self):
        while True:
            time.sleep(1)


class Slow(Callback):
    """Makes each step slow, until the run has been stopped once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_start(self, trainer, *_) -> None:
        ledger = Path(trainer.default_root_dir) / "ledger.jsonl"
        if ledger.exists() and '"stopped"' in ledger.read_text():
            self.seconds = 0.0

    def on_train_batch_end(self, *_) -> None:
        time.sleep(self.seconds)
