"""Temperature of the choice of words."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TemperatureSchedule:
    """Temperature of the choice of words: constant, then falling.

    Args:
        start: above 0, at optimizer step `begin` and before.
        end: above 0, at optimizer step `until` and after.
        begin: 0 or more.
        until: above `begin`.
        shape: of the fall: a straight line, half a wave of the cosine, or one factor at each step.
        floor: 0 or more, below which it never falls, such as in the middle of a steep fall.
    """

    start: float = 1.0
    end: float = 0.5
    begin: int = 0
    until: int = 1000
    shape: Literal["linear", "cosine", "exponential"] = "linear"
    floor: float = 0.0

    def __post_init__(self) -> None:
        if min(self.start, self.end) <= 0 or self.floor < 0 or not 0 <= self.begin < self.until:
            raise ValueError(
                "a temperature needs a start and an end above 0, a floor and a begin of 0 or more, "
                f"and the begin before until, got {self}."
            )

    def at(self, step: int) -> float:
        share = min(1.0, max(0.0, (step - self.begin) / (self.until - self.begin)))
        if self.shape == "cosine":
            share = (1 - math.cos(math.pi * share)) / 2
        if self.shape == "exponential":
            return max(self.floor, self.start * (self.end / self.start) ** share)
        return max(self.floor, self.start + (self.end - self.start) * share)
