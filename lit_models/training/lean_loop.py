"""What Lightning's loop does at every step though nothing comes of it, left out."""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer

from datamodules.core.planned import PlannedDataModule

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
TRANSFER_HOOKS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


def leave_out_idle_hooks(callbacks: Iterable[Callback]) -> None:
    """Let the loop pass over those hooks of a step that a callback does not have.

    It would call them and tell its profiler of each, sixty times in a step; what cannot be called
    it passes over.
    """
    for callback in callbacks:
        for name in STEP_HOOKS:
            if getattr(getattr(callback, name), "__func__", None) is getattr(Callback, name):
                setattr(callback, name, None)


def keep_step_arguments(trainer: Trainer) -> None:
    """Let the loop remember which arguments `training_step` takes.

    It would read the signature anew for every batch. The name is private; a test pins it.
    """
    loop = trainer.fit_loop.epoch_loop
    names = list(type(loop)._build_kwargs(loop, OrderedDict(), None, 0))
    loop._build_kwargs = partial(_named, names)  # type: ignore[method-assign]


def _named(names: list[str], kwargs: OrderedDict[str, Any], *values: Any) -> Any:
    kwargs.update(zip(names, values, strict=False))  # the number of the batch may not be wanted
    return kwargs


def pass_batches_on(trainer: Trainer, module: LightningModule) -> None:
    """Let batches that are made where they are needed, on the CPU, go straight to the step.

    Lightning would ask three times per batch whether the module or the datamodule prepares and
    moves it. The names are private; a test pins them.
    """
    passes = trainer.strategy.root_device.type == "cpu" and not _moves_batches(trainer, module)
    for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        vars(module).pop(name, None)  # of a trainer before
        if passes:
            setattr(module, name, _passed_on)


def _moves_batches(trainer: Trainer, module: LightningModule) -> bool:
    """Whether somebody has hooks of their own for what comes from a loader."""
    usual = (LightningModule, LightningDataModule, PlannedDataModule)
    known = {getattr(owner, name) for owner in usual for name in TRANSFER_HOOKS}
    owners = [module] if trainer.datamodule is None else [module, trainer.datamodule]
    hooks = [getattr(owner, name) for owner in owners for name in TRANSFER_HOOKS]
    return any(getattr(hook, "__func__", None) not in known for hook in hooks)


def _passed_on(batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
    return batch
