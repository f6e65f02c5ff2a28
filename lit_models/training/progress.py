"""Steps of a whole run; progress, schedules and callbacks of one that goes on from a checkpoint."""

import math
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities import rank_zero_info

AVERAGES = (
    "copies the module before its network is built: it would average nothing, and save checkpoints "
    "without weights. Use lit_models.training.AveragedWeights."
)
REFUSED: dict[type, str] = {
    GradientAccumulationScheduler: "would put more samples in a step than the plan counts. A step "
    "has data.global_batch_size samples; data.micro_batch_size cuts it in parts.",
    StochasticWeightAveraging: AVERAGES,
    WeightAveraging: AVERAGES,
}


def check_callbacks(trainer: Trainer) -> None:
    """Refuse, with a ValueError, callbacks of Lightning that would train something else unseen."""
    for callback in trainer.callbacks:
        for kind, why in REFUSED.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} {why}")


def settle_progress(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Rewrite Lightning's progress, which counts micro-batches, to today's accumulation, and
    say whether the epoch and its validation are over; calling it twice changes nothing.

    Lightning counts an epoch as processed before it calls the hooks of its end, and where
    `max_steps` ends a run in the middle of one: resumed, such an epoch was counted twice, or a
    part of it taken for the whole. A validation that a kill or a stop cut off was left out.
    """
    # Lightning restores the datamodule after the model: its state is read where it lies.
    datamodule = trainer.datamodule
    position = checkpoint.get(type(datamodule).__qualname__)
    if not position:
        return
    loop, steps = checkpoint["loops"]["fit_loop"], position["step"]
    epochs, batches = loop["epoch_progress"], loop["epoch_loop.batch_progress"]
    judged = loop["epoch_loop.val_loop.batch_progress"]
    before = position["epoch"] * datamodule.steps_per_epoch
    # A checkpoint of `on_train_batch_end`, of which these are behind, or of a validation.
    is_cut = any(
        progress["current"][done] < progress["current"][begun]
        for progress, done, begun in (
            (batches, "completed", "processed"),
            (judged, "processed", "started"),
        )
    )
    is_due = is_cut and is_validated(trainer, position["epoch"], steps)
    # Only then have the hooks of its end been called.
    is_over = epochs["current"]["processed"] >= epochs["current"]["started"]
    is_whole = steps >= datamodule.steps_per_epoch and is_over and not is_due
    for counters in (epochs["current"], epochs["total"]):
        counters["ready"] = counters["started"]  # a saved start of the next one begins again
        done = max(0, counters["started"] - (not is_whole))
        counters["processed"] = counters["completed"] = done
    in_epoch = 0 if is_whole else steps
    for counters, done in ((batches["current"], in_epoch), (batches["total"], before + steps)):
        counters |= dict.fromkeys(counters, done * trainer.accumulate_grad_batches)
    batches["is_last_batch"] = False
    # By what is ahead Lightning knows where it stopped: in a validation, or before a batch.
    for counters in (judged["current"], judged["total"]):
        counters |= dict.fromkeys(counters, 0)
        counters |= dict.fromkeys(("ready", "started"), int(is_due))
    batches["total"]["started"] -= not is_due
    # Rows of metrics have this number; it counts the step itself where an epoch goes on.
    is_last = is_whole and before + steps == budgeted_steps(trainer)  # as before its test
    is_last = is_last or before + steps == trainer.max_steps
    goes_on = not is_last and (not is_whole or trainer.max_steps != -1)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = before + steps - goes_on


def settle_stops(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let a run that EarlyStopping has ended be at its end, unless it is more patient by now;
    Lightning neither saves that it ended nor lets today's patience win."""
    for callback in trainer.early_stopping_callbacks:
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state is None:
            continue
        is_over = state["stopped_epoch"] > 0  # by a threshold, or a metric that is not finite
        if state["wait_count"] >= state["patience"]:
            is_over = state["wait_count"] >= callback.patience
        state["patience"] = callback.patience
        if is_over:
            rank_zero_info(
                f"EarlyStopping has ended this run by {callback.monitor}, in epoch "
                f"{state['stopped_epoch']}: more patience, or a run without it, goes on."
            )
        trainer.should_stop = trainer.should_stop or is_over


def settle_schedules(trainer: Trainer) -> None:
    """Let schedules have the frequency of optimizer steps, which Lightning counts in parts."""
    for config in trainer.lr_scheduler_configs:
        if config.interval == "step":
            config.frequency *= trainer.accumulate_grad_batches


def is_validated(trainer: Trainer, epoch: int, steps: int) -> bool:
    """Return whether the trainer validates after so many steps of an epoch."""
    per_epoch = trainer.datamodule.steps_per_epoch
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if not trainer.enable_validation or steps == 0 or (every and (epoch + 1) % every):
        return False
    at = steps if every else epoch * per_epoch + steps
    is_int = isinstance(interval, int)  # then in micro-batches
    return at % (interval // trainer.accumulate_grad_batches if is_int else per_epoch) == 0


def budgeted_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole run, `None` where the trainer sets no end."""
    per_epoch = getattr(trainer.datamodule, "steps_per_epoch", None)
    if per_epoch is None:  # of data without a plan, while they are trained on
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    by_epochs = (trainer.max_epochs or -1) * per_epoch
    return min((n for n in (trainer.max_steps, by_epochs) if n > 0), default=None)
