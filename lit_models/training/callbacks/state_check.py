"""Compares the size of a network with the memory of a device, where `auto` did not know it."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_models.training.memory import GIB, STATE_SHARE, replicated_bytes, sharded_bytes
from lit_models.training.state_size import size_of


class StateCheck(Callback):
    """Refuses ddp before the first step where the state cannot fit, and names what would.

    Args:
        memory_bytes: of each device.
    """

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = size_of(pl_module)
        if size is None:
            return
        needed = replicated_bytes(size, trainer.world_size)
        if needed <= STATE_SHARE * self.memory_bytes:
            return
        sharded = sharded_bytes(size, trainer.world_size)
        message = (
            f"weights, gradients and moments take {needed / GIB:.2f} GiB on each of "
            f"{trainer.world_size} devices under ddp, {self.memory_bytes / GIB:.2f} GiB are there, "
            f"and activations come on top; --trainer.strategy=fsdp takes {sharded / GIB:.2f} GiB"
        )
        if needed > self.memory_bytes:
            raise ValueError(f"{message}. Use it, or fewer moments, or more memory.")
        rank_zero_warn(f"{message}.")
