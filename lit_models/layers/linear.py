"""Linear layers, whose float32 products on a CPU with AVX-512 are computed by oneDNN.

torch gives these products to MKL, which on an AMD EPYC of the fifth generation reaches 95 GFLOP/s
of a core where oneDNN reaches 215. Both sum the same products in float32, oneDNN with errors a few
times those of MKL (2.1e-4 beside 6.0e-5 at D = 2048). Small products stay with MKL, to which the
share of a batch may fall where more devices divide it. Second derivatives and the transforms of
torch.func do not work through these layers; `torch.backends.mkldnn.set_flags(_enabled=False)`
turns oneDNN off.

Shapes: N rows, or any leading dimensions, D inputs, E outputs.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# A call of oneDNN takes 30 microseconds longer, as long as so many multiplications save.
SMALL_PRODUCT = 1 << 22
# oneDNN keeps 0.3 to 0.7 MB of code for each number of rows that it has met: rows of zeros make
# them few, multiples of ROW_STEP, or of a power of two that is a share of the rows.
ROW_STEP, SHARE_OF_ROWS = 64, 16


class Linear(nn.Linear):
    """torch's layer with the products of this file."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `F.linear` does, [N, E]. Args: x [N, D]; weight [E, D]; bias [E]."""
    if not suits_onednn(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias)
    rows = _as_rows(x)
    return _of_rows(rows, _product(_filled_up(rows), weight, bias), x)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Return gradient @ weight, [N, D]. Args: gradient [N, E]; weight [E, D]."""
    if suits_onednn(gradient, weight.T):
        return _product(_filled_up(gradient), weight.T)[: len(gradient)]
    return gradient @ weight


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return gradient.T @ x, [E, D]. Args: gradient [N, E]; x [N, D]."""
    if suits_onednn(gradient.T, x.T):
        return _sum_over_rows(_filled_up(gradient), _filled_up(x))
    return gradient.T @ x


def suits_onednn(x: Tensor, weight: Tensor) -> bool:
    """Return whether oneDNN computes x @ weight.T sooner than torch would.

    It goes by kind and size alone, so that equal batches take equal ways on all ranks.
    """
    return (
        not torch.compiler.is_compiling()  # which has products of its own
        and x.dtype == weight.dtype == torch.float32
        and x.numel() * weight.shape[0] >= SMALL_PRODUCT
        and x.device.type == weight.device.type == "cpu"
        and _has_onednn()
        and torch.backends.mkldnn.enabled
        and _is_plain(x)
        and _is_plain(weight)
        and not torch.is_autocast_enabled("cpu")
    )


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter)  # no part of one that several processes share


@cache
def _has_onednn() -> bool:
    # The name is private (inductor calls it); a test pins it.
    has_call = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_call and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _sum_over_rows(gradient: Tensor, x: Tensor) -> Tensor:
    if gradient.shape[1] <= x.shape[1]:
        return _product(gradient.T, x.T)
    return _product(x.T, gradient.T).T  # the wider factor as the weight: a fifth faster


def _filled_up(rows: Tensor) -> Tensor:
    """Return rows [N, D] with rows of zeros after them, up to a number that others have, too."""
    step = max(ROW_STEP, (1 << len(rows).bit_length() - 1) // SHARE_OF_ROWS)
    missing = -len(rows) % step
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _of_rows(rows: Tensor, product: Tensor, like: Tensor) -> Tensor:
    return product[: len(rows)].view(*like.shape[:-1], product.shape[-1])


class _Linear(torch.autograd.Function):
    """The layer where gradients are due: products of as many multiplications as its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = _as_rows(x)
        filled_up = _filled_up(rows)
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(filled_up if wants_weight else None, weight if wants_x else None)
        output = _of_rows(rows, _product(filled_up, weight, bias), x)
        return output.detach()  # no view, so that it may be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = _as_rows(gradient.contiguous())  # one copy for both products
        filled_up = _filled_up(rows)
        return (
            _of_rows(rows, _product(filled_up, weight.T), gradient) if wants_x else None,
            _sum_over_rows(filled_up, x) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
