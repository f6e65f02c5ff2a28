"""A step whose loss or gradient is not finite is not applied, and its samples are named."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lit_models.training.checkpoints import settle_checkpoints
from lit_models.training.exact import ExactModule
from lit_models.training.ledger import Ledger, is_distributed, ledger_of

SHOWN_IDS = 20


class NonFinite(Callback):
    """Leaves weights and moments as they are where the gradient is not finite.

    The decision stays on the device: an optimizer that knows `found_inf` (`fused: true`) skips the
    update there; for others the flag is read, which on a GPU costs a wait per step. Whoever needs
    to know reads it one step late, from the ledger. A loss that is not finite makes its gradient
    so too (`ExactModule.exact_mean`): all ranks see the same.

    Args:
        policy: `stop` ends the run with an error; `skip` goes on with the next step; `rollback`
            takes weights and moments from the newest checkpoint and goes on behind the step.
        most_skipped: updates that may be left out in one run before it stops.

    Raises:
        ValueError: most_skipped below 1.
    """

    def __init__(
        self, policy: Literal["stop", "skip", "rollback"] = "stop", most_skipped: int = 10
    ) -> None:
        if most_skipped < 1:
            raise ValueError(f"most_skipped must be at least 1, got {most_skipped}.")
        self.policy, self.most_skipped = policy, most_skipped
        self.num_skipped = 0
        self._handled = 0

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep an update with a gradient that is not finite from being applied."""
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if has_scaler or not isinstance(pl_module, ExactModule):  # a scaler skips by itself
            return
        norm = pl_module.step_record.gradient_norm(optimizer)
        if norm is None:
            return
        if norm.device.type != "cpu" and getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        elif not math.isfinite(float(norm)):
            # Optimizers pass over parameters without a gradient: no decay, no momentum, no count.
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act on the newest line of the ledger, on all ranks at the same step."""
        ledger = ledger_of(trainer)
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if ledger is None or ledger.latest.get("is_finite", True) or has_scaler:
            return
        step = ledger.latest["step"]
        if step == self._handled:
            return
        self._handled = step
        ids = sample_ids(pl_module, step)
        self.num_skipped += 1
        event = {"event": "not_applied", "step": step, "sample_ids": ids, "policy": self.policy}
        ledger.note(event)
        names = ", ".join(map(str, ids[:SHOWN_IDS])) + (" …" if len(ids) > SHOWN_IDS else "")
        run = trainer.default_root_dir
        what = f"step {step}: loss or gradient is not finite; its update was not applied"
        if self.policy == "stop" or self.num_skipped > self.most_skipped:
            raise FloatingPointError(
                f"{what}. Samples: {names}. Look at it with `unisono replay {run} --step {step}`; "
                "the callback lit_models.training.callbacks.NonFinite with policy skip or rollback "
                f"goes on ({self.num_skipped - 1} of {self.most_skipped} left out so far)."
            )
        if self.policy == "rollback":
            self._roll_back(trainer, ledger)
        rank_zero_warn(f"{what} ({self.policy}). Samples: {names}.")

    def _roll_back(self, trainer: Trainer, ledger: Ledger) -> None:
        settle_checkpoints(trainer)  # or one rank would take the last, another the one before
        path = Path(trainer.default_root_dir) / "checkpoints" / "last.ckpt"
        if not path.exists():
            raise FloatingPointError(
                "there is no checkpoint to roll back to yet; save sooner with "
                "LastCheckpoint(every_n_steps=…), or use policy skip."
            )
        checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
        trainer.strategy.load_model_state_dict(checkpoint)
        trainer.strategy.load_optimizer_state_dict(checkpoint)
        undone = {"to_step": checkpoint["global_step"], "step": trainer.global_step}
        ledger.note({"event": "rolled_back", **undone})


def sample_ids(pl_module: LightningModule, step: int) -> list[int]:
    """Return the samples of a step whose loss was not finite, or all where none was alone; a
    collective.

    Args:
        pl_module: an ExactModule.
        step: one of the last two.
    """
    found = pl_module.step_record.suspects(step)  # type: ignore[union-attr, operator]
    ranks: list[Any] = [found]
    if is_distributed():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, found)
    wrong = sorted({i for bad, _ in ranks for i in bad})
    return wrong or sorted({i for _, ids in ranks for i in ids})
