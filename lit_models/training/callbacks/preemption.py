"""Signals end a run between two steps, on all ranks at the same one, with a checkpoint."""

import signal
import threading
import time
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_models.training.ledger import ledger_of

REQUEUE_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REPEATED_WITHIN_S = 1.0  # one Ctrl-C can arrive twice, from the terminal and from a launcher


class Preemption(Callback):
    """SIGTERM, SIGUSR1 and the first SIGINT set a flag that travels in the ledger's vector.

    All ranks read it at the same step, save and stop; no rank waits inside a signal handler, where
    Lightning broadcasts and saves, which hangs as soon as ranks are at different places. A second
    SIGINT ends at once. The ledger keeps the reason: the command's exit status comes from it. A run
    that has heard a signal, or was stopped by another rank's, ignores SIGUSR1 to the end of its
    process: a job's script repeats it, and its default would take the place of that status.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._received_at = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the signals over from Lightning, before the data is read."""
        if stage != "fit" or threading.current_thread() is not threading.main_thread():
            return
        silence_lightning(trainer)
        for signum in (*REQUEUE_SIGNALS, signal.SIGINT):
            self._before[signum] = signal.signal(signum, self._note)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ledger = ledger_of(trainer)
        if self.received is not None and ledger is not None:
            ledger.wants_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down why the run stopped."""
        ledger = ledger_of(trainer)
        if ledger is not None and ledger.is_stopping:
            reason = (self.received or signal.SIGTERM).name
            ledger.note({"event": "stopped", "reason": reason, "step": trainer.global_step})

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._give_back(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._give_back(trainer)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        is_repeated = time.monotonic() - self._received_at < REPEATED_WITHIN_S
        if signum == signal.SIGINT and self.received is signal.SIGINT and not is_repeated:
            self._give_back()
            raise KeyboardInterrupt
        if self.received is None:
            rank_zero_warn(
                f"{signal.Signals(signum).name}: the run saves and stops after this step"
                + ("; once more ends it at once" if signum == signal.SIGINT else "")
            )
        self.received, self._received_at = signal.Signals(signum), time.monotonic()

    def _give_back(self, trainer: Trainer | None = None) -> None:
        ledger = ledger_of(trainer) if trainer else None
        if self._before and (self.received or (ledger is not None and ledger.is_stopping)):
            self._before[signal.SIGUSR1] = signal.SIG_IGN
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}


def silence_lightning(trainer: Trainer) -> None:
    """Switch off Lightning's own handling: a broadcast and a wait in every micro-batch, another
    broadcast inside its handler. The names are private; a test pins them.
    """
    trainer._signal_connector.register_signal_handlers = lambda: None
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
