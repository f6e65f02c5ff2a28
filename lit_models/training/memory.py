"""What a run's state takes of each device, and the strategy that follows from it: arithmetic alone.

The state is what lives from step to step: weights, gradients, moments. Activations come on top;
`micro_batch_size: auto` measures them.
"""

import math
from dataclasses import dataclass

GIB = 2**30
# The state may fill so much of a device before sharding is worth its communication: the rest is
# for activations, without which no sample can be trained.
STATE_SHARE = 0.8


@dataclass(frozen=True)
class StateSize:
    """How much a network and its optimizer hold.

    Args:
        num_parameters: of the whole network.
        num_trained: of those, the ones with a gradient.
        gathered_parameters: most that fsdp has whole at a time in training: the largest block and
            what lies in no block.
        evaluated_parameters: most that fsdp has whole at a time in evaluation; 0 without any.
        bytes_per_parameter: 4 in float32; of what has a gradient where dtypes differ.
        moments_per_parameter: values of the optimizer beside each trained parameter: 2 for AdamW,
            0 for plain SGD.
        weight_bytes: of the whole network where dtypes differ, such as float32 adapters on a
            bfloat16 base; none where all have `bytes_per_parameter`.
    """

    num_parameters: int
    num_trained: int
    gathered_parameters: int
    evaluated_parameters: int = 0
    bytes_per_parameter: int = 4
    moments_per_parameter: float = 2.0
    weight_bytes: int | None = None


@dataclass(frozen=True)
class Choice:
    """A strategy by its name, and the line that says why.

    Attributes:
        unchecked_bytes: memory of a device that the state is still to be compared with, since its
            size was not known; None where it was.
    """

    strategy: str
    line: str
    unchecked_bytes: int | None = None


def parameter_bytes(size: StateSize) -> int:
    """Return the bytes of all weights."""
    return _mean_bytes(size, size.num_parameters)


def gradient_bytes(size: StateSize) -> int:
    """Return the bytes of all gradients."""
    return size.num_trained * size.bytes_per_parameter


def optimizer_bytes(size: StateSize) -> int:
    """Return the bytes of all moments."""
    return math.ceil(size.num_trained * size.moments_per_parameter) * size.bytes_per_parameter


def state_bytes(size: StateSize) -> int:
    """Return the bytes of weights, gradients and moments, once."""
    return parameter_bytes(size) + gradient_bytes(size) + optimizer_bytes(size)


def gathered_bytes(size: StateSize) -> int:
    """Return what fsdp has whole at a time: weights and gradients of the largest block and of what
    lies in none, or in evaluation the weights that it gathers for a step."""
    evaluated = _mean_bytes(size, size.evaluated_parameters)
    if size.num_trained == 0:
        return evaluated
    weights = _mean_bytes(size, min(size.gathered_parameters, size.num_parameters))
    gradients = min(size.gathered_parameters, size.num_trained) * size.bytes_per_parameter
    return max(weights + gradients, evaluated)


def replicated_bytes(size: StateSize, num_devices: int) -> int:
    """Return the state on each device where each has all of it; ddp keeps a second copy of the
    gradients, in the buckets that it sends."""
    buckets = gradient_bytes(size) if num_devices > 1 else 0
    return state_bytes(size) + buckets


def sharded_bytes(size: StateSize, num_devices: int) -> int:
    """Return the state on each device under fsdp: its share, and what is whole at a time."""
    return math.ceil(state_bytes(size) / num_devices) + gathered_bytes(size)


def _mean_bytes(size: StateSize, count: int) -> int:
    """Return the bytes of so many weights, of a mean size where dtypes differ."""
    if size.weight_bytes is None:
        return count * size.bytes_per_parameter
    return math.ceil(count * size.weight_bytes / size.num_parameters)


def activation_bytes(bytes_per_position: float, num_rows: int, num_positions: int) -> int:
    """Return what the backward pass of one micro-batch keeps.

    Args:
        bytes_per_position: measured, or estimated from the network.
        num_rows: samples of the micro-batch.
        num_positions: of its longest sample.
    """
    return math.ceil(bytes_per_position * num_rows * num_positions)


def choose_strategy(size: StateSize | None, num_devices: int, memory_bytes: int) -> Choice:
    """Return the strategy for several devices: ddp where the state fits on each, else fsdp.

    Args:
        size: of the state; None where it is not known before the data is read.
        num_devices: over all machines, at least 2.
        memory_bytes: of each device.

    Raises:
        ValueError: the state fits on the devices under no strategy.
    """
    there = f"{memory_bytes / GIB:.1f} GiB there"
    if size is None:
        line = (
            f"strategy ddp: the number of weights is known once the data is read, and compared "
            f"then with the memory of each of {num_devices} devices, {there}"
        )
        return Choice("ddp", line, unchecked_bytes=memory_bytes)
    replicated, sharded = replicated_bytes(size, num_devices), sharded_bytes(size, num_devices)
    if replicated <= STATE_SHARE * memory_bytes or replicated <= min(sharded, memory_bytes):
        name, needed, why = "ddp", replicated, ""
    elif sharded <= memory_bytes:
        name, needed = "fsdp", sharded
        why = f", where ddp would hold {replicated / GIB:.2f} GiB"
    else:
        raise ValueError(_too_large(size, num_devices, memory_bytes))
    what = f"{needed / GIB:.2f} GiB of weights, gradients and moments on each of {num_devices}"
    return Choice(name, f"strategy {name}: {what} devices{why}, {there}")


def fitting_devices(size: StateSize, memory_bytes: int) -> int | None:
    """Return the fewest devices on which the state fits under fsdp; None where no number does."""
    left = memory_bytes - gathered_bytes(size)
    return max(1, math.ceil(state_bytes(size) / left)) if left > 0 else None


def _too_large(size: StateSize, num_devices: int, memory_bytes: int) -> str:
    sharded, gathered = sharded_bytes(size, num_devices), gathered_bytes(size)
    share = sharded - gathered
    enough = fitting_devices(size, memory_bytes)
    more = f"{enough} devices, " if enough else ""
    return (
        f"trainer.strategy=auto: the state does not fit, not even under fsdp. Each of "
        f"{num_devices} devices would hold {sharded / GIB:.2f} GiB (its share of weights, "
        f"gradients and moments {share / GIB:.2f} GiB, gathered at a time {gathered / GIB:.2f} "
        f"GiB), {memory_bytes / GIB:.2f} GiB are there: {(sharded - memory_bytes) / GIB:.2f} GiB "
        f"are missing on each. Use {more}--trainer.precision=bf16-true, an optimizer with fewer "
        "moments, or devices with more memory."
    )
