"""Values that change with the optimizer step."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LossWeight:
    """Weight of one term of the loss. Units of all steps: optimizer steps of the run.

    Args:
        weight: while the term counts.
        begin: first step at which it does.
        end: first step at which it does no more; none for the end of the run.
        warmup: steps after `begin` in which it grows from 0.

    Raises:
        ValueError: one is negative, or the end is not after the beginning.
    """

    weight: float = 0.0
    begin: int = 0
    end: int | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        if min(self.weight, self.begin, self.warmup) < 0:
            raise ValueError(
                f"weight, begin and warmup of a loss must be 0 or more, got {self.weight}, "
                f"{self.begin} and {self.warmup}."
            )
        if self.end is not None and self.end <= self.begin:
            raise ValueError(
                f"a loss from step {self.begin} on cannot end at step {self.end}; give a later "
                "end, or weight 0 to leave it out."
            )

    def at(self, step: int) -> float:
        """Return the weight at an optimizer step, from 0."""
        if step < self.begin or (self.end is not None and step >= self.end):
            return 0.0
        if self.warmup:
            return self.weight * min(1.0, (step - self.begin + 1) / self.warmup)
        return self.weight


@dataclass(frozen=True)
class Temperature:
    """Temperature of the choice of words, which falls in a straight line.

    Args:
        start: at step `begin` and before.
        end: at step `until` and after.
        begin: optimizer step.
        until: optimizer step.

    Raises:
        ValueError: a temperature is not above 0, or the steps are in the wrong order.
    """

    start: float = 1.0
    end: float = 0.5
    begin: int = 0
    until: int = 1000

    def __post_init__(self) -> None:
        if min(self.start, self.end) <= 0:
            raise ValueError(
                f"temperatures must be above 0, got {self.start} and {self.end}; usual is 1 to 0.5."
            )
        if not 0 <= self.begin < self.until:
            raise ValueError(
                f"temperature.begin {self.begin} must be 0 or more and below temperature.until "
                f"{self.until}."
            )

    def at(self, step: int) -> float:
        """Return the temperature at an optimizer step, from 0."""
        share = min(1.0, max(0.0, (step - self.begin) / (self.until - self.begin)))
        return self.start + (self.end - self.start) * share
