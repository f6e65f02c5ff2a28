"""The table of `unisono plan`: one column per number of devices."""

import math
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from lit_models.forecasting.prediction import (
    checkpoint_bytes,
    efficiency,
    measured_gib_s,
    memory_bytes,
    memory_parts,
    step_s,
)
from lit_models.forecasting.probe import Forecast, World
from lit_models.training.memory import GIB

SMALL_GLOBAL_BATCH = 256
MOST_COLUMNS = 5  # of one table
FRAME = 3  # characters of a column beside its text
STATE = ("weights", "gradients", "optimizer", "buckets", "gathered")
PARTS = (*STATE, "activations", "logits", "program", "ranks")
STRATEGIES = {"ddp": False, "fsdp": True}


def rows(
    forecast: Forecast, bandwidth_gib_s: float | None = None, time_limit_h: float | None = None
) -> dict[str, list[Any]]:
    """Return label -> value per number of devices, as plain numbers; None where unknown.

    Args:
        forecast: of all worlds.
        bandwidth_gib_s: of each device; none takes what was measured here.
        time_limit_h: of one job; none counts no jobs.
    """
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
        **_memory(forecast),
        "GiB, checkpoint": lambda w: checkpoint_bytes(forecast) / GIB,
        **_durations(forecast, bandwidth_gib_s, time_limit_h),
    }
    found = {name: [value(world) for world in forecast.worlds] for name, value in columns.items()}
    return {name: values for name, values in found.items() if any(v is not None for v in values)}


def _memory(forecast: Forecast) -> dict[str, Callable[[World], Any]]:
    """Return the columns of memory: the sum under each strategy, and its parts below."""

    def whole(is_sharded: bool) -> Callable[[World], float | None]:
        def value(world: World) -> float | None:
            if world.num_devices in forecast.unrehearsed:
                return None  # the parts that are known are not all
            return memory_bytes(forecast, world, is_sharded) / GIB

        return value

    def of_part(name: str, is_sharded: bool) -> Callable[[World], float | None]:
        def value(world: World) -> float | None:
            part = memory_parts(forecast, world, is_sharded).get(name)
            return None if not part else part / GIB

        return value

    columns: dict[str, Callable[[World], Any]] = {}
    for strategy, is_sharded in STRATEGIES.items():
        columns[f"GiB, {strategy}"] = whole(is_sharded)
        for name in PARTS:
            columns[f"GiB, {strategy}: {name}"] = of_part(name, is_sharded)
    return columns


def _durations(
    forecast: Forecast, bandwidth_gib_s: float | None, time_limit_h: float | None
) -> dict[str, Callable[[World], Any]]:
    """Return the columns that follow from the seconds of a step under ddp, and those of fsdp."""

    def seconds(world: World, is_sharded: bool = False) -> float | None:
        return step_s(forecast, world, is_sharded, bandwidth_gib_s)

    def in_all(world: World, steps: int | None, unit: float) -> float | None:
        of_step = seconds(world)
        return None if of_step is None or steps is None else of_step * steps / unit

    def jobs(world: World) -> int | None:
        whole = in_all(world, world.total_steps, 1)
        if whole is None or time_limit_h is None:
            return None
        return max(1, math.ceil(whole / (time_limit_h * 3600)))

    def bandwidth(world: World) -> float | None:
        if world.num_devices == 1:
            return None
        return bandwidth_gib_s or measured_gib_s(forecast, world.num_devices)

    return {
        "GiB/s between devices": bandwidth,
        "s per step": seconds,
        "s per step, fsdp": lambda w: seconds(w, True),
        "efficiency": lambda w: efficiency(forecast, w, False, bandwidth_gib_s),
        "efficiency, fsdp": lambda w: efficiency(forecast, w, True, bandwidth_gib_s),
        "min per epoch": lambda w: in_all(w, w.steps_per_epoch, 60),
        "h in all": lambda w: in_all(w, w.total_steps, 3600),
        "jobs": jobs,
    }


def show(forecast: Forecast, found: dict[str, list[Any]], console: Console) -> None:
    """Print tables of some device counts each, and below them what they cannot say themselves."""
    columns = [[_shown(value) for value in column] for column in zip(*found.values(), strict=True)]
    labels = [_label(name) for name in found]
    for begin, end in _parts(labels, columns, console.width):
        table = Table()
        for index, column in enumerate([labels, *columns[begin:end]]):
            justify: Literal["left", "right"] = "right" if index else "left"
            table.add_column(column[0], justify=justify, no_wrap=True)
        for cells in list(zip(labels, *columns[begin:end], strict=True))[1:]:
            table.add_row(*cells)
        console.print(table)
    size = forecast.size
    console.print(
        f"{forecast.num_samples:,} samples; {size.num_parameters:,} weights, "
        f"{size.num_trained:,} of them trained; a checkpoint takes "
        f"{_shown(checkpoint_bytes(forecast) / GIB)} GiB.",
        soft_wrap=True,
    )
    for line in notes(forecast, found):
        console.print(line, soft_wrap=True)


def _label(name: str) -> str:
    _, _, part = name.partition(": ")
    return f"  {part}" if part else name


def _parts(labels: list[str], columns: list[list[str]], width: int) -> list[tuple[int, int]]:
    """Return the first column of each table and the one behind its last: as many as fit beside
    the labels, at least one and never more than `MOST_COLUMNS`."""
    label_width, *widths = (max(map(len, cells)) for cells in [labels, *columns])
    parts, begin, taken = [], 0, 0
    for index, of_column in enumerate(widths):
        whole = label_width + taken + of_column + FRAME * (2 + index - begin) + 1
        if index > begin and (index - begin == MOST_COLUMNS or whole > width):
            parts.append((begin, index))
            begin, taken = index, 0
        taken += of_column
    return [*parts, (begin, len(columns))]


def notes(forecast: Forecast, found: dict[str, list[Any]]) -> list[str]:
    """Return what a reader of the table should know.

    Args:
        forecast: of all worlds.
        found: the table's rows.
    """
    worlds = forecast.worlds
    lines = [f"Left out: {line}" for line in refusals(forecast)]
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
    return [*lines, *_gaps(forecast, found)]


def refusals(forecast: Forecast) -> list[str]:
    """Return a line for each number of devices on which a run would be refused."""
    return [f"{count} devices. {why}" for count, why in sorted(forecast.refused.items())]


def failures(forecast: Forecast) -> list[str]:
    """Return a line for each rehearsal and each short run that there is not, with its reason."""
    rehearsals = [
        f"No seconds and no activations for devices={count}, the rehearsal did not end: {why}."
        for count, why in forecast.unrehearsed.items()
    ]
    return rehearsals + [
        f"{count} devices under {strategy} were not run here, their seconds are computed: {why}."
        for (count, strategy), why in forecast.untried.items()
    ]


def _gaps(forecast: Forecast, found: dict[str, list[Any]]) -> list[str]:
    """Return what the numbers leave out, and how it would be had."""
    is_rehearsed = any(world.rehearsed is not None for world in forecast.worlds)
    if not is_rehearsed and not forecast.unrehearsed:
        return ["No seconds and no activations: --rehearse computes and times some batches."]
    lines = failures(forecast)
    programs = [w.rehearsed.program_bytes for w in forecast.worlds if w.rehearsed is not None]
    if any(program is not None for program in programs):
        lines.append(
            "Memory is that of a process: libraries and data included, as topology.json has it."
        )
    several = [world.num_devices for world in forecast.worlds if world.num_devices > 1]
    if several and "GiB/s between devices" not in found:
        return [*lines, "No time is counted between devices: give --bandwidth_gib_s, as `unisono "
                "doctor --collectives` measures it."]  # fmt: skip
    unseen = [str(count) for count in several if count not in forecast.exchanges]
    if unseen and forecast.exchanges:
        lines.append(
            f"What {', '.join(unseen)} devices cost each other follows from "
            f"{max(forecast.exchanges)} processes on this machine; --bandwidth_gib_s tells the "
            "speed of a network."
        )
    return lines


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if value < 0.1 else f"{value:,.2f}"
