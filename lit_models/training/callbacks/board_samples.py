"""What callbacks share that write texts to TensorBoard while a model learns."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn


class BoardSamples(Callback):
    """Calls `sample` every few optimizer steps, where a TensorBoardLogger takes what it writes.

    Args:
        every_n_steps: optimizer steps between samples.

    Raises:
        ValueError: an interval below 1; at the start of training, no logger that takes text.
    """

    def __init__(self, every_n_steps: int) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        self.every_n_steps = every_n_steps
        self._seen_step = 0

    @property
    def needs_board(self) -> bool:
        """Whether there is nowhere else to write."""
        return True

    @abstractmethod
    def sample(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Write to `boards(trainer)` on rank 0; every rank calls it, which may be a collective."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step = trainer.global_step
        name = type(self).__name__
        if self.needs_board and not (trainer.fast_dev_run or boards(trainer)):
            raise ValueError(
                f"{name} has nowhere to write: the trainer has no TensorBoardLogger. Give it one, "
                f"or leave {name} out."
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._seen_step:
            return  # in the middle of an accumulation
        self._seen_step = step
        if step % self.every_n_steps == 0 and boards(trainer):
            self.sample(trainer, pl_module, step)


def boards(trainer: Trainer) -> list[TensorBoardLogger]:
    """Return the loggers that take text."""
    return [logger for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put a module into eval mode, and each of its parts back into its own mode."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode
