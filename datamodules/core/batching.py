"""How one global batch is spread over replicas and accumulated micro-batches."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Batching:
    """How one global batch is spread over replicas and accumulated micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    accumulate_grad_batches: int


@dataclass(frozen=True)
class Rehearsed:
    """What a rehearsal found for `micro_batch_size: auto`.

    Args:
        micro_batch_size: the largest that fits on every device.
        peak_gib: memory that it took, on the device where it took the largest share.
        memory_gib: what one device has for it.
    """

    micro_batch_size: int
    peak_gib: float
    memory_gib: float


def smaller_shares(num_replicas: int, global_batch_size: int) -> list[int]:
    """Return the micro-batches that `auto` may choose: a device's share halved again and again,
    ascending from 1 to the whole share."""
    sizes = [math.ceil(global_batch_size / num_replicas)]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes[::-1]


def derive_batching(
    num_replicas: int,
    global_batch_size: int,
    micro_batch_size: int | Literal["auto"] = "auto",
    batch_size: int | None = None,
    accumulate_grad_batches: int = 1,
) -> Batching:
    """Return the batching that the given values determine.

    Args:
        num_replicas: data-parallel replicas.
        global_batch_size: samples of one optimizer step, over all replicas.
        micro_batch_size: samples of one forward call on one replica; `auto` is the whole share,
            which a rehearsal replaces by what fits.
        batch_size: the conventional size per device; given, the global batch grows with devices.
        accumulate_grad_batches: the trainer's; above 1 it is kept and the micro-batch follows.

    Raises:
        ValueError: a size below 1, or values that contradict each other.
    """
    _check_sizes(
        global_batch_size=global_batch_size,
        micro_batch_size=1 if micro_batch_size == "auto" else micro_batch_size,
        batch_size=1 if batch_size is None else batch_size,
        accumulate_grad_batches=accumulate_grad_batches,
    )
    if batch_size is not None:
        if micro_batch_size not in ("auto", batch_size):
            raise ValueError(
                f"data.batch_size {batch_size} is the micro-batch of each device, but "
                f"data.micro_batch_size says {micro_batch_size}; give one of the two."
            )
        total = num_replicas * batch_size * accumulate_grad_batches
        return Batching(total, batch_size, accumulate_grad_batches)
    if micro_batch_size != "auto" and micro_batch_size > global_batch_size:
        raise ValueError(
            f"data.micro_batch_size {micro_batch_size} is above data.global_batch_size "
            f"{global_batch_size}, and no forward call holds more than a step; lower the one, or "
            "raise the other."
        )
    accumulation = accumulate_grad_batches
    if accumulation == 1 and micro_batch_size != "auto":
        accumulation = math.ceil(global_batch_size / (num_replicas * micro_batch_size))
    share = math.ceil(global_batch_size / (num_replicas * accumulation))
    if micro_batch_size != "auto" and share > micro_batch_size:
        _refuse(num_replicas, micro_batch_size, accumulation, global_batch_size)
    return Batching(global_batch_size, share, accumulation)


def _refuse(num_replicas: int, micro_batch_size: int, accumulation: int, global_size: int) -> None:
    raise ValueError(
        f"{num_replicas} devices x micro_batch_size {micro_batch_size} x accumulate_grad_batches "
        f"{accumulation} = {num_replicas * micro_batch_size * accumulation} samples, fewer than "
        f"global_batch_size {global_size}; leave accumulate_grad_batches out and it is derived."
    )


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}.")
