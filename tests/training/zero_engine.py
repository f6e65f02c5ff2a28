"""A small engine for tests, in the place of DeepSpeed's on a world of one."""

from typing import Any

import torch
from torch import Tensor, nn


class Engine:
    """Keeps a row of weights for itself, and updates it with the gradients that it shows."""

    def __init__(self, step: Any, optimizer: torch.optim.Optimizer) -> None:
        self.compute, self.inner, self.optimizer = step, optimizer, self
        self.weights = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [nn.Parameter(in_a_row(group["params"]))]
        self.rows = [group["params"][0] for group in optimizer.param_groups]
        self.averaged_gradients: dict[int, Any] = {}
        self.all_grad_tensors: dict[int, Any] = {}
        self.is_last = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)

    def set_gradient_accumulation_boundary(self, is_last: bool) -> None:
        self.is_last = is_last

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.is_last

    def backward(self, loss: Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def allreduce_gradients(self) -> None:
        if self.is_last:
            found = [[p.grad for p in group] for group in self.weights]
            self.averaged_gradients = dict(enumerate(found))

    def step(self) -> None:
        for index, row in enumerate(self.rows):
            (row.grad,) = self.averaged_gradients[index]
        self.inner.step()
        for row, group in zip(self.rows, self.weights, strict=True):
            row.grad = None
            for weight, part in zip(group, row.split([p.numel() for p in group]), strict=True):
                weight.data.copy_(part.view_as(weight))

    def zero_grad(self, set_to_none: bool) -> None:
        for weight in (p for group in self.weights for p in group):
            weight.grad = None

    def refresh_fp32_params(self) -> None:
        for row, group in zip(self.rows, self.weights, strict=True):
            row.data.copy_(in_a_row(group))

    def destroy(self) -> None:
        self.rows.clear()


def in_a_row(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
