"""What `trainer.strategy: auto` becomes on several devices, from the settings and the module."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule

from lit_models.training.memory import GIB, Choice, choose_strategy
from lit_models.training.rules import Settings, Verdict
from lit_models.training.state_size import size_before_setup

CHOSEN_FOR = ("cpu", "gpu", "cuda")


def choose(
    settings: Settings,
    verdict: Verdict,
    module: LightningModule,
    data: Any = None,
    is_training: bool = True,
    precision: str | int | None = None,
) -> Choice | None:
    """Return the strategy that `auto` becomes; None where it stays what was given.

    Evaluation always takes ddp: fsdp has all weights whole in it, too.

    Args:
        settings: what was asked for.
        verdict: the devices.
        module: not built yet.
        data: whose `memory_budget_gib` limits each process on a CPU; without one, each gets its
            part of the machine's memory.
        is_training: false in validate, test and predict.
        precision: as the Trainer takes it.

    Raises:
        ValueError: the state fits under no strategy.
    """
    is_open = settings.strategy == "auto" and verdict.accelerator in CHOSEN_FOR
    if not is_open or verdict.world_size == 1:
        return None
    if not is_training:
        line = f"strategy ddp: each of {verdict.world_size} devices holds all weights in evaluation"
        return Choice("ddp", line)
    memory_bytes = device_memory_bytes(verdict, getattr(data, "memory_budget_gib", None))
    return choose_strategy(size_before_setup(module, precision), verdict.world_size, memory_bytes)


def device_memory_bytes(verdict: Verdict, memory_budget_gib: float | None) -> int:
    """Return the memory of each device: of the smallest GPU, or a process's part of the host's."""
    if verdict.accelerator == "cpu":
        if memory_budget_gib is not None:
            return int(memory_budget_gib * GIB)
        return host_memory_bytes() // verdict.num_devices
    devices: Any = verdict.devices
    indices = devices if isinstance(devices, list) else range(verdict.num_devices)
    return min(torch.cuda.get_device_properties(i).total_memory for i in indices)


def host_memory_bytes() -> int:
    """Return the memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
