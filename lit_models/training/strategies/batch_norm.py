"""`trainer.sync_batchnorm`: statistics over the micro-batches of all devices, without fillers.

torch's SyncBatchNorm runs on GPUs alone and counts every row, also those that only fill up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm


class SyncedStatistics(LayerSync):
    """Replaces batch norm layers for the length of a fit; knows the weights of the batch."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None

    def enter(self, batch: Any) -> None:
        """Note which rows of a planned batch are fillers; other batches have none."""
        self.weight = batch.get("weight") if isinstance(batch, dict) else None

    def apply(self, model: nn.Module) -> nn.Module:
        return self._replace(model, _BatchNorm, self._synced)

    def revert(self, model: nn.Module) -> nn.Module:
        return self._replace(
            model, SyncedBatchNorm, lambda layer: layer.plain.train(layer.training)
        )

    def _synced(self, layer: Any) -> nn.Module:
        return layer if isinstance(layer, SyncedBatchNorm) else SyncedBatchNorm(layer, self)

    def _replace(self, model: nn.Module, kind: type[nn.Module], new: Any) -> nn.Module:
        for name, child in model.named_children():
            if isinstance(child, kind):
                setattr(model, name, new(child))
            else:
                self._replace(child, kind, new)
        return model


class SyncedBatchNorm(_BatchNorm):
    """Batch norm whose mean and variance are those of all devices' rows of weight 1.

    Args:
        plain: the layer that it stands for; parameters and buffers are shared with it.
        statistics: knows the weights of the batch.
    """

    def __init__(self, plain: _BatchNorm, statistics: SyncedStatistics) -> None:
        super().__init__(
            plain.num_features, plain.eps, plain.momentum, plain.affine, plain.track_running_stats
        )
        self.__dict__["plain"], self.statistics = plain, statistics  # no submodule: names stay
        self._parameters, self._buffers = plain._parameters, plain._buffers
        self.train(plain.training)

    def _check_input_dim(self, input: Tensor) -> None:
        self.plain._check_input_dim(input)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        others = [d for d in range(input.dim()) if d != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)
        weight = self._weight(input)
        count = _over_devices(weight.sum().reshape(1) * (input[0, 0].numel()))
        count = count.clamp(min=1)
        mean = _over_devices((input * weight).sum(others)) / count  # [C]
        centred = input - mean.reshape(shape)
        variance = _over_devices((centred**2 * weight).sum(others)) / count
        self._remember(mean.detach(), variance.detach(), count)
        normed = centred * (variance + self.eps).rsqrt().reshape(shape)
        if not self.affine:
            return normed
        return normed * self.weight.reshape(shape) + self.bias.reshape(shape)

    def _weight(self, input: Tensor) -> Tensor:
        rows = self.statistics.weight
        if rows is None:
            rows = torch.ones(len(input), device=input.device)
        if len(rows) != len(input):
            raise ValueError(
                f"sync_batchnorm: a batch norm layer got {len(input)} rows for {len(rows)} samples "
                "and cannot tell which only fill up the batch; give it one row per sample, or use "
                "another norm, such as LayerNorm."
            )
        return rows.to(input).reshape([-1] + [1] * (input.dim() - 1))

    def _remember(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * count / (count - 1).clamp(min=1)
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(unbiased.to(self.running_var), share)


def warn_of_own_statistics(model: nn.Module, num_devices: int) -> None:
    """Says that batch norms without `sync_batchnorm` make a run depend on the devices."""
    if num_devices > 1 and any(isinstance(module, _BatchNorm) for module in model.modules()):
        rank_zero_warn(
            "batch norm layers take statistics of their own on each device, fillers included: the "
            "run depends on the number of devices; trainer.sync_batchnorm=true changes that"
        )


def _over_devices(value: Tensor) -> Tensor:
    """Returns the sum over all ranks; its gradient is summed over them as well."""
    return all_reduce(value) if dist.is_initialized() else value
