"""Rotary positions: each pair of a head's channels turns by an angle that grows with the position.

Source: Su et al. 2021, section 3.2.2.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x [R, H, T, K] with the pairs (i, i + K / 2) of each head turned by their angles.

    Args:
        x: queries or keys, of R rows, H heads, T positions and head size K.
        cosine: of the angles, [R or 1, 1, T, K / 2] or [T, K / 2]; nothing learns from it.
        sine: as cosine.
    """
    if torch.compiler.is_compiling():  # a compiler fuses what is written plainly
        first, second = x.chunk(2, dim=-1)
        turned = first * cosine - second * sine, second * cosine + first * sine
        return torch.cat(turned, dim=-1)
    return _Rotation.apply(x, cosine, sine)


class _Rotation(torch.autograd.Function):
    """Passes over memory are what it costs: each half of the result is written where it belongs,
    in the order in which x lies, and the gradient is turned back the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _turned(x, cosine, sine, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _turned(gradient, cosine, sine, -1), None, None


def _turned(x: Tensor, cosine: Tensor, sine: Tensor, sign: int) -> Tensor:
    turned = torch.empty_like(x, dtype=torch.promote_types(x.dtype, cosine.dtype))
    first, second = x.chunk(2, dim=-1)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cosine, out=left).addcmul_(second, sine, value=-sign)
    torch.mul(second, cosine, out=right).addcmul_(first, sine, value=sign)
    return turned
