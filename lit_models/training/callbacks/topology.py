"""Says before the first step what runs where, on screen and in topology.json."""

import json
import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lit_models.training import status
from lit_models.training.provenance import code_facts, command_line, monitored


class Topology(Callback):
    """Writes `topology.json` and prints the start banner: the devices, then the plan.

    Args:
        fallback: what was asked for and is not there, in the words of `training/rules.py`.
        warnings: the other lines of that check.
    """

    def __init__(self, fallback: str | None = None, warnings: list[str] | None = None) -> None:
        self.fallback = fallback
        self.warnings = warnings or []
        self.facts: dict[str, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.facts = {
            **status(trainer),
            "fallback": self.fallback,
            "warnings": self.warnings,
            "command": command_line(),
            "code": code_facts(),
            "monitor": monitored(trainer),
            "num_parameters": sum(p.numel() for p in pl_module.parameters()),
            "num_trained": sum(p.numel() for p in pl_module.parameters() if p.requires_grad),
            "is_over": False,
        }
        self._write(trainer)
        if trainer.is_global_zero:
            print_banner(self.facts, trainer.default_root_dir)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write it again: only now is it known how much memory the run took, and that it ended."""
        self.facts |= {"memory": status(trainer)["memory"], "is_over": True}
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        temporary = folder / "topology.json.tmp"
        temporary.write_text(json.dumps(self.facts, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, folder / "topology.json")


def rehearsed_words(rehearsal: dict[str, Any] | None) -> str:
    """Returns what the rehearsal measured, in brackets; nothing where there was none."""
    if rehearsal is None:
        return ""
    return f" (auto, {rehearsal['peak_gib']:.2f}/{rehearsal['memory_gib']:.2f} GiB)"


def print_banner(facts: dict[str, Any], folder: str) -> None:
    """Prints the devices and then the plan, a line each."""
    table = Table.grid(padding=(0, 2))
    world = facts["world_size"]
    places = ", ".join(facts["host_rank_device"][:4]) + (" …" if world > 4 else "")
    backend = f", {facts['backend']}" if facts["backend"] else ""
    table.add_row("run", folder)
    size = facts.get("tensor_parallel_size", 1)
    split = f", tensor parallel {size}" if size > 1 else ""
    table.add_row("devices", f"{world} ({facts['strategy']}{split}{backend}, {facts['precision']})")
    table.add_row("host:rank:device", places)
    for name, label in (("rendezvous",) * 2, ("visible_devices", "visible GPUs")):
        if facts.get(name):
            table.add_row(label, facts[name])
    if "num_parameters" in facts:
        trained = facts["num_trained"]
        learn = "all of them learn" if trained == facts["num_parameters"] else f"{trained:,} learn"
        table.add_row("parameters", f"{facts['num_parameters']:,}, {learn}")
    plan = _plan_lines(facts["plan"], "devices" if size == 1 else "tensor groups")
    for label, text in [*plan, *_exactness_lines(facts["exactness"])]:
        table.add_row(label, text)
    rates = sorted(set(facts["learning_rates"]), reverse=True)
    shown = ", ".join(f"{rate:.3g}" for rate in rates[:3])
    table.add_row("learning rate", f"{shown} at this step, scaled by {facts['lr_scale']:g}")
    if facts["fallback"]:
        table.add_row("fallback", facts["fallback"])
    Console(stderr=False, highlight=False).print(table)


def _plan_lines(plan: dict[str, Any], replicas: str) -> list[tuple[str, str]]:
    """Returns label and text of each line on the batches; replicas have samples of their own."""
    if "global_batch_size" not in plan:
        return [("accumulation", str(plan["accumulate_grad_batches"]))]
    batch = (
        f"{plan['global_batch_size']} = {plan['num_replicas']} {replicas} x "
        f"{plan['micro_batch_size']} x {plan['accumulate_grad_batches']} accumulated"
        f"{rehearsed_words(plan.get('rehearsal'))}"
    )
    epoch = f"{counts(plan)}, {plan['padding_share']:.1%} padding, plan {plan['plan_digest'][:12]}"
    return [("global batch", batch), ("epoch", epoch)]


def counts(plan: dict[str, Any]) -> str:
    """Return "8 of 129 steps, 1,024 of 16,499 samples", the limits of a run counted in."""
    steps, samples = f"{plan['steps_per_epoch']:,}", f"{plan['samples_per_epoch']:,}"
    if plan["steps_per_epoch"] < plan["planned_steps"]:
        steps = f"{steps} of {plan['planned_steps']:,}"
        samples = f"{samples} of {plan['num_samples']:,}"
    return f"{steps} steps, {samples} samples"


def _exactness_lines(exactness: dict[str, Any]) -> list[tuple[str, str]]:
    lines = []
    if exactness["level"] == "bitwise":
        text = (
            f"bitwise: {exactness['num_chunks']} chunks a step, {exactness['num_threads']} "
            f"thread(s), {exactness['gradient_copies']} x the gradients"
        )
        lines.append(("exactness", text))
    if exactness["exact_dropout"]:
        lines.append(("dropout", "keyed by seed, epoch and sample"))
    return lines
