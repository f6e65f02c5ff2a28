"""Show steps, rates, memory and time on several device counts."""

import gc
import json as json_format
import logging
import math
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from lit_models.errors import RUN, UsageError, say

if TYPE_CHECKING:
    from lit_models.forecasting.orders import Order
    from lit_models.forecasting.probe import Forecast


def plan(
    run_options: list[str] | None = None,
    devices: str = "1,2,4,8",
    rehearse: bool = False,
    bandwidth_gib_s: float | None = None,
    time_limit_h: float | None = None,
    json: bool = False,
) -> int:
    """Show what a run will be on several numbers of devices; nothing is left behind.

    Args:
        run_options: those of `unisono fit`, such as --config and --model.optimizer.lr=0.1; the data
            are prepared in the cache as for a training.
        devices: numbers of devices over all machines, such as 1,2,4,8.
        rehearse: for each number of devices, start a process that computes some batches, for
            seconds and activations; then train some steps in real ranks, in a folder that is
            thrown away, for the numbers that this machine has processes or GPUs for.
        bandwidth_gib_s: of the network between devices, as `unisono doctor --collectives` says;
            without it, what a rehearsal measured between processes of this machine.
        time_limit_h: of one job of a cluster, to count how many the run takes.
        json: print plain JSON for scripts.

    Returns:
        Exit status: 1 where a rehearsal was asked for and none ended, for want of memory.

    Raises:
        UsageError: a number cannot be meant, or the devices are no replicas.
        SystemExit: a rehearsal failed, and its process has said why.
    """
    counts = numbers(devices)
    _refuse_not_positive(bandwidth_gib_s=bandwidth_gib_s, time_limit_h=time_limit_h)
    order = _order(run_options or [])
    found = _forecast(order, counts)
    if rehearse:
        _rehearse(found, order)
        if bandwidth_gib_s is None:
            _measure_exchanges(found)
            _run_shortly(found, order)
    _show(found, (bandwidth_gib_s, time_limit_h), json)
    return RUN if rehearse and all(world.rehearsed is None for world in found.worlds) else 0


def _order(run_options: list[str]) -> "Order":
    """Return what is rehearsed and run shortly, on one device until another number is said.

    Raises:
        UsageError: devices of the run are no replicas.
    """
    from lit_models.commands._run_config import parsed
    from lit_models.forecasting.orders import Order
    from lit_models.forecasting.probe import trainer_options

    config = parsed(run_options)
    trainer, seed = config.get("trainer") or {}, config.get("seed_everything")
    strategy = trainer.get("strategy")
    options = (strategy.get("init_args") or {}) if isinstance(strategy, dict) else {}
    size = options.get("tensor_parallel_size") or 1
    if size > 1:
        raise UsageError(
            f"trainer.strategy.tensor_parallel_size is {size}, but `unisono plan` takes every "
            "device for a replica: steps and memory would be wrong. Leave it out, and let "
            "--devices be numbers of tensor groups: the steps are those of a run on "
            f"{size} times as many devices."
        )
    # The seed 1 equals True, which stands for no number.
    seed = 0 if seed is True else int(seed or 0)
    return Order(config["model"], config["data"], trainer_options(trainer), seed)


def _forecast(order: "Order", counts: list[int]) -> "Forecast":
    """Return the worlds without a rehearsal; what the network took of a GPU is given back."""
    import torch
    from lightning.pytorch import seed_everything

    from lit_models.commands._run_config import built
    from lit_models.forecasting.probe import Probe, forecast
    from lit_models.launch import silence_noise

    silence_noise()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    seed_everything(order.seed, verbose=False)
    module, datamodule = built({"model": order.model, "data": order.data})
    found = forecast(module, datamodule, order.trainer, Probe(counts, rehearses=False))
    del module, datamodule
    gc.collect()  # trainer and module know each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return found


def _rehearse(found: "Forecast", order: "Order") -> None:
    """Rehearse each number of devices, in a process of its own: none counts what another left.

    What they warn of is said once. A number that memory does not suffice for is left out.

    Raises:
        SystemExit: the run itself is at fault; its process has said what, with its status.
    """
    from lit_models.forecasting import isolated
    from lit_models.forecasting.orders import RanksFailed

    told: set[str] = set()
    for index, world in enumerate(found.worlds):
        count = world.num_devices
        try:
            rehearsed, said = isolated.rehearsed(replace(order, devices=count))
        except RanksFailed as error:
            if not error.lacks_memory:
                print(error.report, end="", file=sys.stderr, flush=True)
                raise SystemExit(error.status) from error
            found.unrehearsed[count] = str(error)
        else:
            found.worlds[index] = replace(world, rehearsed=rehearsed)
            for line in said.splitlines():
                if line not in told:
                    say(line)
                told.add(line)


def _measure_exchanges(found: "Forecast") -> None:
    """Start as many ranks as this machine has room for, for each number of devices it has."""
    from lit_models.forecasting import exchange
    from lit_models.forecasting.rehearsal import local_devices, threads_of_rank

    most = local_devices(found.on_cpu)
    for count in {world.num_devices for world in found.worlds if 1 < world.num_devices <= most}:
        found.exchanges[count] = exchange.measured(count, found.state, threads_of_rank(count))


def _run_shortly(found: "Forecast", order: "Order") -> None:
    """Train some steps in real ranks, on each number of devices that was measured."""
    from lit_models.forecasting import prediction, short_run
    from lit_models.forecasting.rehearsal import threads_of_rank
    from lit_models.forecasting.table import STRATEGIES

    for world in [world for world in found.worlds if world.rehearsed is not None]:
        count = world.num_devices
        if count not in found.exchanges:
            continue
        for strategy, is_sharded in STRATEGIES.items():
            expected = prediction.computed_s(found, world, is_sharded, None)
            assert expected is not None
            steps = short_run.num_steps(expected, world.steps_per_epoch)
            if not steps:
                found.untried[count, strategy] = f"an epoch has {world.steps_per_epoch} steps"
                continue
            ordered = replace(order, devices=count, strategy=strategy, steps=steps)
            try:
                found.short_runs[count, strategy] = short_run.measured(
                    ordered, expected, threads_of_rank(count)
                )
            except RuntimeError as error:
                found.untried[count, strategy] = str(error)


def _show(found: "Forecast", facts: tuple[float | None, float | None], as_json: bool) -> None:
    from rich.console import Console

    from lit_models.forecasting import table

    rows = table.rows(found, *facts)
    if as_json:
        for line in table.refusals(found):
            say(f"left out: {line}")
        for line in table.failures(found):
            say(line)
        print(json_format.dumps(rows, indent=1))
    else:
        table.show(found, rows, Console(highlight=False))


def numbers(devices: str) -> list[int]:
    """Returns the numbers of devices.

    Raises:
        UsageError: one is no whole number above 0.
    """
    parts = [part.strip() for part in str(devices).strip("[]").split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"--devices must be numbers such as 1,2,4,8, got {devices}.")
    return [int(part) for part in parts]


def _refuse_not_positive(**given: float | None) -> None:
    """Refuse a speed or a time that is not above 0; none is not given."""
    for name, value in given.items():
        if value is not None and not 0 < value < math.inf:
            raise UsageError(f"--{name} must be above 0, got {value:g}; leave it out if unknown.")
