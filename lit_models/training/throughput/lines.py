"""A log interval as a line of `throughput.jsonl` and as numbers for loggers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lit_models.training.throughput.clock import BACKWARD, FORWARD
from lit_models.training.throughput.flops import (
    FlopCount,
    is_compiled,
    matmul_ceiling,
    model_flops,
)
from lit_models.training.throughput.intervals import Interval
from lit_models.training.throughput.peaks import arithmetic, dtype_of, peak_flops
from lit_models.training.throughput.profiler import PhaseProfiler
from lit_models.training.throughput.ranks import Share, slowest_rank


@dataclass
class Capacity:
    """What a device can do, and what a token asks of it.

    Attributes:
        peak: dense FLOP/s by its data sheet; None where unknown.
        ceiling: FLOP/s of a matrix product that was measured; None where it was not.
        flops_per_position: None where it was not counted.
    """

    peak: float | None = None
    ceiling: float | None = None
    flops_per_position: float | None = None

    def counters(self, module: nn.Module) -> dict[int, FlopCount]:
        """Return what counts the arithmetic of each phase; nothing where there is nothing to
        compare it with, or something is compiled, which a count would switch off."""
        if (self.peak is None and self.ceiling is None) or is_compiled(module):
            return {}
        return {FORWARD: FlopCount(), BACKWARD: FlopCount()}

    def take_count(self, profiler: PhaseProfiler, positions: int) -> None:
        """After the first step: keep its arithmetic per position, and count no more.

        Args:
            profiler: that has counted.
            positions: that the step computed on this rank, padding included.
        """
        forward, backward = (profiler.counts[part].total for part in (FORWARD, BACKWARD))
        profiler.stop_counting()
        if positions and forward:
            self.flops_per_position = model_flops(forward, backward) / positions

    def share_of(self, limit: float | None, tokens_per_s: float, devices: int) -> float | None:
        """Return the share of a limit that the useful tokens of all devices take."""
        if limit is None or self.flops_per_position is None:
            return None
        return round(tokens_per_s * self.flops_per_position / (limit * devices), 4)


def capacity_of(device: torch.device, precision: str, measures: bool) -> Capacity:
    """Return what a device can do in a precision.

    Args:
        device: of this rank.
        precision: `trainer.precision`.
        measures: measure the matmul ceiling too.
    """
    dtype = dtype_of(arithmetic(precision))
    ceiling = matmul_ceiling(device, dtype) if measures and dtype is not None else None
    return Capacity(peak_flops(device, precision), ceiling)


def line_of(interval: Interval, attempt: int, capacity: Capacity) -> dict[str, Any]:
    """Return the line of an interval, but for the machine.

    Args:
        interval: known on all ranks.
        attempt: of the run folder.
        capacity: of each device.
    """
    shares, seconds = interval.shares, max(interval.seconds, 1e-9)
    samples, tokens, positions = (
        sum(getattr(share, name) for share in shares) for name in ("samples", "tokens", "positions")
    )
    tokens_per_s = tokens / seconds
    return {
        "attempt": attempt,
        "step": interval.step,
        "steps": interval.steps,
        "seconds": interval.seconds,
        "samples_per_s": round(samples / seconds, 3),
        "tokens_per_s": round(tokens_per_s, 3),
        "padding_share": round(1 - tokens / positions, 6) if positions else 0.0,
        "split": interval.split,
        "mfu": capacity.share_of(capacity.peak, tokens_per_s, len(shares)),
        "matmul_share": capacity.share_of(capacity.ceiling, tokens_per_s, len(shares)),
        **_ranks(shares, is_known=interval.split["communication"] is not None),
    }


def _ranks(shares: list[Share], is_known: bool) -> dict[str, Any]:
    seconds = [round(share.step_seconds, 6) for share in shares] if is_known else None
    return {
        "ranks": {"seconds": seconds},
        "slowest_rank": None if seconds is None else slowest_rank(seconds),
    }


def logged(line: dict[str, Any], name: str = "throughput") -> dict[str, float]:
    """Return the numbers of a line under names with slashes; what is None is left out."""
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            found |= logged(value, f"{name}/{key}")
        elif isinstance(value, list):
            found |= logged({str(i): v for i, v in enumerate(value)}, f"{name}/{key}")
        elif isinstance(value, int | float) and key not in ("attempt", "step", "index"):
            found[f"{name}/{key}"] = value
    return found
