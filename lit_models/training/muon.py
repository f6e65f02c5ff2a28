"""Muon for the matrices of hidden layers and AdamW for all else, as one optimizer.

Lightning takes one optimizer per run, and one schedule then moves both rates.
"""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from lit_models.training.sharding import local_parts, sharded_like

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: the steepest slope at zero
NORM_EPS = 1e-7
RMS_OF_ADAMW = 0.2


class MuonAdamW(Optimizer):
    """Muon on groups of kind "matrices", AdamW on the others; groups come of `parameter_groups`.

    Muon: Nesterov momentum, whose matrix is made nearly orthogonal by Newton-Schulz iterations, and
    decoupled weight decay. A matrix [n, m] is then scaled by 0.2 sqrt(max(n, m)), which gives its
    update the size that AdamW's usually has: rates and weight decay are those of an AdamW run.

    A sharded matrix is gathered for the iterations, every rank computes them and keeps its shard;
    the momentum stays sharded. Parameters without a gradient are left as they are.

    Args:
        params: groups of `parameter_groups`, each with its kind.
        lr: rate of the matrices.
        adamw_factor: AdamW's rate as a multiple of it.
        momentum: of Muon, 0 to below 1.
        weight_decay: of both, where a group does not say otherwise.
        betas: of AdamW.
        eps: of AdamW.
        ns_steps: iterations, from 1.
        scaling: `adamw` as above; `shape` multiplies by sqrt(max(1, n / m)) instead, for the rates
            near 0.02 of the first Muon runs.
        ns_dtype: of the iterations; `auto` takes bfloat16 on a GPU and that of the gradient on a
            CPU.

    Raises:
        ValueError: a value outside its range, or parameters without their kind.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; the scaling: Liu et al.
    2025, "Muon is scalable for LLM training", arXiv 2502.16982, section 2.2.
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        adamw_factor: float = 1.0,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        ns_steps: int = 5,
        scaling: Literal["adamw", "shape"] = "adamw",
        ns_dtype: Literal["auto", "bfloat16", "gradient"] = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "adamw_factor": adamw_factor,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "ns_steps": ns_steps,
            "scaling": scaling,
            "ns_dtype": ns_dtype,
            "fused": True,  # torch then keeps AdamW's step counts beside the parameters
        }
        _check(defaults)
        groups = list(params)
        if not all(isinstance(group, dict) and "kind" in group for group in groups):
            raise ValueError(
                "MuonAdamW must be told which parameters are matrices of hidden layers; give it "
                "lit_models.training.optim.parameter_groups(module), not module.parameters()."
            )
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move every parameter that has a gradient; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            is_hidden = group["kind"] == "matrices"
            for parameter in trained:
                if is_hidden and parameter.ndim == 2:
                    self._orthogonal_step(parameter, group)
            self._adamw_step([p for p in trained if not (is_hidden and p.ndim == 2)], group)
        return loss

    def _orthogonal_step(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        grad, buffer, part = local_parts([parameter.grad, state["momentum_buffer"], parameter])
        buffer.lerp_(grad, 1 - group["momentum"])
        moved = _gathered(grad.lerp(buffer, group["momentum"]), parameter)
        dtype = torch.bfloat16 if _is_half(group["ns_dtype"], moved) else moved.dtype
        update = orthogonal(moved.to(dtype), group["ns_steps"])
        part.mul_(1 - group["lr"] * group["weight_decay"])
        factor = _factor(group["scaling"], *parameter.shape)
        [update] = local_parts([sharded_like(update, parameter)])
        part.add_(update, alpha=-group["lr"] * factor)

    def _adamw_step(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device, dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        if not parameters:
            return
        states = [self.state[p] for p in parameters]
        adamw(  # element by element: each rank on its own shards
            local_parts(parameters),
            local_parts([p.grad for p in parameters]),
            local_parts([s["exp_avg"] for s in states]),
            local_parts([s["exp_avg_sq"] for s in states]),
            [],
            [s["step"] for s in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"] * group["adamw_factor"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal(matrix: Tensor, num_steps: int) -> Tensor:
    """Return nearly the closest orthogonal matrix [n, m]: singular values between 0.5 and 1.5.

    Args:
        matrix: [n, m] in the dtype of the iterations; used up.
        num_steps: iterations.
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=NORM_EPS))  # the spectral norm is then at most 1
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _gathered(part: Tensor, parameter: Tensor) -> Tensor:
    """Return the whole of a tensor of which this rank has the part that it has of `parameter`."""
    if not isinstance(parameter, DTensor):
        return part
    mesh = parameter.device_mesh
    return DTensor.from_local(
        part.to(mesh.device_type),  # shards may be kept in the host's memory
        mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    ).full_tensor()


def _is_half(ns_dtype: str, matrix: Tensor) -> bool:
    if ns_dtype == "auto":
        return matrix.device.type != "cpu"
    return ns_dtype == "bfloat16"


def _factor(scaling: str, rows: int, columns: int) -> float:
    if scaling == "adamw":
        return RMS_OF_ADAMW * max(rows, columns) ** 0.5
    return max(1.0, rows / columns) ** 0.5


def _check(values: dict[str, Any]) -> None:
    for name in ("lr", "adamw_factor", "weight_decay", "eps"):
        if values[name] < 0:
            raise ValueError(f"{name} must be 0 or more, got {values[name]}.")
    decays = [("momentum", values["momentum"]), *(("each of betas", b) for b in values["betas"])]
    for name, value in decays:
        if not 0 <= value < 1:
            raise ValueError(f"{name} must be 0 to below 1, got {value}.")
    if values["ns_steps"] < 1:
        raise ValueError(f"ns_steps must be at least 1, got {values['ns_steps']}; usual is 5.")
    choices = {"scaling": ("adamw", "shape"), "ns_dtype": ("auto", "bfloat16", "gradient")}
    for name, allowed in choices.items():
        if values[name] not in allowed:
            raise ValueError(f'{name} must be {" or ".join(allowed)}, got "{values[name]}".')
