"""How much memory a device has, and the most that was in use at a time: on the host, on a GPU."""

import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import Protocol

import torch

GIB = 2**30
# What a rehearsal may fill: blocks whose sizes differ from step to step leave gaps, on a GPU in the
# allocator's segments, on the host in the C library's heap (a run on a CPU keeps what it frees).
USABLE_SHARE = 0.9
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_PEAK = "VmHWM:"  # man 5 proc, /proc/pid/status
_RESET_PEAK = "5"  # man 5 proc, /proc/pid/clear_refs


class Meter(Protocol):
    """Measures the peak of one stretch of work."""

    capacity_bytes: int

    def start(self) -> None:
        """Begin a stretch."""

    def peak_bytes(self) -> int:
        """Return the most that was in use since `start`."""


class HostMeter:
    """The resident memory of this process against a budget; Linux.

    Args:
        budget_gib: what the process may take, its libraries and its data included.

    Raises:
        ValueError: the system does not tell the peak.
    """

    def __init__(self, budget_gib: float) -> None:
        self.capacity_bytes = int(USABLE_SHARE * budget_gib * GIB)
        if not has_host_meter():
            raise ValueError(
                f"data.memory_budget_gib is {budget_gib}, but {_CLEAR} or {_PEAK} in {_STATUS} is "
                "missing here, from which the peak is measured; leave it out and give "
                "data.micro_batch_size as a number."
            )

    def start(self) -> None:
        gc.collect()
        _trim_heap()
        _CLEAR.write_text(_RESET_PEAK)

    def used_bytes(self) -> int:
        """Return what is in use now."""
        return _status_bytes("VmRSS:")

    def peak_bytes(self) -> int:
        return _status_bytes(_PEAK)


class DeviceMeter:
    """The memory of a GPU that this process may use; what others hold is not counted to it.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        self.capacity_bytes = int(USABLE_SHARE * (free + torch.cuda.memory_reserved(device)))

    def start(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)

    def used_bytes(self) -> int:
        """Return what tensors hold now."""
        return torch.cuda.memory_allocated(self.device)

    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


def most_bytes(device: torch.device) -> int:
    """Return the most that this process has held: on a GPU by tensors, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return most_resident_bytes()


def most_resident_bytes() -> int:
    """Return the most host memory that this process has held, its libraries included.

    Linux tells it of this program alone; what `getrusage` says there is at least what the process
    that started it had held. It is asked where the kernel does not tell, as that of gVisor.
    """
    if _tells(_PEAK):
        return _status_bytes(_PEAK)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def has_host_meter() -> bool:
    """Return whether this system tells the peak of a stretch of work on the host."""
    return _CLEAR.exists() and _tells(_PEAK)


def _tells(name: str) -> bool:
    """Return whether the kernel writes such a line of this process."""
    return _STATUS.exists() and any(x.startswith(name) for x in _STATUS.read_text().splitlines())


def _status_bytes(name: str) -> int:
    line = next(x for x in _STATUS.read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) * 1024


def _trim_heap() -> None:
    """Give freed memory back to the system, where the C library can: it would count as in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
