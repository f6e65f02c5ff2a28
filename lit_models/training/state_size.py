"""How large a module's network and optimizer are, counted before or after they are built."""

import copy
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lit_models.training.memory import StateSize
from lit_models.training.optim import parameter_groups

ADAM_MOMENTS = 2.0  # assumed of a module that makes its optimizer out of sight
META = torch.device("meta")
_PROBE_WIDTH = 64
_TRUE_BYTES = {"64": 8, "16": 2}  # of `trainer.precision` with the ending -true; bf16 like 16


def size_before_setup(module: LightningModule, precision: str | int | None) -> StateSize | None:
    """Return the size of a module that is not built yet; None where the data decides it.

    A copy is built on torch's `meta` device, whose tensors have shapes and no memory.

    Args:
        module: as its constructor left it.
        precision: as the Trainer takes it.
    """
    if next(module.parameters(), None) is not None:
        return size_of(module, precision)  # built in its constructor
    sketch = copy.deepcopy(module)
    if hasattr(sketch, "init_from"):
        sketch.init_from = None  # the shapes are those of the network, not of the file
    try:
        sketch.weights_device = META  # type: ignore[assignment]  # of an ExactModule
        with isolate_rng(), META:
            sketch.configure_model()
    except Exception:
        # It needs a trainer, data or a real device. What is wrong with it in itself, it says again
        # when it is built for the run; until then its size is unknown.
        return None
    return size_of(sketch, precision)


def size_of(module: LightningModule, precision: str | int | None = None) -> StateSize | None:
    """Return the size of a module that is built; None where it has no parameters.

    Args:
        module: with its network.
        precision: as the Trainer takes it, where the module is not yet converted to it.
    """
    parameters = list(module.parameters())
    total = _count(parameters)
    if not total:
        return None
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    true = _true_bytes(precision)
    each = true or max(trained or parameters, key=Tensor.numel).element_size()
    weight_bytes = _bytes(parameters, true)
    return StateSize(
        num_parameters=total,
        num_trained=_count(trained),
        gathered_parameters=gathered_parameters(module, total),
        evaluated_parameters=total if is_overridden("validation_step", module) else 0,
        bytes_per_parameter=each,
        moments_per_parameter=_mean_moments(module),
        weight_bytes=None if weight_bytes == total * each else weight_bytes,
    )


def gathered_parameters(module: LightningModule, total: int) -> int:
    """Return the most parameters that fsdp has whole at a time: the largest block and those in
    none, or all where ranks call the blocks unevenly."""
    blocks = list(module.blocks()) if hasattr(module, "blocks") else []
    if not blocks or not getattr(module, "calls_blocks_evenly", True):
        return total
    in_blocks = _count({p for block in blocks for p in block.parameters()})
    return total - in_blocks + max(_count(block.parameters()) for block in blocks)


def sharded_groups(module: LightningModule) -> list[tuple[int, int]]:
    """Return (trained, frozen) parameters of each block that fsdp gathers, and last of the rest;
    frozen ones of another dtype as so many trained ones as have their bytes."""
    blocks = list(module.blocks()) if hasattr(module, "blocks") else []
    parts = [list(block.parameters()) for block in blocks]
    known = {parameter for part in parts for parameter in part}
    parts.append([parameter for parameter in module.parameters() if parameter not in known])
    whole = list(module.parameters())
    trained = [parameter for parameter in whole if parameter.requires_grad] or whole
    each = max(trained, key=Tensor.numel).element_size() if trained else 1
    return [
        (
            _count(p for p in part if p.requires_grad),
            _bytes(p for p in part if not p.requires_grad) // each,
        )
        for part in parts
    ]


def moments_per_parameter(factory: Any, kind: str = "matrices") -> float:
    """Return how many values an optimizer keeps for each parameter, found by one step of it.

    Args:
        factory: parameter groups -> optimizer; anything else counts as Adam.
        kind: of the parameter, as `parameter_groups` tells an optimizer.
    """
    if not callable(factory):
        return ADAM_MOMENTS
    weight = nn.Parameter(torch.zeros(_PROBE_WIDTH, _PROBE_WIDTH))
    weight.grad = torch.ones_like(weight)
    with isolate_rng():
        optimizer = factory([{"params": [("weight", weight)], "kind": kind, "lr_factor": 1.0}])
        optimizer.step()
    kept = [v for v in optimizer.state[weight].values() if isinstance(v, Tensor) and v.dim()]
    return sum(value.numel() for value in kept) / weight.numel()


def _mean_moments(module: nn.Module) -> float:
    """Return the mean over trained parameters: Muon keeps less for some kinds than for others."""
    factory = getattr(module, "optimizer", None)
    counts: Counter[str] = Counter()
    for group in parameter_groups(module):
        counts[group["kind"]] += _count(parameter for _, parameter in group["params"])
    if not counts:
        return moments_per_parameter(factory)
    moments = {kind: moments_per_parameter(factory, kind) for kind in counts}
    return sum(moments[kind] * count for kind, count in counts.items()) / counts.total()


def _true_bytes(precision: str | int | None) -> int | None:
    name = str(precision).removeprefix("bf")
    is_true = name.endswith("-true") or name == "64"
    return _TRUE_BYTES.get(name.removesuffix("-true")) if is_true else None


def _bytes(parameters: Iterable[Tensor], true_bytes: int | None = None) -> int:
    """Return the bytes of parameters; of floating ones as a true precision will have them."""
    return sum(
        p.numel() * (true_bytes if true_bytes and p.is_floating_point() else p.element_size())
        for p in parameters
    )


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)
