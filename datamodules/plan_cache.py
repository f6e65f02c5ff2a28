"""One copy of a large plan per machine: made once, memory-mapped by every local process."""

import fcntl
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from datamodules.plan import Plan, PlanRequest, make_plan

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
    folder = plan_folder(request)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"epoch-{epoch}.npy"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the first local process makes it, the others wait
        if not target.exists():
            _write(make_plan(request, lengths.array, epoch), target)
            _forget_before(folder, epoch - 1)
    offsets = np.load(target.with_suffix(".offsets.npy"))
    return Plan(np.load(target, mmap_mode="r"), offsets)


def plan_folder(request: PlanRequest) -> Path:
    """Return the node-local folder of one plan; a user has its own."""
    return Path(tempfile.gettempdir()) / f"unisono-{os.getuid()}" / f"plan-{request.digest()}"


def _write(plan: Plan, target: Path) -> None:
    """Write the order last and by renaming: a target that exists is complete."""
    np.save(target.with_suffix(".offsets.npy"), plan.offsets)
    unfinished = target.with_suffix(".unfinished.npy")
    np.save(unfinished, plan.order)
    os.replace(unfinished, target)


def _forget_before(folder: Path, epoch: int) -> None:
    for old in folder.glob("epoch-*.npy"):
        if int(old.name.removeprefix("epoch-").split(".")[0]) < epoch:
            old.unlink(missing_ok=True)  # processes that still map it keep their view
