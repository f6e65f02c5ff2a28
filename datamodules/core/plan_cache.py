"""One copy of a large plan per machine: made once, memory-mapped by every local process."""

import os
import platform
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np
from filelock import FileLock

from datamodules.core.plan import Plan, PlanRequest, make_plan
from datamodules.core.store import own_folder

MAPPED_FROM = 1_000_000  # samples; below, each process makes its own in milliseconds


class _ByIdentity:
    """Lets an array be an argument of a cached function: the digest speaks for its content."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity)

    def __hash__(self) -> int:
        return 0


def cached_plan(request: PlanRequest, lengths: np.ndarray, epoch: int) -> Plan:
    """Return the plan of an epoch; a large one is mapped from a file that one process writes.

    Args:
        request: what the plan depends on, its digest names the file.
        lengths: [N] positions of each sample.
        epoch: from 0.
    """
    return _plan(request, epoch, _ByIdentity(lengths))


@lru_cache(maxsize=4)
def _plan(request: PlanRequest, epoch: int, lengths: _ByIdentity) -> Plan:
    if request.num_samples < MAPPED_FROM:
        return make_plan(request, lengths.array, epoch)
    # Of this machine: another one that shares the caches would take files away that are in use.
    folder = own_folder("plans") / platform.node() / request.digest()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"epoch-{epoch}.plan"
    with FileLock(folder / "lock", mode=0o600):  # the first local process makes it, others wait
        plan = _read(target, request.num_samples)
        if plan is None:
            _write(make_plan(request, lengths.array, epoch), target)
            _forget_before(folder, epoch - 1)
            plan = _read(target, request.num_samples)
    if plan is None:
        raise RuntimeError(f"{target} cannot be read back as it was written; check the disk.")
    return plan


def _write(plan: Plan, target: Path) -> None:
    """Write the number of offsets, the offsets and the order, and rename: a target is complete."""
    unfinished = target.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    with open(unfinished, "xb") as file:
        np.array([len(plan.offsets), *plan.offsets], np.int64).tofile(file)
        plan.order.tofile(file)
    os.replace(unfinished, target)


def _read(target: Path, num_samples: int) -> Plan | None:
    """Return the plan of a file, mapped; None where there is none, or it is damaged and says so."""
    plan = _sound(target, num_samples)
    if plan is None and target.exists():
        warnings.warn(f"{target} is damaged; it is made again.", stacklevel=2)
    return plan


def _sound(target: Path, num_samples: int) -> Plan | None:
    """Return the plan of a file, None where none is there that holds each sample once."""
    dtype = np.dtype(np.int32 if num_samples < 2**31 else np.int64)
    try:
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(handle, "rb") as file:
        count = np.fromfile(file, np.int64, 1)
        is_count = len(count) == 1 and 1 < count[0] <= num_samples + 1
        offsets = np.fromfile(file, np.int64, int(count[0]) if is_count else 0)
        place = file.tell()
        is_whole = os.fstat(handle).st_size == place + num_samples * dtype.itemsize
        if not is_whole or not is_count or offsets[0] != 0 or offsets[-1] != num_samples:
            return None
        order = np.memmap(file, dtype, "r", place, (num_samples,))
    seen = np.zeros(num_samples, bool)
    if order.min() < 0 or order.max() >= num_samples or (np.diff(offsets) <= 0).any():
        return None
    seen[order] = True
    return Plan(order, offsets) if seen.all() else None


def _forget_before(folder: Path, epoch: int) -> None:
    for old in folder.glob("epoch-*.plan"):
        if int(old.stem.removeprefix("epoch-")) < epoch:
            old.unlink(missing_ok=True)  # processes that still map it keep their view
