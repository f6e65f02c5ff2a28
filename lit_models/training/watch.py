"""A thread that notices that training makes no progress, writes stacks down and ends the rank."""

import faulthandler
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

STACKS = "stacks"


class Watch:
    """Looks at the newest sign of life of the training thread.

    Args:
        run: the run folder.
        rank: this one.
        timeout_s: how long ranks wait for each other; a little before it the stack is written.

    Attributes:
        beat: when the training thread was last seen, by `time.monotonic()`, and where.
        is_over: ends the thread.
    """

    def __init__(self, run: Path, rank: int, timeout_s: float) -> None:
        self.run, self.rank, self.timeout_s = run, rank, timeout_s
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
            if waited > 0.9 * self.timeout_s and wrote_at != since:
                self._write(place, waited)
                wrote_at = since
            # Those who wait for this rank have ended by now; it must not stay behind alone.
            if waited > 1.2 * self.timeout_s:
                print(f"rank {self.rank} hangs in {place}; it ends.", file=sys.stderr, flush=True)
                os._exit(1)

    def _write(self, place: dict[str, Any], waited: float) -> None:
        folder = self.run / STACKS
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"rank-{self.rank}.txt", "w", encoding="utf-8") as file:
            file.write(f"no progress for {waited:.0f} s; last: {json.dumps(place)}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
