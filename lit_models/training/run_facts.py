"""What runs where: one dictionary for topology.json, the start banner and plain scripts."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import asdict, is_dataclass
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer

from lit_models.training.memory import most_resident_bytes
from lit_models.training.strategies import strategy_name


def status(trainer: Trainer) -> dict[str, Any]:
    """Returns what a trainer runs on, and how much memory it took so far.

    Every rank calls it, in a callback or after a fit: it is a collective where there is a process
    group. After `ddp_spawn` the calling process has none, and knows of itself alone.

    Args:
        trainer: one that has been given a module.

    Returns:
        plain values: strategy, process_group_backend's `backend`, `rendezvous`, `world_size`,
        `tensor_parallel_size`, `num_nodes`, `host_rank_device` and `memory` of each rank in the
        order of ranks, `plan` (the batches), `exactness`, `learning_rates`, `precision`,
        `versions`.
    """
    here = f"{socket.gethostname()}:{trainer.global_rank}:{trainer.strategy.root_device}"
    ranks: list[Any] = [(here, memory(trainer.strategy.root_device))]
    backend = rendezvous = None
    if dist.is_available() and dist.is_initialized():
        mine, ranks = ranks[0], [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        backend = dist.get_backend()
        rendezvous = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {
        "strategy": strategy_name(trainer.strategy),
        "backend": backend,
        "rendezvous": rendezvous,
        "world_size": trainer.world_size,
        "tensor_parallel_size": getattr(trainer.strategy, "tensor_parallel_size", 1),
        "num_nodes": trainer.num_nodes,
        "host_rank_device": [place for place, _ in ranks],
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "memory": [used for _, used in ranks],
        "precision": str(trainer.precision),
        "learning_rates": rates,
        "lr_scale": float(getattr(trainer.lightning_module, "lr_scale", 1.0)),
        "plan": plan_facts(trainer),
        "exactness": exactness_facts(trainer),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
    }


def exactness_facts(trainer: Trainer) -> dict[str, Any]:
    """Returns what callbacks do for sameness beyond the gradient of the one big batch."""
    facts: dict[str, Any] = {"level": "gradient", "exact_dropout": False}
    for callback in trainer.callbacks:
        facts |= getattr(callback, "exactness_facts", {})
    return facts


def memory(device: torch.device) -> dict[str, int | None]:
    """Returns the most bytes that this process has held: in the host's memory, by tensors on a
    GPU, and by torch's allocator there (None on a CPU)."""
    on_gpu = device.type == "cuda"
    return {
        "resident_bytes": most_resident_bytes(),
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if on_gpu else None,
    }


def plan_facts(trainer: Trainer) -> dict[str, Any]:
    """Returns the plan's figures, or what a plain datamodule lets one know."""
    data = getattr(trainer, "datamodule", None)
    has_plan = "train" in getattr(data, "datasets", {"train": None})
    facts = getattr(data, "plan_facts", None) if has_plan else None
    if facts is None:
        return {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "batches_per_epoch": str(trainer.num_training_batches),
        }
    return asdict(facts) if is_dataclass(facts) and not isinstance(facts, type) else dict(facts)
