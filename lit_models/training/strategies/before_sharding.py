"""What a module needs before its parameters are cut: equal ones on all ranks, blocks of its own."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from lit_models.training.keyed_dropout import dropout_rate


def equal_weights(module: nn.Module, device: torch.device) -> None:
    """Give every rank the parameters and buffers of rank 0, in all bits; a collective.

    Ranks may have drawn different ones: each would keep its part of another network.

    Args:
        module: with whole tensors on any device.
        device: of this rank, which the process group can send from.
    """
    with torch.no_grad():
        for tensor in itertools.chain(module.parameters(), module.buffers()):
            here = tensor.to(device).reshape(-1).contiguous()
            dist.broadcast(here.view(torch.uint8), src=0)
            tensor.copy_(here.view(tensor.shape))


def check_dropout(trainer: Trainer, module: LightningModule) -> None:
    """Refuse dropout whose masks would differ between devices that compute the same samples.

    Raises:
        ValueError: a rate above 0 without ExactDropout.
    """
    from lit_models.training.callbacks.exact_dropout import ExactDropout  # its package is large

    rate = dropout_rate(module)
    if rate and not any(isinstance(callback, ExactDropout) for callback in trainer.callbacks):
        size = trainer.strategy.tensor_parallel_size  # type: ignore[attr-defined]
        raise ValueError(
            f"tensor_parallel_size is {size}, and the network has "
            f"dropout {rate}, whose masks each device of a tensor group would draw by itself; set "
            "exact_dropout to true (the callback ExactDropout), or dropout to 0."
        )


def separate_frozen(blocks: list[nn.Module]) -> None:
    """Give each block frozen parameters of its own, in place: two groups cannot share any.

    Shared ones that learn are left to the library, which refuses them.
    """
    taken: set[int] = set()
    for block in blocks:
        own: dict[int, nn.Parameter] = {}
        for name, parameter in list(block.named_parameters(remove_duplicate=False)):
            if id(parameter) in taken and not parameter.requires_grad:
                owner, _, last = name.rpartition(".")
                copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                setattr(block.get_submodule(owner), last, own.setdefault(id(parameter), copied))
        taken |= {id(parameter) for parameter in block.parameters()}


def recompute_in_backward(block: nn.Module) -> None:
    """Make a block keep its inputs alone; its name and its parameters' names stay."""
    forward = block.forward

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return recomputed(forward, *args, use_reentrant=False, **kwargs)

    block.forward = recomputing  # type: ignore[method-assign]
