"""Says before the first step what runs where, on screen and in topology.json."""

import json
import os
import platform
import socket
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table


class Topology(Callback):
    """Writes `topology.json` and prints the start banner: the devices, then the plan.

    Args:
        fallback: what was asked for and is not there, as the preflight check put it.
        warnings: the other lines of that check.
    """

    def __init__(self, fallback: str | None = None, warnings: list[str] | None = None) -> None:
        self.fallback = fallback
        self.warnings = warnings or []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        facts = {
            **topology_facts(trainer, pl_module),
            "fallback": self.fallback,
            "warnings": self.warnings,
        }
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "topology.json.tmp"
        temporary.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "topology.json")
        print_banner(facts, trainer.default_root_dir)


def topology_facts(trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
    """Returns what topology.json holds; a collective where there is a process group."""
    here = f"{socket.gethostname()}:{trainer.global_rank}:{trainer.strategy.root_device}"
    places: list[Any] = [here]
    backend = None
    if dist.is_available() and dist.is_initialized():
        places = [None] * dist.get_world_size()
        dist.all_gather_object(places, here)
        backend = dist.get_backend()
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {
        "strategy": type(trainer.strategy).__name__,
        "backend": backend,
        "world_size": trainer.world_size,
        "num_nodes": trainer.num_nodes,
        "host_rank_device": places,
        "precision": str(trainer.precision),
        "learning_rates": rates,
        "lr_scale": float(getattr(pl_module, "lr_scale", 1.0)),
        "plan": plan_facts(trainer),
        "exactness": exactness_facts(trainer),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
    }


def plan_facts(trainer: Trainer) -> dict[str, Any]:
    """Returns the plan's figures, or what a plain datamodule lets one know."""
    data = getattr(trainer, "datamodule", None)
    facts = getattr(data, "plan_facts", None)
    if facts is None:
        return {
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "batches_per_epoch": str(trainer.num_training_batches),
        }
    return asdict(facts) if is_dataclass(facts) and not isinstance(facts, type) else dict(facts)


def rehearsed_words(rehearsal: dict[str, Any] | None) -> str:
    """Returns what the rehearsal measured, in brackets; nothing where there was none."""
    if rehearsal is None:
        return ""
    return f" (auto, {rehearsal['peak_gib']:.2f}/{rehearsal['memory_gib']:.2f} GiB)"


def exactness_facts(trainer: Trainer) -> dict[str, Any]:
    """Returns what callbacks do for sameness beyond the gradient of the one big batch."""
    facts: dict[str, Any] = {"level": "gradient", "exact_dropout": False}
    for callback in trainer.callbacks:
        facts |= getattr(callback, "exactness_facts", {})
    return facts


def print_banner(facts: dict[str, Any], folder: str) -> None:
    """Prints the devices and then the plan, a line each."""
    table = Table.grid(padding=(0, 2))
    world = facts["world_size"]
    places = ", ".join(facts["host_rank_device"][:4]) + (" …" if world > 4 else "")
    backend = f", {facts['backend']}" if facts["backend"] else ""
    table.add_row("run", folder)
    table.add_row("devices", f"{world} ({facts['strategy']}{backend}, {facts['precision']})")
    table.add_row("host:rank:device", places)
    plan = facts["plan"]
    if "global_batch_size" in plan:
        table.add_row(
            "global batch",
            f"{plan['global_batch_size']} = {plan['num_replicas']} devices x "
            f"{plan['micro_batch_size']} x {plan['accumulate_grad_batches']} accumulated"
            f"{rehearsed_words(plan.get('rehearsal'))}",
        )
        table.add_row(
            "epoch",
            f"{plan['steps_per_epoch']} steps for {plan['num_samples']} samples, "
            f"{plan['padding_share']:.1%} padding, plan {plan['plan_digest'][:12]}",
        )
    else:
        table.add_row("accumulation", str(plan["accumulate_grad_batches"]))
    exactness = facts["exactness"]
    if exactness["level"] == "bitwise":
        table.add_row(
            "exactness",
            f"bitwise: {exactness['num_chunks']} chunks a step, {exactness['num_threads']} "
            f"thread(s), {exactness['gradient_copies']} x the gradients",
        )
    if exactness["exact_dropout"]:
        table.add_row("dropout", "keyed by seed, epoch and sample")
    rates = sorted(set(facts["learning_rates"]), reverse=True)
    shown = ", ".join(f"{rate:.3g}" for rate in rates[:3])
    table.add_row("learning rate", f"{shown} at this step, scaled by {facts['lr_scale']:g}")
    if facts["fallback"]:
        table.add_row("fallback", facts["fallback"])
    Console(stderr=False, highlight=False).print(table)
