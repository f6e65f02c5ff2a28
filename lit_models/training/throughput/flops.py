"""The arithmetic of a step, counted where it happens, and what a device can do of it at most."""

import time
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten
MATMUL_SIZE, ROUNDS, MOST_SECONDS = 8192, 20, 1.0
SMALL_SIZE = 1024  # on a CPU, where a large product takes seconds


class FlopCount(TorchDispatchMode):
    """Adds up the FLOPs of matrix products, convolutions and attention while it is entered.

    Each operation runs as it would without it: no result and no random state is another. Kernels
    that torch's table of formulas does not know (of Triton, such as liger's) count nothing. It is
    never entered around compiled code (`is_compiled`): Dynamo leaves what it first meets in such a
    mode uncompiled for as long as the process lives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.total += int(flop_registry[packet](*args, **kwargs, out_val=result))
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:
            self.total += sdpa_flop_count(*(t.shape for t in args[:3]))
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.total += sdpa_backward_flop_count(*(t.shape for t in args[:4]))
        return result


def is_compiled(module: nn.Module) -> bool:
    """Return whether any part runs by torch.compile: compiled in place, wrapped, or by Lightning,
    which unwraps a LightningModule and keeps its context."""
    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    # `_orig_mod` is what an OptimizedModule wraps; its class would import Dynamo: seconds.
    return any(m._compiled_call_impl is not None or "_orig_mod" in m._modules
               for m in module.modules())  # fmt: skip


def model_flops(forward: int, backward: int) -> int:
    """Return the FLOPs that a step needs: a backward pass needs at most twice its forward, and
    what is more is activation checkpointing, which computes the forward again."""
    return forward + min(backward, 2 * forward)


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the FLOP/s of a product of two square matrices, the best of some rounds within a
    second; None where the device has no memory for it. It draws no number of the run's.

    Args:
        device: to measure.
        dtype: of the factors; float32 follows `torch.get_float32_matmul_precision()`.
    """
    size = MATMUL_SIZE if device.type == "cuda" else SMALL_SIZE
    try:
        generator = torch.Generator(device).manual_seed(0)
        a = torch.randn(size, size, device=device, generator=generator).to(dtype)
        best, end = float("inf"), time.perf_counter() + MOST_SECONDS
        for _ in range(ROUNDS):
            _wait(device)
            start = time.perf_counter()
            torch.mm(a, a)  # from the second round on, its result takes the last one's place
            _wait(device)
            best = min(best, time.perf_counter() - start)
            if time.perf_counter() > end:
                break
    except torch.OutOfMemoryError:
        rank_zero_warn(
            "the matmul ceiling is unknown: the device has no memory left for two matrices of "
            f"{size} x {size}; free some, or leave it with Throughput(measures_ceiling=False)."
        )
        return None
    return 2 * size**3 / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
