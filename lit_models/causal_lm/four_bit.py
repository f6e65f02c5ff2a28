"""Weights that stand still in four bits: the numbers NF4 in blocks, each with its largest value.

bitsandbytes packs, unpacks and multiplies, on CPUs and GPUs; it is imported inside functions.
Source: Dettmers et al. 2023, "QLoRA", section 3, without the second quantisation of the scales.
Shapes: D inputs of a layer, E outputs, P = ceil(E D / 2) bytes, S = ceil(E D / 64) blocks.
"""

import logging
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

BLOCK_SIZE = 64
KIND = "nf4"


def check_installed() -> None:
    """Refuse a machine without the library.

    Raises:
        RuntimeError: it is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise RuntimeError(
            f"lora.base_dtype {KIND} needs bitsandbytes, which is not installed: pip install "
            "'unisono[quantised]', or take base_dtype bfloat16."
        )


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in four bits.

    Args:
        weight: [E, D] of any floating dtype; on the meta device the result has shapes alone.

    Returns:
        Two numbers a byte [P] uint8, and the largest absolute value of each block [S] float32.

    Raises:
        RuntimeError: bitsandbytes is not installed.
    """
    number = weight.numel()
    if weight.is_meta:
        sizes = (-(-number // 2), torch.uint8), (-(-number // BLOCK_SIZE), torch.float32)
        values, largest = (torch.empty(n, dtype=kind, device="meta") for n, kind in sizes)
        return values, largest
    given = weight.detach().float().contiguous()
    values, state = _library().functional.quantize_4bit(
        given, blocksize=BLOCK_SIZE, quant_type=KIND
    )
    return values.reshape(-1), state.absmax


def unpacked(values: Tensor, largest: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the weight [E, D] float32 that `packed` has rounded.

    Args:
        values: [P] uint8.
        largest: [S].
        shape: E and D.

    Raises:
        RuntimeError: bitsandbytes is not installed.
    """
    if values.is_meta:
        return torch.empty(shape, device="meta")
    state = _state(largest, shape, torch.float32)
    return _library().functional.dequantize_4bit(values.reshape(-1, 1), state)


def product(x: Tensor, values: Tensor, largest: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return x times the transposed weight [..., E] in the dtype of x.

    The weight is unpacked for the length of the product, and once more in the backward pass.

    Args:
        x: [..., D]; float64 is computed in float32, which the library knows at most.
        values: [P] uint8.
        largest: [S].
        shape: E and D.
    """
    given = x.float() if x.dtype == torch.float64 else x
    state = _state(largest, shape, given.dtype)
    return _library().matmul_4bit(given, values, state).to(x.dtype)


def _state(largest: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Any:
    return _library().functional.QuantState(
        largest.float(), torch.Size(shape), blocksize=BLOCK_SIZE, quant_type=KIND, dtype=dtype
    )


@cache
def _library() -> Any:
    check_installed()
    # On some CPUs it advises to install what would fetch a kernel from the network.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    register_flop_formula(torch.ops.bitsandbytes.gemm_4bit, get_raw=True)(_flops)
    return bitsandbytes


def _flops(x: Tensor, values: Tensor, shape: list[int], *others: Any, **more: Any) -> int:
    """Return what a product of x [..., D] takes; the arguments are those of gemm_4bit."""
    return 2 * x.numel() * shape[0]
