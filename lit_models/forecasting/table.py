"""The table of `unisono plan`: one column per number of devices."""

import math
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from lit_models.forecasting.probe import Forecast, World, processes_share_cores
from lit_models.training.memory import (
    GIB,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
    replicated_bytes,
    sharded_bytes,
)

SMALL_GLOBAL_BATCH = 256


def communication_s(forecast: Forecast, num_devices: int, bandwidth_gib_s: float | None) -> float:
    """Return the seconds of summing the gradients around a ring.

    Args:
        forecast: whose gradients are summed.
        num_devices: in the ring.
        bandwidth_gib_s: of each device; none counts nothing.
    """
    if bandwidth_gib_s is None or num_devices == 1:
        return 0.0
    share = 2 * (num_devices - 1) / num_devices
    return share * gradient_bytes(forecast.size) / GIB / bandwidth_gib_s


def step_s(
    forecast: Forecast, world: World, bandwidth_gib_s: float | None, accelerator: str
) -> float | None:
    """Return the predicted seconds of an optimizer step; none without a rehearsal."""
    if world.step_s is None:
        return None
    shared = processes_share_cores(world.num_devices, accelerator)
    return world.step_s * shared + communication_s(forecast, world.num_devices, bandwidth_gib_s)


def memory_bytes(forecast: Forecast, world: World, is_sharded: bool) -> int:
    """Return the predicted memory of each device, without that of the programs themselves."""
    state = sharded_bytes if is_sharded else replicated_bytes
    return state(forecast.size, world.num_devices) + (world.activation_bytes or 0)


def checkpoint_bytes(forecast: Forecast) -> int:
    """Return the size of a whole checkpoint: weights and moments."""
    return parameter_bytes(forecast.size) + optimizer_bytes(forecast.size)


def rows(
    forecast: Forecast,
    bandwidth_gib_s: float | None = None,
    time_limit_h: float | None = None,
    accelerator: str = "auto",
) -> dict[str, list[Any]]:
    """Return label -> value per number of devices, as plain numbers; None where unknown."""

    def seconds(world: World) -> float | None:
        return step_s(forecast, world, bandwidth_gib_s, accelerator)

    columns: dict[str, Callable[[World], Any]] = {
        "devices": lambda w: w.num_devices,
        "global batch": lambda w: w.global_batch_size,
        "batch per device": lambda w: w.micro_batch_size,
        "accumulation": lambda w: w.accumulate_grad_batches,
        "steps per epoch": lambda w: w.steps_per_epoch,
        "steps in all": lambda w: w.total_steps,
        "samples seen": lambda w: w.samples,
        "warm-up steps": lambda w: w.warmup_steps,
        "learning rate": lambda w: w.learning_rate,
        "GiB, ddp": lambda w: memory_bytes(forecast, w, False) / GIB,
        "GiB, fsdp": lambda w: memory_bytes(forecast, w, True) / GIB,
        **_durations(seconds, time_limit_h),
    }
    found = {name: [value(world) for world in forecast.worlds] for name, value in columns.items()}
    return {name: values for name, values in found.items() if any(v is not None for v in values)}


def _durations(
    seconds: Callable[[World], float | None], time_limit_h: float | None
) -> dict[str, Callable[[World], Any]]:
    """Return the columns that follow from the seconds of a step."""

    def in_all(world: World, steps: int | None, unit: float) -> float | None:
        of_step = seconds(world)
        return None if of_step is None or steps is None else of_step * steps / unit

    def jobs(world: World) -> int | None:
        whole = in_all(world, world.total_steps, 1)
        if whole is None or time_limit_h is None:
            return None
        return max(1, math.ceil(whole / (time_limit_h * 3600)))

    return {
        "s per step": seconds,
        "min per epoch": lambda w: in_all(w, w.steps_per_epoch, 60),
        "h in all": lambda w: in_all(w, w.total_steps, 3600),
        "jobs": jobs,
    }


def show(forecast: Forecast, found: dict[str, list[Any]], console: Console) -> None:
    """Print the table, and below it what it cannot say itself."""
    table = Table()
    for index, count in enumerate(found["devices"]):
        if index == 0:
            table.add_column("devices")
        table.add_column(str(count), justify="right")
    for name, values in found.items():
        if name != "devices":
            table.add_row(name, *map(_shown, values))
    console.print(table)
    size = forecast.size
    console.print(
        f"{forecast.num_samples:,} samples; {size.num_parameters:,} weights, "
        f"{size.num_trained:,} of them trained; a checkpoint takes "
        f"{checkpoint_bytes(forecast) / GIB:.2f} GiB.",
        soft_wrap=True,
    )
    for line in notes(forecast):
        console.print(line, soft_wrap=True)


def notes(forecast: Forecast) -> list[str]:
    """Return what a reader of the table should know."""
    worlds = forecast.worlds
    lines = []
    if len({world.global_batch_size for world in worlds}) > 1:
        lines.append(
            "The global batch grows with the devices (data.batch_size): these are different runs. "
            "data.global_batch_size makes them the same one."
        )
        if forecast.rule != "none" and worlds[-1].global_batch_size < SMALL_GLOBAL_BATCH:
            lines.append(
                f"Below a global batch of {SMALL_GLOBAL_BATCH}, try the original rate first "
                "(model.lr_scaling=none): scaling rules were found on larger ones."
            )
    if any(world.total_steps is None for world in worlds):
        lines.append("The run has no end: give trainer.max_epochs or trainer.max_steps.")
    if worlds[0].step_s is None:
        lines.append("No seconds and no activations: --rehearse computes and times some batches.")
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if value < 0.1 else f"{value:,.2f}"
