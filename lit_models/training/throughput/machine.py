"""How busy the machine of rank 0 is: from /proc and the file system, of GPUs from NVML."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

_STAT, _MEMINFO = Path("/proc/stat"), Path("/proc/meminfo")
_IDLE = (3, 4)  # columns of man 5 proc: idle, iowait
_KIB = 1024


class Machine:
    """Readings between which the use of the processors is taken.

    Args:
        folder: whose file system is looked at.
        device: of this rank.
        num_devices: of this machine in the run.
    """

    def __init__(self, folder: Path, device: torch.device, num_devices: int) -> None:
        self.folder = folder
        self._ticks = _cpu_ticks()
        self._gpus = _Gpus(device, num_devices) if device.type == "cuda" else None

    def reading(self) -> dict[str, Any]:
        """Return `cpu_percent` (of all processors since the reading before), `memory_bytes` in use
        and `disk_free_bytes`; None where the system does not tell. With a GPU, `gpu`."""
        before, self._ticks = self._ticks, _cpu_ticks()
        reading: dict[str, Any] = {
            "cpu_percent": _busy_percent(before, self._ticks),
            "memory_bytes": _memory_in_use(),
            "disk_free_bytes": shutil.disk_usage(self.folder).free,
        }
        if self._gpus is not None:
            reading["gpu"] = self._gpus.readings()
        return reading


class _Gpus:
    """The GPUs of a run on this machine; torch's own figures alone where NVML is not there."""

    def __init__(self, device: torch.device, num_devices: int) -> None:
        self._devices = range(num_devices) if num_devices > 1 else [device.index or 0]
        self._nvml = _nvml()
        self._handles = [_handle(self._nvml, number) for number in self._devices]

    def readings(self) -> list[dict[str, Any]]:
        """Return one dict per GPU."""
        found = []
        for number, handle in zip(self._devices, self._handles, strict=True):
            reading = {"index": number, "name": torch.cuda.get_device_name(number)}
            found.append(reading | _nvml_reading(self._nvml, handle))
        return found


def _nvml() -> ModuleType | None:
    """Return NVML, begun; None where the extra or the library is missing, which is said."""
    try:
        import pynvml
    except ImportError:
        rank_zero_warn(
            "use, power and temperature of the GPUs are not recorded: nvidia-ml-py is missing; "
            "pip install 'unisono[gpu]'."
        )
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        rank_zero_warn(f"use, power and temperature of the GPUs are not recorded: NVML: {error}.")
        return None
    return pynvml


def _handle(nvml: ModuleType | None, number: int) -> Any:
    # By its identity: NVML counts all GPUs of the machine, torch those of CUDA_VISIBLE_DEVICES.
    if nvml is None:
        return None
    uuid = str(torch.cuda.get_device_properties(number).uuid)
    for name in (uuid, f"GPU-{uuid}", f"MIG-{uuid}"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError as error:
            reason = error
    rank_zero_warn(f"use, power and temperature of GPU {uuid} are not recorded: NVML: {reason}.")
    return None


def _nvml_reading(nvml: ModuleType | None, handle: Any) -> dict[str, Any]:
    """Return the figures of one GPU; None for one that this model or slice does not tell."""
    if nvml is None or handle is None:
        return {}
    asked = {
        "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    }
    reading: dict[str, Any] = {}
    for name, ask in asked.items():
        try:
            reading[name] = ask()
        except nvml.NVMLError:
            reading[name] = None
    return reading


def _cpu_ticks() -> tuple[int, int] | None:
    """Return (busy, all) ticks of all processors since the machine started; Linux."""
    if not _STAT.exists():
        return None
    ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - sum(ticks[i] for i in _IDLE), sum(ticks)


def _busy_percent(before: tuple[int, int] | None, now: tuple[int, int] | None) -> float | None:
    if before is None or now is None or now[1] <= before[1]:
        return None
    return round(100 * (now[0] - before[0]) / (now[1] - before[1]), 1)


def _memory_in_use() -> int | None:
    """Return the bytes of the machine's memory that are not available to a new program; Linux."""
    if not _MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    total, available = (int(lines[k].split()[0]) for k in ("MemTotal", "MemAvailable"))
    return (total - available) * _KIB
