"""Where the figures of a run go: `throughput.jsonl`, the loggers, the screen; rank 0 alone."""

import json
from pathlib import Path
from typing import IO

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lit_models.training.ledger import complete_lines
from lit_models.training.throughput.clock import PHASES
from lit_models.training.throughput.intervals import Interval
from lit_models.training.throughput.lines import Capacity, line_of, logged
from lit_models.training.throughput.machine import Machine
from lit_models.training.throughput.ranks import Stragglers

FILE_NAME = "throughput.jsonl"
SMALLEST_SHARE = 0.005  # of the time, that is said


class Journal:
    """Appends to the file of a run folder; a torn last line, which a kill can leave, is cut off.

    Args:
        trainer: that begins to train.
        capacity: of each device.
        attempt: of the run folder, as the ledger counts it.
    """

    def __init__(self, trainer: Trainer, capacity: Capacity, attempt: int) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        complete_lines(folder / FILE_NAME)
        self._file: IO[str] = open(folder / FILE_NAME, "a", encoding="utf-8")  # noqa: SIM115
        self._machine = Machine(folder, trainer.strategy.root_device, trainer.num_devices)
        self._capacity, self._stragglers = capacity, Stragglers()
        self._attempt = attempt
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def write(self, trainer: Trainer, interval: Interval) -> None:
        """Add an interval that is known on all ranks; warn of a slow one."""
        line = line_of(interval, self._attempt, self._capacity)
        line["machine"] = self._machine.reading()
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for logger in trainer.loggers:
            logger.log_metrics(logged(line), interval.step)
        for phase, seconds in interval.split.items():
            self._seconds[phase] += seconds or 0.0
        own = line["ranks"]["seconds"]
        warning = self._stragglers.warning(own) if own else None
        if warning:
            rank_zero_warn(warning)

    def close(self) -> None:
        self._file.close()

    def words(self) -> str:
        """Return `time: forward 41 %, backward 40 %, data 1 %`, the longest first."""
        total = sum(self._seconds.values()) or 1.0
        shares = sorted(((s / total, name) for name, s in self._seconds.items()), reverse=True)
        parts = [f"{name} {100 * share:.0f} %" for share, name in shares if share >= SMALLEST_SHARE]
        return "time: " + ", ".join(parts)
