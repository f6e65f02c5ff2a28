"""What must be alike on all ranks: where it differs, all of them end before they compute."""

from typing import Any

from lightning.pytorch import Trainer

from datamodules.core.planned import PlannedDataModule
from lit_models.training.ledger import of_all_ranks


def agree(what: str, own: str, way_out: str) -> None:
    """Raise RuntimeError, on all ranks, where one does not have the first one's text; a collective.

    Args:
        what: of which it tells, for the message.
        own: text of this rank.
        way_out: what to do where they differ.
    """
    found = of_all_ranks(own)
    other = next((rank for rank, text in enumerate(found) if text != found[0]), None)
    if other is not None:
        raise RuntimeError(
            f"the ranks have different {what}: rank 0 {found[0]}; rank {other} {found[other]}. All "
            f"nodes need the same files, and ~ and relative paths are each node's own; {way_out}."
        )


def agree_on_run(run: Any) -> None:
    """Compare the `Run` that each rank has chosen, with its config and its code."""
    # Of what auto finds the first rank alone has compared the bytes, and all load its choice.
    is_auto = run.ckpt_path and run.notice.startswith("--ckpt_path auto")
    start = "the newest checkpoint" if is_auto else run.ckpt_path
    own = f"{run.folder}, from {start}, by config, code, torch, strategy and precision {run.digest}"
    agree("runs", own, "start again, or name the checkpoint with --ckpt_path")


def agree_on_data(trainer: Trainer) -> None:
    """Compare the plans by which each rank deals: others would use samples twice, or never."""
    data = getattr(trainer, "datamodule", None)
    if isinstance(data, PlannedDataModule):
        plans = [(name, data.request(name)) for name in data.datasets]
        own = [f"{name} {plan.num_samples:,} samples, plan {plan.digest()}" for name, plan in plans]
        agree("data", ", ".join(own), "copy those of the data again")


def agree_on_checkpoint(path: Any, content: dict[str, Any]) -> None:
    """Compare the content of the checkpoint that each rank has read."""
    own = f"{path} of step {content.get('global_step')}, ledger {content.get('ledger')}"
    agree("checkpoints", own, "copy it again, or start a little later")
