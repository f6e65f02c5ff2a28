"""The optimizer inside DeepSpeed's engine, as callbacks and checkpoints know optimizers.

DeepSpeed lays the parameters of a group end to end and cuts the row into one part per rank: its
gradients, moments and 32-bit weights are such parts. Here a row is one sharded tensor, and a
checkpoint holds what one device would write: whole moments by parameter name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from lit_models.training.optim import by_name

SHARED = ("step", "mu_product")  # of a state: one number for a parameter, equal for all of a group
OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop", "Adadelta")
ON_DEVICE = ("fused", "capturable")  # options of torch's optimizers that keep `step` on the device


class ZeroOptimizer(Optimizer):
    """One parameter per group, the row; its gradient is there between the last backward pass of a
    step and the update, and is what the update takes.

    Args:
        engine: of DeepSpeed, around `optimizer`.
        optimizer: of torch, whose groups hold this rank's parts of the rows.
        parameters: of each group before the engine was made, in the order of the row.
        mesh: of all ranks, with one axis.
    """

    def __init__(
        self,
        engine: Any,
        optimizer: Optimizer,
        parameters: list[list[nn.Parameter]],
        mesh: DeviceMesh,
    ) -> None:
        self._engine, self._inner, self._mesh = engine, optimizer, mesh
        self._parameters = parameters
        self._parts: list[Tensor] = [group["params"][0] for group in optimizer.param_groups]
        self._rows = [nn.Parameter(self._as_row(part.detach())) for part in self._parts]
        super().__init__(self._rows, optimizer.defaults)
        pairs = zip(optimizer.param_groups, self._rows, strict=True)
        self.param_groups = [_Group(group, row) for group, row in pairs]  # type: ignore[misc]
        self.state = optimizer.state
        by_name(self)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the update looks at `found_inf` on the device."""
        return getattr(self._inner, "_step_supports_amp_scaling", False)

    def take_gradients(self) -> None:
        """Show the mean gradients that the last backward pass of a step left in the engine."""
        found = self._engine.optimizer.averaged_gradients
        for index, row in enumerate(self._rows):
            part = torch.cat([piece.reshape(-1) for piece in found[index]])
            found[index] = [part]  # clipping in place changes what the update takes
            row.grad = self._as_row(part)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters; none where a callback has taken the gradients away.

        Args:
            closure: computes the gradients, and returns the loss.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(row.grad is None for row in self._rows):
            self.zero_grad()
            self._inner.step()  # of no gradient: nothing moves, and schedules hear of a step
            return loss
        for name in ("grad_scale", "found_inf"):
            if hasattr(self, name):
                setattr(self._inner, name, getattr(self, name))
        self._engine.step()
        self.zero_grad()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, those in the engine too."""
        engine_optimizer = self._engine.optimizer
        engine_optimizer.zero_grad(set_to_none=True)
        for index, row in enumerate(self._rows):
            row.grad = None
            engine_optimizer.averaged_gradients[index] = None
            engine_optimizer.all_grad_tensors[index] = None

    def whole_state(self, keeps: bool) -> dict[str, Any]:
        """Return what one device would save, on the CPU; a collective.

        Args:
            keeps: whether this rank wants it; the others get nothing.
        """
        state: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for group, part, parameters in self._by_group():
            values = {k: self._whole(k, v, keeps) for k, v in self.state.get(part, {}).items()}
            indices = range(first, first + len(parameters))
            first += len(parameters)
            if keeps and values:
                state |= zip(indices, states_in(values, parameters), strict=True)
            groups.append({**dict(group.items()), "params": list(indices)})
        return {"state": state, "param_groups": groups} if keeps else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this rank's parts of what one device or any strategy has saved.

        Raises:
            ValueError: other parameters, or parameters of one group that took unequal steps.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        _check_groups(state_dict["param_groups"], self._parameters)
        pairs = zip(self._by_group(), state_dict["param_groups"], strict=True)
        for (group, part, parameters), saved in pairs:
            states = [state_dict["state"].get(index, {}) for index in saved["params"]]
            self.state.pop(part, None)
            if any(states):
                self.state[part] = part_of(states, parameters, part, dist.get_rank(), saved)
            options = {k: v for k, v in saved.items() if k not in ("params", "param_names")}
            group.update(options)

    def _by_group(self) -> Iterator[tuple[Any, Tensor, list[nn.Parameter]]]:
        yield from zip(self.param_groups, self._parts, self._parameters, strict=True)

    def _as_row(self, part: Tensor) -> DTensor:
        return DTensor.from_local(part, self._mesh, [Shard(0)], run_check=False)

    def _whole(self, name: str, value: Any, keeps: bool) -> Any:
        """Return a row of a state, one part after the other: a device need not hold two."""
        if not _is_row(name, value):
            return _copy(value, torch.device("cpu"))
        pieces = []
        for rank in range(dist.get_world_size()):
            piece = value.detach().clone() if rank == dist.get_rank() else torch.empty_like(value)
            dist.broadcast(piece, src=rank)
            if keeps:
                pieces.append(piece.cpu())
        return torch.cat(pieces) if keeps else None


class _Group(MutableMapping[str, Any]):
    """The settings of an optimizer's group, shared with it, beside a parameter of its own."""

    def __init__(self, group: dict[str, Any], row: nn.Parameter) -> None:
        self._group, self._params = group, [row]

    def __getitem__(self, name: str) -> Any:
        return self._params if name == "params" else self._group[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name != "params":
            self._group[name] = value

    def __delitem__(self, name: str) -> None:
        del self._group[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)


def check_optimizer(optimizer: Optimizer) -> None:
    """Refuse an optimizer that needs more of a parameter than its numbers one by one.

    Raises:
        ValueError: such as Muon, which needs matrices.
    """
    kind = type(optimizer)
    if kind.__name__ not in OPTIMIZERS or kind is not getattr(torch.optim, kind.__name__):
        raise ValueError(
            f"strategy deepspeed lays parameters end to end and cuts the row between ranks; the "
            f"optimizer {kind.__name__} may need their shapes. Use one of torch.optim's "
            f"{', '.join(OPTIMIZERS)}, or --trainer.strategy=fsdp."
        )


def states_in(values: dict[str, Any], parameters: Sequence[Tensor]) -> Iterator[dict[str, Any]]:
    """Yield the state of each parameter of a group, in its shape.

    Args:
        values: name -> row, as long as all parameters or longer, or one number for all of them.
        parameters: in the order of the row; their shapes count.
    """
    begin = 0
    for parameter in parameters:
        end = begin + parameter.numel()
        yield {
            name: value[begin:end].clone().view(parameter.shape)
            if _is_row(name, value)
            else _copy(value)
            for name, value in values.items()
        }
        begin = end


def part_of(
    states: list[dict[str, Any]],
    parameters: Sequence[Tensor],
    part: Tensor,
    rank: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return what one rank holds of the states of a group's parameters: name -> its part of a row.

    Args:
        states: of each parameter, none empty.
        parameters: in the order of the row; their shapes count.
        part: this rank's part of the weights, whose size, type and device those of the row have.
        rank: whose part it is.
        options: of the group.

    Raises:
        ValueError: the states do not fit the parameters, or are not equal where they must be.
    """
    if any(state.keys() != states[0].keys() for state in states):
        raise ValueError(_unequal("moments", [sorted(state) for state in states]))
    found: dict[str, Any] = {}
    for name, first in states[0].items():
        values = [state[name] for state in states]
        if not _is_row(name, first):
            _check_equal(name, values)
            on_device = any(options.get(option) for option in ON_DEVICE)
            found[name] = _copy(first, part.device if on_device else torch.device("cpu"))
            continue
        _check_shapes(name, values, parameters)
        row = torch.cat([value.reshape(-1) for value in values])
        here = row[rank * part.numel() : (rank + 1) * part.numel()]
        filled = torch.zeros(part.numel(), dtype=part.dtype)  # behind the end of the row
        filled[: here.numel()] = here
        found[name] = filled.to(part.device)
    return found


def _is_row(name: str, value: Any) -> bool:
    return isinstance(value, Tensor) and name not in SHARED


def _copy(value: Any, device: torch.device | None = None) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, Tensor) else value


def _check_equal(name: str, values: list[Any]) -> None:
    numbers = [float(v) if isinstance(v, Tensor) else v for v in values]
    if any(number != numbers[0] for number in numbers):
        raise ValueError(_unequal(f"`{name}`", sorted({str(n) for n in numbers})))


def _check_groups(saved: list[dict[str, Any]], parameters: list[list[nn.Parameter]]) -> None:
    theirs, ours = [len(group["params"]) for group in saved], [len(group) for group in parameters]
    if theirs != ours:
        raise ValueError(
            f"the checkpoint's optimizer has groups of {theirs} parameters, this one of {ours}; "
            "resume with the optimizer and the model of the checkpoint."
        )


def _check_shapes(name: str, values: list[Any], parameters: Sequence[Tensor]) -> None:
    for value, parameter in zip(values, parameters, strict=True):
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            has = tuple(value.shape) if isinstance(value, Tensor) else value
            raise ValueError(
                f"the checkpoint's `{name}` of a parameter of shape {tuple(parameter.shape)} is "
                f"{has}; resume with the optimizer and the model of the checkpoint."
            )


def _unequal(what: str, found: list[Any]) -> str:
    shown = ", ".join(str(value) for value in found[:3])
    return (
        f"the checkpoint has unequal {what} for parameters of one group ({shown}): some were left "
        "out of steps, which strategy deepspeed cannot express. Resume with ddp or fsdp, or start "
        "from the weights with model.init_from."
    )
