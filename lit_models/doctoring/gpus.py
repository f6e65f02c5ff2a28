"""GPUs: whether they are there, alike, free, and how they are connected."""

import os
import subprocess
from collections import Counter
from typing import NamedTuple

from lit_models.doctoring import gpu_links
from lit_models.doctoring.findings import Finding, ok

BUSY_SHARE = 0.1


class Gpu(NamedTuple):
    """One GPU, as its driver describes it."""

    name: str
    memory_bytes: int
    used_bytes: int
    capability: str


def check(gpus: list[Gpu] | None = None) -> list[Finding]:
    """Return findings on the GPUs. Args: gpus: those of this machine where none are given."""
    import torch

    if gpus is None:
        if not torch.cuda.is_available():
            return [_none(_driver())]
        gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
        seen = [gpu_links.versions(os.environ, _driver())]
        return [*seen, *_alike(gpus), *_busy(gpus), *_connected(len(gpus))]
    return [*_alike(gpus), *_busy(gpus), *_connected(len(gpus))]


def _none(driver: str | None) -> Finding:
    import torch

    if driver is None:
        return ok("gpus", "none; runs use CPU processes")
    return Finding(
        "gpus",
        "error",
        f"the driver {driver} is there, and torch {torch.__version__} sees no GPU",
        "every run uses the CPU",
        "install a torch build with CUDA for this driver, and look at CUDA_VISIBLE_DEVICES",
    )


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; none where there is none."""
    lines = _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return lines.splitlines()[0] if lines else None


def _printed(*command: str) -> str:
    """Return what a program printed; nothing where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, whole = torch.cuda.mem_get_info(index)
    capability = f"{properties.major}.{properties.minor}"
    return Gpu(properties.name, whole, whole - free, capability)


def _alike(gpus: list[Gpu]) -> list[Finding]:
    kinds = Counter((gpu.name, round(gpu.memory_bytes / 2**30)) for gpu in gpus)
    shown = ", ".join(f"{count} x {name} ({gib} GiB)" for (name, gib), count in kinds.items())
    if len(kinds) == 1:
        return [ok("gpus", shown)]
    return [
        Finding(
            "gpus",
            "warning",
            shown,
            "all wait for the slowest one in every step, and the smallest memory sets the "
            "micro-batch",
            "choose equal ones with CUDA_VISIBLE_DEVICES or --trainer.devices=0,1",
        )
    ]


def _busy(gpus: list[Gpu]) -> list[Finding]:
    return [
        Finding(
            "gpus",
            "warning",
            f"GPU {index}: {gpu.used_bytes / 2**30:.1f} of {gpu.memory_bytes / 2**30:.1f} GiB "
            "are used already",
            "another program computes there: less memory, slower steps",
            "nvidia-smi names it; end it, or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
        for index, gpu in enumerate(gpus)
        if gpu.used_bytes > BUSY_SHARE * gpu.memory_bytes
    ]


def _connected(count: int) -> list[Finding]:
    """Return findings on links by name, and on pairs that do not reach each other's memory."""
    if count < 2:
        return []
    import torch

    printed = gpu_links.links(_printed("nvidia-smi", "topo", "-m"))
    named = gpu_links.check(gpu_links.among(printed, os.environ.get("CUDA_VISIBLE_DEVICES")))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    if torch.cuda.device_count() < count:
        return named
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return named or [ok("gpu links", "every pair reaches the other's memory")]
    return [
        *named,
        Finding(
            "gpu links",
            "warning",
            f"{len(apart)} of {len(pairs)} pairs do not reach each other's memory",
            "gradients go through the host: steps of large networks take longer",
            "nvidia-smi topo -m shows the links; fewer and larger micro-batches need less of them",
        ),
    ]
