"""Clocks that give every moment of a run to one phase: on the host, or on a GPU's own timeline."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "optimizer",
    "logging",
    "checkpoint",
    "evaluation",
    "other",
)
DATA, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, LOGGING, CHECKPOINT, EVALUATION, OTHER = range(9)
MOST_MARKS = 4096  # on a GPU, before those that are complete are added up within an interval


def _within(outer: int, inner: int) -> int:
    """Return the phase of what begins inside another: an evaluation has data and forwards, too."""
    if outer == CHECKPOINT or (outer == EVALUATION and inner != CHECKPOINT):
        return outer
    return inner


_WITHIN = tuple(tuple(_within(o, i) for i in range(len(PHASES))) for o in range(len(PHASES)))


class PhaseClock(ABC):
    """Time belongs to the innermost phase that was entered and not left: phases add up to all."""

    def __init__(self) -> None:
        self.phase = OTHER
        self._outer: list[int] = []

    def enter(self, phase: int) -> None:
        """Begin a phase inside the present one."""
        self.spend()
        self._outer.append(self.phase)
        self.phase = _WITHIN[self.phase][phase]

    def leave(self) -> None:
        """Go back to the phase before."""
        self.spend()
        self.phase = self._outer.pop()

    def switch(self, phase: int) -> None:
        """Go on with another phase in place of the present one."""
        self.spend()
        self.phase = _WITHIN[self.phase][phase]

    @abstractmethod
    def spend(self) -> None:
        """Give the time since the last mark to the present phase."""

    @abstractmethod
    def cut(self) -> Any:
        """End an interval here and begin the next; `read` says what was in it."""

    @abstractmethod
    def read(self, cut: Any) -> list[float]:
        """Return the seconds of each phase in an interval, in the order of PHASES."""


class HostClock(PhaseClock):
    """The clock of a run on a CPU, whose work is done when a call returns."""

    def __init__(self) -> None:
        super().__init__()
        self._seconds = [0.0] * len(PHASES)
        self._last = time.perf_counter()

    def spend(self) -> None:
        now = time.perf_counter()
        self._seconds[self.phase] += now - self._last
        self._last = now

    def cut(self) -> list[float]:
        self.spend()
        seconds, self._seconds = self._seconds, [0.0] * len(PHASES)
        return seconds

    def read(self, cut: list[float]) -> list[float]:
        return cut


class DeviceClock(PhaseClock):
    """The clock of a run on a GPU: events in its stream, read long after, so that none is waited
    for. What the host does while the GPU still computes costs the run nothing, and counts nothing.

    Args:
        make_event: returns an event that can be recorded and timed.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._make_event = make_event or partial(torch.cuda.Event, enable_timing=True)
        self._first = self._recorded()
        self._marks: list[tuple[int, Any]] = []  # a phase, and the event at its end
        self._read = [0.0] * len(PHASES)

    def spend(self) -> None:
        self._marks.append((self.phase, self._recorded()))
        if len(self._marks) > MOST_MARKS and self._marks[MOST_MARKS // 2][1].query():
            marks, self._marks = self._marks[: MOST_MARKS // 2], self._marks[MOST_MARKS // 2 :]
            self._first = _add(self._read, self._first, marks)

    def cut(self) -> tuple[list[float], Any, list[tuple[int, Any]]]:
        self.spend()
        interval = (self._read, self._first, self._marks)
        self._first = self._marks[-1][1]
        self._marks, self._read = [], [0.0] * len(PHASES)
        return interval

    def read(self, cut: tuple[list[float], Any, list[tuple[int, Any]]]) -> list[float]:
        seconds, first, marks = cut
        marks[-1][1].synchronize()  # a step has passed: it waits only for a GPU that lags so far
        _add(seconds, first, marks)
        return seconds

    def _recorded(self) -> Any:
        event = self._make_event()
        event.record()
        return event


def _add(seconds: list[float], first: Any, marks: list[tuple[int, Any]]) -> Any:
    """Add the time between events to their phases, in place; return the last event."""
    for phase, event in marks:
        seconds[phase] += first.elapsed_time(event) / 1e3
        first = event
    return first


def clock_for(device: torch.device) -> PhaseClock:
    """Return a clock, begun, for a run on a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()
