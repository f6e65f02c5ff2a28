"""A plain LightningModule and datamodule in the usual style: two devices change the run."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def loader(seed: int, **options: Any) -> DataLoader:
    """Return a loader of 21 rows."""
    inputs = torch.randn(21, 3, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(inputs, inputs.square().sum(1)), batch_size=4, **options)


class Plain(LightningModule):
    """A regression whose metric is the mean of batch means."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0])[:, 0], batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class PlainData(LightningDataModule):
    """21 rows to train on, and 21 others to evaluate on."""

    def train_dataloader(self) -> DataLoader:
        return loader(1, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return loader(2)

    predict_dataloader = val_dataloader
