"""Linear layers, whose float32 products on a CPU with AVX-512 are computed by oneDNN.

torch gives these products to MKL, which on an AMD EPYC of the fifth generation, the only one tried,
reaches 95 GFLOP/s of a core where oneDNN reaches 215. Both sum the same products in float32, oneDNN
in an order that rounds up to four times worse (2.1e-4 beside 6.0e-5 at D = 2048). A share of a
batch may be so small that torch computes it. `torch.backends.mkldnn.set_flags(_enabled=False)`
turns it off, for what needs a gradient of a gradient or torch.func.

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
# them few: powers of two, then multiples of ROW_STEP or of a power of two that is a share of them.
ROW_STEP, SHARE_OF_ROWS = 64, 16


class Linear(nn.Linear):
    """torch's layer with the products of this file."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def take_over_linear_layers(module: nn.Module) -> None:
    """Let a network of other code have the products of this file, too: its weights, their names and
    its layers stay what they are. Layers of a class of their own are left alone."""
    for layer in module.modules():
        if type(layer) is nn.Linear:
            layer.__class__ = Linear


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what `F.linear` does, [N, E]. Args: x [N, D]; weight [E, D]; bias [E]."""
    if not suits_onednn(x, weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if torch.is_grad_enabled() else _whole(x, weight, bias)


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


def rounds_to_float32() -> bool:
    """Return whether products of float32 on this machine keep its 24 bits, and no fewer."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # was set by torch's newer names, of which it cannot tell
        return False


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
    number = len(rows)
    if number < ROW_STEP:
        missing = (1 << (number - 1).bit_length()) - number
    else:
        missing = -number % max(ROW_STEP, (1 << number.bit_length() - 1) // SHARE_OF_ROWS)
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = _as_rows(x)
    product = _product(_filled_up(rows), weight, bias)
    # No view, as what torch's layers return: it may be changed in place.
    return product[: len(rows)].view(*x.shape[:-1], len(weight)).detach()


class _Linear(torch.autograd.Function):
    """The layer where gradients are due; it keeps its own input and weight, and no copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wants_x, wants_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if wants_weight else None, weight if wants_x else None)
        ctx.shape = x.shape
        return _whole(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = _as_rows(gradient.contiguous())
        filled_up = _filled_up(rows)  # once for both products
        return (
            _product(filled_up, weight.T)[: len(rows)].view(ctx.shape) if wants_x else None,
            _sum_over_rows(filled_up, _filled_up(_as_rows(x))) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
        )
