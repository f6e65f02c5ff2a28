"""Log intervals: cut where a step has wholly ended, read a step later, told to the other ranks."""

from dataclasses import dataclass, field

import torch

from lit_models.training.throughput.clock import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    OPTIMIZER,
    PHASES,
)
from lit_models.training.throughput.profiler import PhaseProfiler
from lit_models.training.throughput.ranks import Share, Shares

OWN_PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER)  # in which a rank of ddp waits for no other
DIGITS = 6


@dataclass
class Interval:
    """What one rank knows about some steps one after the other.

    Attributes:
        step: the last one.
        split: phase -> seconds; None for what cannot be told apart.
        shares: of all ranks, once they are known.
    """

    step: int = 0
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    positions: int = 0
    split: dict[str, float | None] = field(default_factory=dict)
    shares: list[Share] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The wall clock of the interval: the sum of its split."""
        return round(sum(s for s in self.split.values() if s is not None), DIGITS)

    def add(self, load: dict[str, int]) -> None:
        """Count a micro-batch."""
        self.samples += load["samples"]
        self.tokens += load["tokens"]
        self.positions += load["positions"]


class Intervals:
    """Collects the intervals of this rank; what `end_step` and `end` return is complete.

    Args:
        profiler: which sees where a step ends.
        device: of this rank.
        shows_waiting: whether the wait for other ranks is a phase of its own; under fsdp it is
            inside of the others.
    """

    def __init__(self, profiler: PhaseProfiler, device: torch.device, shows_waiting: bool) -> None:
        self.profiler, self.device, self.shows_waiting = profiler, device, shows_waiting
        self.current = Interval()
        self._ended: Interval | None = None  # its steps are done, its time is not
        self._asked: tuple[Interval, Shares] | None = None  # other ranks have been asked

    def end_step(self, step: int, is_last: bool) -> Interval | None:
        """Note the end of an optimizer step; return the interval that is now known on all ranks.

        Args:
            step: its number, from 1.
            is_last: of its interval, which goes on until the next batch is asked for.
        """
        known = self._known()
        if self._ended is not None and self.profiler.taken is not None:
            self._ask()
            known = known or self._alone()
        self.current.step, self.current.steps = step, self.current.steps + 1
        if is_last and self._ended is None:
            self._close()
        return known

    def end(self) -> list[Interval]:
        """Return all that is left at the end of the training."""
        known = [self._known()]
        if self._ended is not None and self.profiler.taken is not None:
            self._ask()  # the training ended within the step after it
            known.append(self._known())
        if self._ended is None and self.current.steps:
            self._close()
        if self._ended is not None:
            self.profiler.cut_due, self.profiler.taken = False, self.profiler.clock.cut()
            self._ask()
            known.append(self._known())
        return [interval for interval in known if interval is not None]

    def _close(self) -> None:
        self._ended, self.current = self.current, Interval()
        self.profiler.cut_due = True

    def _ask(self) -> None:
        """Read the time of the interval that ended, and tell it to the other ranks."""
        interval, cut = self._ended, self.profiler.taken
        assert interval is not None
        assert cut is not None
        self._ended = self.profiler.taken = None
        seconds = [round(s, DIGITS) for s in self.profiler.clock.read(cut)]
        interval.split = dict(zip(PHASES, seconds, strict=True))
        if not self.shows_waiting:
            interval.split[PHASES[COMMUNICATION]] = None
        own = sum(seconds[phase] for phase in OWN_PHASES) / interval.steps
        mine = Share(own, interval.samples, interval.tokens, interval.positions)
        self._asked = (interval, Shares(mine, self.device))

    def _alone(self) -> Interval | None:
        """Return an interval at once where there is no other rank."""
        assert self._asked is not None
        return None if self._asked[1].has_others else self._known()

    def _known(self) -> Interval | None:
        if self._asked is None:
            return None
        (interval, shares), self._asked = self._asked, None
        interval.shares = shares.read()
        return interval
