"""Sharded tensors and split layers: parts and wholes, norms, and the plan of a tensor group.

A network's `tensor_plan` names, by patterns, the layers that several devices share. All devices of
a tensor group process the same samples: each computes its own heads and inner channels of the split
layers, and everything else. Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


@dataclass(frozen=True)
class TensorSplit:
    """How the devices of a tensor group share a linear layer, or the layers of a module.

    Args:
        style: `columns`: each device has some of the outputs. `rows`: each has some of the inputs,
            and the results are summed. `input`: layers split by columns read the module's first
            argument, and its gradient is summed once for all of them.
        unit: name of the setting whose units stay whole on a device, such as `num_heads`.
        count: number of these units; the size of a tensor group must divide it.
    """

    style: Literal["columns", "rows", "input"]
    unit: str = ""
    count: int = 0


def check_tensor_plan(module: nn.Module, plan: dict[str, TensorSplit], size: int) -> None:
    """Raise ValueError if a module cannot be split over the `size` devices of a tensor group.

    Args:
        plan: name pattern -> split, from its `tensor_plan()`.
    """
    name = type(module).__name__
    planless = f"{name} has no tensor_plan(), as own decoders, Llama, Mistral and Qwen have it"
    reasons = [] if plan else [planless]
    reasons += ["blocks are compiled (model.computation.compile)"] if is_compiled(module) else []
    reasons += [
        f"{name} is a {type(layer).__name__}, no plain linear layer (model.lora?)"
        for name, layer, split in planned_layers(module, plan)
        if split.style != "input" and type(layer) is not nn.Linear
    ]
    units = {split.unit: split.count for split in plan.values() if split.unit}
    reasons += [f"it does not divide {unit} {n}" for unit, n in units.items() if n % size]
    if reasons:
        raise ValueError(
            f"tensor_parallel_size is {size}, but {reasons[0]}; change that, or leave "
            "tensor_parallel_size out: fsdp shards any module without it."
        )


def is_compiled(module: nn.Module) -> bool:
    """Return whether torch.compile has compiled any part, in place or by a wrapper."""
    # A check for the wrapper's class would import the compiler, which takes seconds.
    parts = module.modules()
    return any(p._compiled_call_impl is not None or hasattr(p, "_orig_mod") for p in parts)


def planned_layers(
    module: nn.Module, plan: dict[str, TensorSplit]
) -> Iterator[tuple[str, nn.Module, TensorSplit]]:
    """Yield name, layer and split of every layer in a plan.

    Raises:
        ValueError: a pattern matches no name.
    """
    layers = dict(module.named_modules())
    for pattern, split in plan.items():
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"tensor_plan(): {pattern} fits no layer of {type(module).__name__}; patterns are "
                "those of named_modules(), such as network.layers.*.attention."
            )
        yield from ((name, layers[name], split) for name in names)


def split_layers(module: nn.Module, plan: dict[str, TensorSplit], mesh: DeviceMesh) -> None:
    """Reduce the planned layers to this rank's parts, in place and without communication; parameter
    names stay. The mesh is that of the tensor group."""

    def whole_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Mark the first argument as whole on all devices: its gradient is the sum of theirs."""
        first, *others = inputs
        return (DTensor.from_local(first, mesh, [Replicate()], run_check=False), *others)

    for _, layer, split in planned_layers(module, plan):
        if split.style == "input":
            layer.register_forward_pre_hook(whole_input)
            continue
        style = ColwiseParallel() if split.style == "columns" else RowwiseParallel()
        parallelize_module(layer, mesh, style, src_data_rank=None)


def whole(value: Any) -> Any:
    """Return a sharded tensor gathered, by a collective; any other value unchanged."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


def sharded_like(value: Any, parameter: Tensor) -> Any:
    """Return this rank's shard of a whole tensor with a parameter's shape, without communication;
    any other value unchanged. The tensor is cut where it is, perhaps in a memory-mapped file: only
    the shard is read and sent to the parameter's device."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
        return value
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    mesh, placements, own = parameter.device_mesh, parameter.placements, value
    for dim, size in enumerate(value.shape):
        cuts = [p if getattr(p, "dim", None) == dim else Replicate() for p in placements]
        if any(not cut.is_replicate() for cut in cuts):
            places = torch.arange(size).view([-1 if n == dim else 1 for n in range(value.dim())])
            ours = distribute_tensor(places, mesh, cuts, src_data_rank=None).to_local()
            own = own.index_select(dim, ours.flatten().to(value.device))
    own = own.clone() if own is value else own  # not a view of a mapped file
    like = {"shape": value.shape, "stride": value.stride()}
    return DTensor.from_local(own, mesh, placements, run_check=False, **like)


def local_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's part of each tensor, as views of the same memory."""
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def num_copies(tensor: Tensor) -> int:
    """Return how many ranks hold the same part of a tensor as this one."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return dist.get_world_size() // math.prod(n for n, p in axes if not p.is_replicate())


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm [] of all whole tensors, by one collective if they are sharded.

    torch's function gets the local parts: with sharded tensors it would apply the sharding rules
    one by one, which takes seconds instead of a millisecond.
    """
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return torch.nn.utils.get_total_norm(tensors)
    by_copies: dict[int, list[Tensor]] = {}
    for tensor, part in zip(tensors, local_parts(tensors), strict=True):
        by_copies.setdefault(num_copies(tensor), []).append(part)
    norms = {n: torch.nn.utils.get_total_norm(parts) for n, parts in by_copies.items()}
    squared = torch.stack([norm.square() / n for n, norm in norms.items()]).sum()
    dist.all_reduce(squared)
    return squared.sqrt()
