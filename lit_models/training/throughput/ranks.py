"""What ranks tell each other once per log interval, and which of them is slow."""

import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SLOW = 1.2  # times the median of all ranks
NOTICEABLE_S = 0.002  # of a step; less is the noise of the machine
CONSISTENTLY = 3  # intervals one after the other


@dataclass(frozen=True)
class Share:
    """What one rank did in a log interval.

    Args:
        step_seconds: mean of a step before it waits for other ranks.
        samples: that it learned from.
        tokens: of those, as the plan counts their lengths.
        positions: that it computed, padding and fillers included.
    """

    step_seconds: float
    samples: int
    tokens: int
    positions: int


class Shares:
    """The shares of all ranks: one small all-reduce, begun here and waited for when read.

    Args:
        mine: of this rank.
        device: of the process group.
    """

    def __init__(self, mine: Share, device: torch.device) -> None:
        self._work: Any = None
        row = [mine.step_seconds, mine.samples, mine.tokens, mine.positions]
        self._rows = torch.tensor([row], dtype=torch.float64)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._rows = _placed(self._rows, device)
            self._work = dist.all_reduce(self._rows, async_op=True)

    @property
    def has_others(self) -> bool:
        """Whether there is another rank to wait for."""
        return self._work is not None

    def read(self) -> list[Share]:
        """Return them in the order of ranks."""
        if self._work is not None:
            self._work.wait()
        return [Share(row[0], *map(int, row[1:])) for row in self._rows.tolist()]


def _placed(row: Tensor, device: torch.device) -> Tensor:
    """Return [ranks, columns]: the row at this rank's place, zeros elsewhere."""
    rows = torch.zeros(dist.get_world_size(), row.shape[1], dtype=row.dtype)
    rows[dist.get_rank()] = row[0]
    return rows.to(device)


def slowest_rank(seconds: list[float]) -> int | None:
    """Return the slowest rank where it takes more than 1.2 times the median; of two, the faster
    is the median."""
    slowest = max(range(len(seconds)), key=seconds.__getitem__)
    is_slow = seconds[slowest] > SLOW * statistics.median_low(seconds)
    return slowest if is_slow else None


class Stragglers:
    """Watches for a rank that is slow in several intervals one after the other."""

    def __init__(self) -> None:
        self._suspect: int | None = None
        self._count = 0
        self._has_warned = False

    def warning(self, seconds: list[float]) -> str | None:
        """Return what to tell the user; once in a run.

        Args:
            seconds: mean of a step of each rank before it waits.
        """
        rank, median = slowest_rank(seconds), statistics.median_low(seconds)
        if rank is not None and seconds[rank] - median < NOTICEABLE_S:
            rank = None
        self._count = self._count + 1 if rank is not None and rank == self._suspect else 1
        self._suspect = rank
        if rank is None or self._count < CONSISTENTLY or self._has_warned:
            return None
        self._has_warned = True
        return (
            f"rank {rank} is slow: {seconds[rank] * 1e3:.1f} ms of a step before it waits "
            f"for others, {seconds[rank] / median:.2f} times the median of {median * 1e3:.1f} ms, "
            f"in {CONSISTENTLY} intervals one after the other; all ranks wait for it. "
            "topology.json says where it runs: look for other programs there, at clocks and "
            "temperature of its device (`unisono doctor`), and at its data loading."
        )
