"""Tensor parallelism: the layers of a network that several devices share, and how they share them.

A network says so by patterns of names (`tensor_plan`). Every device of a tensor group computes the
same samples: its own heads and inner channels of the layers that are split, and all of the rest.
Source: Shoeybi et al. 2019, "Megatron-LM", section 3.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Split:
    """How the devices of a tensor group share a linear layer, or the layers of a module.

    Args:
        style: `columns`: each computes some of the outputs, of the whole input. `rows`: each has
            some of the inputs, and the results are added up. `input`: a module whose layers split
            by columns read one input, its first argument: that one's gradient is added up once.
        unit: name of what stays whole on a device, such as `num_heads`.
        count: how many of these there are; the size of a tensor group must divide it.
    """

    style: Literal["columns", "rows", "input"]
    unit: str = ""
    count: int = 0


def check_tensor_plan(module: nn.Module, plan: dict[str, Split], size: int) -> None:
    """Refuse what cannot be split among so many devices.

    Args:
        module: with its network.
        plan: name pattern -> split, of its `tensor_plan()`.
        size: devices of a tensor group.

    Raises:
        ValueError: there is no plan, a layer is no plain linear one, blocks are compiled, or the
            size does not divide what stays whole.
    """
    asked = f"tensor_parallel_size is {size}, but"
    if not plan:
        raise ValueError(
            f"{asked} {type(module).__name__} has no tensor_plan(), which says how its layers are "
            "split; LitCausalLM and LitSnippetWriter with the own decoder have one. Leave it out: "
            "fsdp shards any module without it."
        )
    for name, layer, split in planned_layers(module, plan):
        if split.style != "input" and type(layer) is not nn.Linear:
            raise ValueError(
                f"{asked} {name} is a {type(layer).__name__}, and only plain linear layers can be "
                "split. Leave out what has changed it, such as model.lora, or tensor_parallel_size."
            )
    if any(part._compiled_call_impl is not None for part in module.modules()):
        raise ValueError(
            f"{asked} blocks are compiled, which does not know split layers; set "
            "model.computation.compile to false, or leave tensor_parallel_size out."
        )
    units = {split.unit: split.count for split in plan.values() if split.unit}
    wrong = [f"{unit} {count}" for unit, count in units.items() if count % size]
    if wrong:
        common = math.gcd(*units.values())
        fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        raise ValueError(
            f"tensor_parallel_size {size} does not divide {' nor '.join(wrong)}; sizes that fit "
            f"this network: {fitting}. Take one of them, or change the network."
        )


def planned_layers(
    module: nn.Module, plan: dict[str, Split]
) -> Iterator[tuple[str, nn.Module, Split]]:
    """Yield name, layer and split of all that a plan names.

    Raises:
        ValueError: a pattern fits no name.
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


def split_layers(module: nn.Module, plan: dict[str, Split], mesh: DeviceMesh) -> None:
    """Give this rank its part of the planned layers, in place; names of parameters stay.

    The strategy has made the whole weights equal on all ranks; there is no communication.

    Args:
        module: whose plan has been checked.
        plan: name pattern -> split.
        mesh: one-dimensional, of a tensor group.
    """
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    # It warns of sums in another order where a tensor is only gathered, in two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for _, layer, split in planned_layers(module, plan):
        if split.style == "input":
            layer.register_forward_pre_hook(partial(_shared_input, mesh))
            continue
        style = ColwiseParallel() if split.style == "columns" else RowwiseParallel()
        parallelize_module(layer, mesh, style, src_data_rank=None)


def _shared_input(mesh: DeviceMesh, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Mark the first argument as whole on all devices: its gradient is the sum of theirs."""
    from torch.distributed.tensor import DTensor, Replicate

    first, *others = inputs
    assert isinstance(first, torch.Tensor)
    return (DTensor.from_local(first, mesh, [Replicate()], run_check=False), *others)
