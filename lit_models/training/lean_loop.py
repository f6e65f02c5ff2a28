"""What Lightning's loop does at every step though nothing comes of it, left out."""

from collections import OrderedDict
from collections.abc import Iterable
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

STEP_HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
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
