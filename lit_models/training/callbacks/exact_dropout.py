"""Level A with dropout on: every mask belongs to its sample."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from datamodules.core.planned import PlannedDataModule
from lit_models.training.keyed_dropout import (
    DrawGuard,
    SampleKeys,
    key_dropout,
    mixed,
    release_dropout,
)


class ExactDropout(Callback):
    """Keys every `nn.Dropout` of the network by seed, epoch and sample while it fits.

    Masks are then the same on any number of devices, in any micro-batch and after a resume.

    Raises:
        ValueError: while fitting: data without a plan, dropout that cannot be keyed, or samples
            that share a row.
        RuntimeError: a training step draws random numbers in another way.
    """

    def __init__(self) -> None:
        self.exactness_facts: dict[str, Any] = {"exact_dropout": True}
        self._keys = SampleKeys()
        self._guard = DrawGuard()
        self._dropouts: list[nn.Dropout] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = getattr(trainer, "datamodule", None)
        if stage == "fit" and not isinstance(data, PlannedDataModule):
            raise ValueError(
                f"exact_dropout needs a PlannedDataModule, whose batches name their samples; got "
                f"{type(data).__name__}. Use one, or leave ExactDropout out."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._dropouts = key_dropout(pl_module, self._keys)
        rate = max((dropout.p for dropout in self._dropouts), default=0.0)
        if rate and not trainer.datamodule.datasets["train"].is_padded:
            raise ValueError(
                f"exact_dropout needs data.layout packed or blocks, whose rows are samples; here "
                f"the network has dropout {rate} and the samples of a micro-batch share one row. "
                "Choose another data.layout, set dropout to 0, or leave exact_dropout out."
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        key = int(mixed(trainer.datamodule.seed, trainer.current_epoch))
        self._keys.begin(key, batch["sample_id"])
        self._guard.begin(pl_module.device)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        self._guard.check(pl_module.device, "exact_dropout")
        self._keys.is_backward = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._keys.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._release()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    def _release(self) -> None:
        release_dropout(self._dropouts)
        self._dropouts = []
