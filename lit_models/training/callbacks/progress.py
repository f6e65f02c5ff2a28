"""Progress with loss, rows per second and time left: one line, or one per interval in a log."""

import sys
import time
from datetime import timedelta
from typing import Any, TextIO

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar

from lit_models.training.ledger import Ledger


class ProgressLine(ProgressBar):
    """Writes `epoch 1/3  step 40/939  loss 2.31  812 rows/s  0:01:42 left`.

    A metric is read only when a line is written, so that a GPU is not made to wait each step.

    Args:
        interval_s: seconds between lines where the output is no terminal.
        terminal_interval_s: seconds between updates of the line on a terminal.
        stream: where to write; standard output where None.
    """

    def __init__(
        self,
        interval_s: float = 10.0,
        terminal_interval_s: float = 0.5,
        stream: TextIO | None = None,
    ) -> None:
        super().__init__()
        self.interval_s = interval_s
        self.terminal_interval_s = terminal_interval_s
        self._stream = stream
        self._is_enabled = True
        self._begin = self._last = 0.0
        self._first_step = 0
        self._batches = 0
        self._width = 0
        self._validated = ""

    def disable(self) -> None:
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = self._last = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._is_due():
            self._write(self.train_line(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(self.train_line(trainer), is_last=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._last = self._last or time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the newest figure of the monitored metric."""
        name = getattr(pl_module, "monitor", "val/loss")
        if name in trainer.callback_metrics and not trainer.sanity_checking:
            self._validated = f"{name} {float(trainer.callback_metrics[name]):.4g}"

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._evaluated("validation", sum_of(trainer.num_val_batches))

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._evaluated("test", sum_of(trainer.num_test_batches))

    def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._evaluated("predict", sum_of(trainer.num_predict_batches))

    def train_line(self, trainer: Trainer) -> str:
        """Returns the line as it is now."""
        step, total = trainer.global_step, total_steps(trainer)
        seconds = max(time.monotonic() - self._begin, 1e-9)
        done = step - self._first_step
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        steps = f"/{total}" if total else ""
        # Not `current_epoch`, which Lightning counts up before training has ended.
        epoch = max(1, trainer.fit_loop.epoch_progress.current.started)
        parts = [f"epoch {epoch}{epochs}", f"step {step}{steps}"]
        loss = latest_loss(trainer)
        if loss is not None:
            parts.append(f"loss {float(loss):.4g}")
        if self._validated:
            parts.append(self._validated)
        if done > 0:
            parts.append(f"{done * rows_per_step(trainer) / seconds:,.0f} rows/s")
        if done > 0 and total:
            left = timedelta(seconds=round((total - step) * seconds / done))
            took = timedelta(seconds=round(seconds))
            parts.append(f"{left} left" if step < total else f"took {took}")
        return "  ".join(parts)

    def _evaluated(self, what: str, total: float) -> None:
        self._batches += 1
        if self._is_due():
            self._write(f"{what} batch {self._batches}/{total:.0f}")

    def _is_due(self) -> bool:
        if not self._is_enabled:
            return False
        interval = self.terminal_interval_s if self._out.isatty() else self.interval_s
        return time.monotonic() - self._last >= interval

    @property
    def _out(self) -> TextIO:
        # Not kept: a spawned process inherits this object, but not the stream.
        return self._stream or sys.stdout

    def _write(self, line: str, is_last: bool = False) -> None:
        if not self._is_enabled:
            return
        self._last = time.monotonic()
        if self._out.isatty():
            self._out.write("\r" + line.ljust(self._width) + ("\n" if is_last else ""))
            self._width = 0 if is_last else len(line)
        else:
            self._out.write(line + "\n")
        self._out.flush()

    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._is_enabled:
            print(*args, file=self._out, **kwargs)


def sum_of(batches: Any) -> float:
    """Returns the batches of all dataloaders together."""
    return float(sum(batches)) if isinstance(batches, list) else float(batches)


def latest_loss(trainer: Trainer) -> float | None:
    """Returns the loss of the whole last step, from the ledger, or what the module logged."""
    ledger = next((c for c in trainer.callbacks if isinstance(c, Ledger)), None)
    if ledger is not None and ledger.latest:
        return float(ledger.latest["loss"])
    logged = trainer.callback_metrics.get("train/loss")
    return None if logged is None else float(logged)


def rows_per_step(trainer: Trainer) -> int:
    """Returns the rows that one optimizer step learns from, over all devices; 1 if unknown."""
    batching = getattr(getattr(trainer, "datamodule", None), "batching", None)
    return int(getattr(batching, "global_batch_size", 1))


def total_steps(trainer: Trainer) -> int | None:
    """Returns the optimizer steps of the whole run, or None where it has no known end."""
    limits = [trainer.max_steps] if (trainer.max_steps or -1) > 0 else []
    batches = trainer.num_training_batches
    if (trainer.max_epochs or -1) > 0 and batches != float("inf"):
        steps = -(-int(batches) // trainer.accumulate_grad_batches)
        limits.append(steps * int(trainer.max_epochs or 0))
    return min(limits) if limits else None
