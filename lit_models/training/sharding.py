"""Tensors that may be sharded over devices: whole ones from shards, and shards of whole ones."""

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(value: Any) -> Any:
    """Return a sharded tensor whole, a collective; anything else as it is."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


def on_cpu(value: Any, keeps: bool = True) -> Any:
    """Return a tensor's copy on the CPU, or an empty one where it is not kept."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if keeps else value.new_empty(0)


def sharded_like(value: Any, parameter: Tensor) -> Any:
    """Return this rank's shard of a whole tensor that has a parameter's shape.

    There is no communication: every rank has the whole tensor and cuts its own part.
    """
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value  # a step counter, for instance
    like = value.to(parameter.device)
    return distribute_tensor(like, parameter.device_mesh, parameter.placements, src_data_rank=None)
