"""Steps of a whole run; progress and callbacks of one that goes on from a checkpoint."""

import math
from typing import Any

from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.callbacks.early_stopping import EarlyStoppingReason
from lightning.pytorch.utilities import rank_zero_info

REFUSED: dict[Any, str] = {
    callbacks.GradientAccumulationScheduler: "would put more samples in a step than the plan "
    "counts. A step has data.global_batch_size samples; data.micro_batch_size cuts it in parts.",
    (callbacks.StochasticWeightAveraging, callbacks.WeightAveraging): "copies the module before "
    "its network is built: it would average nothing, and save checkpoints without weights. Use "
    "lit_models.training.AveragedWeights.",
}


def check_trainer(trainer: Trainer) -> None:
    """Refuse, with a ValueError, what would train something else unseen, or let ranks wait."""
    if not hasattr(trainer, "val_check_interval"):  # which Lightning keeps no time in
        raise ValueError(
            "trainer.val_check_interval is a time, and each rank has a clock of its own; give "
            "optimizer steps, or a share of an epoch."
        )
    if trainer.check_val_every_n_epoch == 0:
        raise ValueError(
            "trainer.check_val_every_n_epoch is 0, and must be 1 or more; null lets "
            "trainer.val_check_interval count steps over epochs, and trainer.limit_val_batches=0 "
            "leaves validation out."
        )
    for callback in trainer.callbacks:
        for kind, why in REFUSED.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} {why}")


def settle_progress(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Write the counters anew by which Lightning goes on; calling it twice changes nothing.

    A run stands after some steps of an epoch, which the datamodule keeps, and in one of the phases
    that the ledger keeps: after a `step`, after the `validation` of it, or after the hooks of the
    end of its `epoch`. All counters follow from that. Lightning's own count micro-batches of one
    rank, leave out a validation that was cut off, and take an epoch for over before those hooks
    are called, and where `max_steps` ends a run in the middle of one.
    """
    data = trainer.datamodule
    if not (position := checkpoint.get(type(data).__qualname__)):
        return
    steps, done, phase = position["step"], checkpoint["global_step"], checkpoint["ledger"]["phase"]
    is_due = phase == "step" and is_validated(trainer, position["epoch"], steps, done)
    is_whole = phase == "epoch" and steps >= data.steps_per_epoch

    def counted(begun: int, done: int) -> dict[str, int]:
        return {"ready": begun, "started": begun, "processed": done, "completed": done}

    loop = checkpoint["loops"]["fit_loop"]
    begun = loop["epoch_progress"]["current"]["started"]  # a start of the next one begins again
    epochs = counted(begun, max(0, begun - (not is_whole)))
    loop["epoch_progress"] = {"total": epochs, "current": epochs}
    validated = counted(int(is_due), 0)
    loop["epoch_loop.val_loop.batch_progress"] |= {"total": validated, "current": validated}
    in_all = done * trainer.accumulate_grad_batches
    in_epoch = 0 if is_whole else steps * trainer.accumulate_grad_batches
    # By what has started Lightning knows where it stopped: in a validation, or before a batch.
    total = counted(in_all, in_all) | {"started": in_all - (not is_due)}
    current = counted(in_epoch, in_epoch)
    loop["epoch_loop.batch_progress"] = {"total": total, "current": current, "is_last_batch": False}
    # Rows of metrics have this number; it counts the step itself where an epoch goes on.
    is_last = is_whole and done == budgeted_steps(trainer)  # as before its test
    is_last = is_last or done == trainer.max_steps
    goes_on = not is_last and (not is_whole or trainer.max_steps != -1)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = done - goes_on


def settle_stops(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Let a run that EarlyStopping has ended be at its end, unless it is more patient by now;
    Lightning neither saves that it ended nor lets today's patience win."""
    for callback in trainer.early_stopping_callbacks:
        if (state := checkpoint["callbacks"].get(callback.state_key)) is None:
            continue
        reason = EarlyStoppingReason(state["stopping_reason"])
        is_over = reason != EarlyStoppingReason.NOT_STOPPED
        if reason == EarlyStoppingReason.PATIENCE_EXHAUSTED:
            is_over = state["wait_count"] >= callback.patience
        state["patience"] = callback.patience
        if is_over:
            rank_zero_info(
                f"EarlyStopping has ended this run by {callback.monitor}, in epoch "
                f"{state['stopped_epoch']}: more patience, or a run without it, goes on."
            )
        trainer.should_stop = trainer.should_stop or is_over


def is_validated(trainer: Trainer, epoch: int, steps: int, done: int) -> bool:
    """Return whether the trainer validates after so many steps of an epoch, and so many in all."""
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if not trainer.enable_validation or steps == 0 or (every and (epoch + 1) % every):
        return False
    is_int = isinstance(interval, int)  # then in micro-batches
    per_epoch, parts = trainer.datamodule.steps_per_epoch, trainer.accumulate_grad_batches
    return (steps if every else done) % (interval // parts if is_int else per_epoch) == 0


def budgeted_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole run, `None` where the trainer sets no end."""
    per_epoch = getattr(trainer.datamodule, "steps_per_epoch", None)
    if per_epoch is None:  # of data without a plan, while they are trained on
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    by_epochs = (trainer.max_epochs or -1) * per_epoch
    return min((n for n in (trainer.max_steps, by_epochs) if n > 0), default=None)
