"""A thread that notices that training makes no progress, writes stacks down and ends the rank."""

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

STACKS = "stacks"
PHASE = "phase"  # key of a place
SlowPhase = Literal["checkpoint", "evaluation_end"]


class Watch:
    """Looks at the newest sign of life of the training thread.

    Args:
        run: the run folder.
        rank: this one.
        timeout_s: how long it may be silent; a little before it the stack is written.
        slow_phases_s: the same of a place whose `PHASE` is one of these.
        end: leaves the process with a status, whatever its threads do.

    Attributes:
        beat: when the training thread was last seen, by `time.monotonic()`, and where.
        is_over: ends the thread.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        timeout_s: float,
        slow_phases_s: Mapping[SlowPhase, float] | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        self.run, self.rank, self.timeout_s = run, rank, timeout_s
        self.slow_phases_s, self.end = slow_phases_s or {}, end
        self.beat: tuple[float, dict[str, Any]] | None = None  # none before the first batch
        self.is_over = threading.Event()
        threading.Thread(target=self._look, daemon=True, name="watch").start()

    def _look(self) -> None:
        wrote_at: float | None = None
        while not self.is_over.wait(min(5.0, self.timeout_s / 20)):
            if self.beat is None:
                continue
            since, place = self.beat
            waited = time.monotonic() - since
            phase: Any = place.get(PHASE)
            timeout_s = self.slow_phases_s.get(phase, self.timeout_s)
            if waited > 0.9 * timeout_s and wrote_at != since:
                self._write(place, waited)
                wrote_at = since
            # Those who wait for this rank have ended by now; it must not stay behind alone.
            if waited > 1.2 * timeout_s:
                print(
                    f"rank {self.rank} made no progress for {waited:.0f} s in {place}: it hangs, "
                    "or waits for a rank that does; it ends.",
                    file=sys.stderr,
                    flush=True,
                )
                self.end(1)

    def _write(self, place: dict[str, Any], waited: float) -> None:
        folder = self.run / STACKS
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{self.rank}.txt", "w", encoding="utf-8") as file:
            file.write(f"no progress for {waited:.0f} s; last: {json.dumps(place)}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)


def check_slow_phases(limits: Mapping[SlowPhase, float]) -> None:
    """Raises ValueError where a phase has another name than those that exist."""
    unknown = [name for name in limits if name not in get_args(SlowPhase)]
    if unknown:
        raise ValueError(
            f"slow_phases_s names {', '.join(unknown)}; it knows {', '.join(get_args(SlowPhase))}."
        )


def check_limits(
    timeout_s: float, limits: Mapping[SlowPhase, float], group_timeout_s: float | None
) -> None:
    """Refuses limits of slow phases that would be none.

    Args:
        timeout_s: of all other places.
        limits: phase -> seconds.
        group_timeout_s: after which a rank that waits for another ends, whatever that one does.

    Raises:
        ValueError: a phase's limit is below the ordinary one, or above the group's.
    """
    for name, seconds in limits.items():
        if seconds < timeout_s:
            raise ValueError(
                f"slow_phases_s gives {name} {seconds:g} s, less than the {timeout_s:g} s of what "
                "is not slow; raise it, or lower timeout_s."
            )
        if group_timeout_s is not None and seconds > group_timeout_s:
            raise ValueError(
                f"slow_phases_s gives {name} {seconds:g} s, but ranks that wait for it end after "
                f"the {group_timeout_s:g} s of trainer.strategy.timeout; raise that to the longest "
                "phase, and keep FailureReport's timeout_s for the rest."
            )
