"""Angles of rotary positions; `layers.rotary` turns heads by them.

Shapes: R rows, T positions, K head size. Source: Su et al. 2021, section 3.2.2.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 slows down slow rotations, so that a longer context turns no further.

    Frequencies that turn less than `low_freq_factor` times in the original context are divided by
    `factor`, those that turn more than `high_freq_factor` times are kept, with a slope between.

    Args:
        factor: by how much the slow ones are slowed down, from 1.
        low_freq_factor: turns in the original context below which a frequency is slow.
        high_freq_factor: turns above which it is fast, more than low_freq_factor.
        original_max_position_embeddings: positions of the original context.

    Raises:
        ValueError: a number is out of its range.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor < 1 or self.original_max_position_embeddings < 1:
            raise ValueError(
                f"rope_scaling: factor {self.factor} and original_max_position_embeddings "
                f"{self.original_max_position_embeddings} must be at least 1; leave rope_scaling "
                "out to keep the frequencies."
            )
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope_scaling: low_freq_factor {self.low_freq_factor} must be positive and below "
                f"high_freq_factor {self.high_freq_factor}; Llama 3.1 has 1 and 4."
            )


def frequencies(
    head_size: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> Tensor:
    """Return the angle per position of each pair [K / 2] in radians, float64."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size
    fast = theta**-exponents
    if scaling is None:
        return fast
    turns = scaling.original_max_position_embeddings * fast / (2 * math.pi)
    width = scaling.high_freq_factor - scaling.low_freq_factor
    kept = ((turns - scaling.low_freq_factor) / width).clamp(0, 1)
    return kept * fast + (1 - kept) * fast / scaling.factor


def rotations(position_ids: Tensor, frequency: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [R, 1, T, K / 2] of the angle of each position and frequency.

    Args:
        position_ids: [R, T] int64.
        frequency: [K / 2] float64, of `frequencies`.
        dtype: of the result; the angles are float64.
    """
    angles = (position_ids.unsqueeze(-1) * frequency).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)
