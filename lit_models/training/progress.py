"""Optimizer steps of a whole run, and the progress of a run that resumes from a checkpoint."""

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
    """Raise ValueError for options that would silently train something else, or make ranks hang."""
    if not hasattr(trainer, "val_check_interval"):  # Lightning does not set it for a time
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
    for stops in trainer.early_stopping_callbacks:
        if stops.strict:
            check_monitor(trainer, type(stops).__name__, stops.monitor)


def check_monitor(trainer: Trainer, name: str, monitor: str) -> None:
    """Raise ValueError if something follows a metric of the validation in a run that has none."""
    if trainer.checkpoint_callbacks and monitor.startswith("val") and not trainer.enable_validation:
        raise ValueError(
            f"{name} follows {monitor}, but this run has no validation: leave {name} out, or "
            "trainer.limit_val_batches=0."
        )


def settle_progress(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Rewrite the counters from which Lightning resumes; calling it twice changes nothing.

    The position of a run is the number of steps in its epoch, which the datamodule stores, and a
    phase, which the ledger stores: after a `step`, after its `validation`, or after the hooks at
    the end of its `epoch`. All counters follow from these. Lightning's own count micro-batches of
    one rank, skip a validation that was cut off, and take an epoch as over before these hooks have
    run, and also where `max_steps` ends a run in the middle of an epoch.
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
    begun = loop["epoch_progress"]["current"]["started"]  # a next one, only `ready`, starts anew
    epochs = counted(begun, max(0, begun - (not is_whole)))
    loop["epoch_progress"] = {"total": epochs, "current": epochs}
    validated = counted(int(is_due), 0)
    loop["epoch_loop.val_loop.batch_progress"] |= {"total": validated, "current": validated}
    in_all = done * trainer.accumulate_grad_batches
    in_epoch = 0 if is_whole else steps * trainer.accumulate_grad_batches
    # From `started` Lightning infers where the run stopped: in a validation, or before a batch.
    total = counted(in_all, in_all) | {"started": in_all - (not is_due)}
    current = counted(in_epoch, in_epoch)
    loop["epoch_loop.batch_progress"] = {"total": total, "current": current, "is_last_batch": False}
    # The step number of logged metrics, to which Lightning adds 1 where an epoch goes on.
    is_last = done == trainer.max_steps or (is_whole and done == budgeted_steps(trainer))
    goes_on = not is_last and (not is_whole or trainer.max_steps != -1)
    loop["epoch_loop.state_dict"]["_batches_that_stepped"] = done - goes_on


def settle_stops(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Do not continue a run that EarlyStopping has ended, unless its patience is larger now;
    Lightning does not save that it ended, and restores the checkpoint's patience."""
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
                f"{state['stopped_epoch']}: to continue, raise its patience or leave it out."
            )
        trainer.should_stop = trainer.should_stop or is_over


def is_validated(trainer: Trainer, epoch: int, steps: int, done: int) -> bool:
    """Return whether the trainer validates after `steps` steps of an epoch, `done` of the run."""
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_interval
    if not trainer.enable_validation or steps == 0 or (every and (epoch + 1) % every):
        return False
    per_epoch, parts = trainer.datamodule.steps_per_epoch, trainer.accumulate_grad_batches
    is_int = isinstance(interval, int)  # counts micro-batches
    interval = interval // parts if is_int else max(1, int(interval * per_epoch))
    return (steps if every else done) % interval == 0


def budgeted_steps(trainer: Trainer) -> int | None:
    """Return the optimizer steps of the whole run, `None` if the trainer sets no end."""
    per_epoch = getattr(trainer.datamodule, "steps_per_epoch", None)
    if per_epoch is None:  # for data without a plan, during `fit`
        per_epoch = math.ceil(trainer.num_training_batches / trainer.accumulate_grad_batches)
    by_epochs = (trainer.max_epochs or -1) * per_epoch
    return min((n for n in (trainer.max_steps, by_epochs) if n > 0), default=None)
