"""Seconds and bytes of a run that follow from its rehearsal: arithmetic alone.

The card says how the constants were chosen, and how far predictions are from measurements.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lit_models.forecasting.exchange import ring_share
from lit_models.forecasting.probe import Forecast, World
from lit_models.forecasting.rehearsal import num_cpus, threads_of_rank
from lit_models.training.memory import (
    GIB,
    gathered_bytes,
    gradient_bytes,
    optimizer_bytes,
    parameter_bytes,
)

if TYPE_CHECKING:
    from lit_models.forecasting.short_run import ShortRun

MIB = 2**20
# Of the training loop itself, logs and ledger included; tests/benchmarks/test_training_overhead.py.
LOOP_S = 0.0015
# What fsdp takes on a CPU for each byte that it has whole at a time: buffers of gathering and of
# summing, copies of both, and the gaps that they leave in the heap.
GATHERED_ON_CPU = 4.5
# How much longer ranks on shared CPUs take than the rehearsal says, each at its own moment: all
# wait for the one that a step holds up, and their caches hold less for each.
WAITING_ON_CPU = 1.1
FIT_BYTES = 8 * MIB  # what `fit` has in a CPU process beyond a rehearsal: loggers, checkpoints


def step_s(
    forecast: Forecast, world: World, is_sharded: bool, bandwidth_gib_s: float | None
) -> float | None:
    """Return the predicted seconds of an optimizer step; none without a rehearsal.

    Where a short run in real ranks was made it is that run's; on more devices than this machine
    has, what `computed_s` says times what it was wrong by on the nearest number that was run. With
    a bandwidth it is `computed_s` alone: the network is another one than here.

    Args:
        forecast: of all worlds.
        world: one of them.
        is_sharded: fsdp, else ddp.
        bandwidth_gib_s: of each device; none takes what was measured here.
    """
    computed = computed_s(forecast, world, is_sharded, bandwidth_gib_s)
    if computed is None or bandwidth_gib_s is not None:
        return computed
    nearest = _nearest_run(forecast, world, is_sharded)
    if nearest is None:
        return computed
    known, run = nearest
    there = computed_s(forecast, known, is_sharded, None)
    assert there is not None
    return computed * run.step_s / there


def computed_s(
    forecast: Forecast, world: World, is_sharded: bool, bandwidth_gib_s: float | None
) -> float | None:
    """Return what arithmetic makes of the rehearsal of one device; args as those of `step_s`."""
    if world.rehearsed is None:
        return None
    alone = world.rehearsed.step_s + LOOP_S
    apart = exchange_s(forecast, world, is_sharded, bandwidth_gib_s)
    return alone * slowdown(forecast, world.num_devices) + apart


def slowdown(forecast: Forecast, num_devices: int) -> float:
    """Return how many times longer a step takes where processes share the CPUs of one machine."""
    if not forecast.on_cpu or num_devices == 1:
        return 1.0
    count = _nearest(forecast.exchanges, num_devices)
    alike = WAITING_ON_CPU * _crowded(num_devices)
    return alike if count is None else alike * forecast.exchanges[count].slowdown / _crowded(count)


def _crowded(num_devices: int) -> float:
    """Return how many threads of such ranks wait for each CPU."""
    return max(1.0, num_devices * threads_of_rank(num_devices) / num_cpus())


def exchange_s(
    forecast: Forecast, world: World, is_sharded: bool, bandwidth_gib_s: float | None
) -> float:
    """Return the seconds in which gradients, and under fsdp weights, go between devices.

    Args as those of `step_s`.
    """
    size, count = forecast.size, world.num_devices
    if count == 1:
        return 0.0
    times = world.accumulate_grad_batches
    if bandwidth_gib_s is None:
        nearest = _nearest(forecast.exchanges, count)
        if nearest is None:
            return 0.0
        measured = forecast.exchanges[nearest]
        passes = ring_share(count) / ring_share(nearest)
        return passes * (times * measured.sharded_s if is_sharded else measured.sum_s)
    sent = ring_share(count) * gradient_bytes(size)
    if is_sharded:
        # Weights are gathered for the forward and for the backward pass of each micro-batch, and
        # gradients summed into shards: each is half of an all-reduce.
        gathered = 2 * parameter_bytes(size) + gradient_bytes(size)
        sent = ring_share(count) / 2 * times * gathered
    return sent / GIB / bandwidth_gib_s


def efficiency(
    forecast: Forecast, world: World, is_sharded: bool, bandwidth_gib_s: float | None
) -> float | None:
    """Return the share of a step that is computing: compute / (compute + exchange).

    Compute is what one device takes for its part of the step with a machine to itself; exchange
    counts in full, so that the share is the least where some of it hides behind the backward pass.
    None for one device, without a rehearsal or without a bandwidth.

    Args as those of `step_s`.
    """
    is_known = bandwidth_gib_s is not None or measured_gib_s(forecast, world.num_devices)
    if world.num_devices == 1 or world.rehearsed is None or not is_known:
        return None
    compute_s = world.rehearsed.step_s + LOOP_S
    return compute_s / (compute_s + exchange_s(forecast, world, is_sharded, bandwidth_gib_s))


def measured_gib_s(forecast: Forecast, num_devices: int) -> float | None:
    """Return the bandwidth of an all-reduce between ranks on this machine; none unmeasured."""
    count = _nearest(forecast.exchanges, num_devices)
    if count is None or not forecast.exchanges[count].sum_s:
        return None
    return ring_share(count) * gradient_bytes(forecast.size) / GIB / forecast.exchanges[count].sum_s


def memory_parts(forecast: Forecast, world: World, is_sharded: bool) -> dict[str, int]:
    """Return name -> predicted bytes of each device; their sum is the most at a time.

    On a GPU it is what tensors hold. On a CPU it is the resident memory of the process, libraries
    and data included, once it was rehearsed. Where a short run held more than arithmetic says, here
    or on the nearest number of devices that was run, the difference is a part of its own: a whole
    run holds at least what its first steps do. On a CPU whose system does not tell what the program
    takes there is no such part: the difference would be the program.
    """
    parts = computed_parts(forecast, world, is_sharded)
    nearest = _nearest_run(forecast, world, is_sharded)
    if nearest is None:
        return parts
    known, run = nearest
    of_run = computed_parts(forecast, known, is_sharded)
    if "program" in of_run or not forecast.on_cpu:
        # A short run is no more of a `fit` than a rehearsal is.
        held = run.peak_bytes + (FIT_BYTES if forecast.on_cpu else 0)
        parts["ranks"] = max(0, held - sum(of_run.values()))
    return parts


def computed_parts(forecast: Forecast, world: World, is_sharded: bool) -> dict[str, int]:
    """Return what arithmetic makes of the rehearsal of one device; see `memory_parts`."""
    size, count, rehearsed = forecast.size, world.num_devices, world.rehearsed
    share = count if is_sharded else 1
    parts = {
        "weights": math.ceil(parameter_bytes(size) / share),
        "gradients": math.ceil(gradient_bytes(size) / share),
        "optimizer": math.ceil(optimizer_bytes(size) / share),
    }
    if count > 1 and is_sharded:
        copies = GATHERED_ON_CPU if forecast.on_cpu else 1
        parts["gathered"] = math.ceil(copies * gathered_bytes(size))
    elif count > 1:
        parts["buckets"] = gradient_bytes(size)
    if rehearsed is None:
        return parts
    parts["activations"] = max(0, rehearsed.activation_bytes - rehearsed.logit_bytes)
    parts["logits"] = min(rehearsed.logit_bytes, rehearsed.activation_bytes)
    if rehearsed.program_bytes is not None:
        parts["program"] = rehearsed.program_bytes + FIT_BYTES
    return parts


def memory_bytes(forecast: Forecast, world: World, is_sharded: bool) -> int:
    """Return the predicted memory of each device."""
    return sum(memory_parts(forecast, world, is_sharded).values())


def checkpoint_bytes(forecast: Forecast) -> int:
    """Return the size of a whole checkpoint: weights and moments."""
    return parameter_bytes(forecast.size) + optimizer_bytes(forecast.size)


def _nearest_run(
    forecast: Forecast, world: World, is_sharded: bool
) -> "tuple[World, ShortRun] | None":
    """Return the short run under this strategy on the nearest number of devices, and its world;
    none for one device, which is rehearsed as it is."""
    strategy = "fsdp" if is_sharded else "ddp"
    runs = {count: run for (count, name), run in forecast.short_runs.items() if name == strategy}
    count = _nearest(runs, world.num_devices)
    if world.num_devices == 1 or count is None:
        return None
    return next(known for known in forecast.worlds if known.num_devices == count), runs[count]


def _nearest(measured: Mapping[int, object], num_devices: int) -> int | None:
    """Return the measured number of devices that is nearest below, or else the smallest."""
    counts = sorted(measured)
    below = [count for count in counts if count <= num_devices]
    return below[-1] if below else counts[0] if counts else None
