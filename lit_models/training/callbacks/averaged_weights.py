"""An exponential moving average of the weights, sharded where they are."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lit_models.training.checkpoint import AVERAGED
from lit_models.training.sharding import local_parts, on_cpu, sharded_like, whole


class AveragedWeights(Callback):
    """Validates, tests and exports with averaged weights, and trains on the others.

    After optimizer step t each average moves to its weight by 1 - min(decay, (1 + t) / (10 + t)):
    the first steps, far from the last, are soon forgotten. Checkpoints hold both; all that reads
    one for something else than going on with the training takes the average.

    Args:
        decay: share of the average that a step keeps, in (0, 1).

    Raises:
        ValueError: a decay outside (0, 1).
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie between 0 and 1, got {decay}.")
        self.decay = decay
        self._averages: dict[str, Tensor] = {}
        self._restored: dict[str, Tensor] = {}
        self._seen_step = 0

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._restored = checkpoint.get(AVERAGED, {})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the weights as they are, or go on with the checkpoint's averages."""
        restored, self._restored = self._restored, {}
        self._seen_step = trainer.global_step
        self._averages = {
            name: sharded_like(restored[name].to(p.device), p)
            if name in restored
            else p.detach().clone()
            for name, p in pl_module.named_parameters()
            if p.requires_grad
        }

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._advance(trainer, pl_module)

    def _advance(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the averages, once at the end of each optimizer step."""
        step = trainer.global_step
        if step == self._seen_step:
            return
        self._seen_step = step
        averages, weights = self._pairs(pl_module)
        torch._foreach_lerp_(averages, weights, 1 - min(self.decay, (1 + step) / (10 + step)))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap(pl_module)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the averages: whole, a collective, or as shards where the checkpoint has those."""
        if self._averages:
            self._advance(trainer, pl_module)  # another callback may save at the same step
            if getattr(trainer.strategy, "sharded_checkpoint", False):
                checkpoint[AVERAGED] = dict(self._averages)
                return
            keeps = trainer.is_global_zero
            averages = {n: on_cpu(whole(value), keeps) for n, value in self._averages.items()}
            checkpoint[AVERAGED] = averages if keeps else {}

    def _pairs(self, pl_module: LightningModule) -> tuple[list[Tensor], list[Tensor]]:
        weights = dict(pl_module.named_parameters())
        parts = local_parts(weights[name].detach() for name in self._averages)
        return local_parts(self._averages.values()), parts

    @torch.no_grad()
    def _swap(self, pl_module: LightningModule) -> None:
        for average, weight in zip(*self._pairs(pl_module), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
