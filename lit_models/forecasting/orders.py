"""Work that a plan gives to processes of their own: an order in a file, one answer in JSON."""

import errno
import json
import os
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from lit_models.errors import RUN, UsageError
from lit_models.training.local_ranks import fit_environment, run_ranks, sigterm_as_exit

RANK = "lit_models.commands._forecast_rank"  # the program of a rank: it builds what a config names
OUT_OF_MEMORY = errno.ENOMEM  # exit status of a rank that was refused memory
KILLED = -signal.SIGKILL  # what Linux does where memory is used up
ANSWER = "answer.json"  # in the folder of an order; a module may print what it likes
# Of the host allocator of torch, whose error has no class of its own.
REFUSALS = ("not enough memory", "can't allocate memory")


@dataclass(frozen=True)
class Order:
    """What each rank does.

    Args:
        model: as a run's config has it.
        data: likewise.
        trainer: of its values those that change a step; see `probe.trainer_options`.
        seed: of the run.
        devices: of the run.
        strategy: of a short run, whose ranks are all those devices; empty for a rehearsal, which
            is one process whatever their number.
        steps: of a short run: optimizer steps, those that warm up included; at most those of one
            epoch.
        folder: of the run, and of the answer.
    """

    model: dict[str, Any]
    data: dict[str, Any]
    trainer: dict[str, Any]
    seed: int
    devices: int = 1
    strategy: str = ""
    steps: int = 0
    folder: str = ""


class RanksFailed(RuntimeError):
    """Ranks that did not do what was ordered.

    Args:
        statuses: exit status of each rank; below 0 it is the signal that ended it.
        said: what each rank wrote to standard error.

    Attributes:
        lacks_memory: whether one was refused memory, or was killed, as for want of it.
        status: to end with where the run is at fault: that of the rank at fault, as a shell has it.
        report: what the rank at fault said, with its end where a signal brought it.
    """

    def __init__(self, statuses: list[int], said: list[str]) -> None:
        super().__init__(failure(statuses, said))
        rank = _at_fault(statuses, said)
        status = statuses[rank]
        self.statuses, self.said = statuses, said
        self.lacks_memory = status in (OUT_OF_MEMORY, KILLED)
        self.status = 128 - status if status < 0 else status or RUN
        ended = "" if status > 0 else f"error: rank {rank} {_ended(status)}.\n"
        self.report = said[rank] + ended


def answer_of(
    order: Order, ranks: int, timeout_s: float | None, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return what the first of some ranks answered, and what each wrote to standard error.

    Nothing else of them is left, even where SIGTERM ends this process meanwhile.

    Args:
        order: without a folder.
        ranks: how many carry it out, all on this machine.
        timeout_s: how long they may take; none waits until they end.
        environ: variables of theirs.

    Raises:
        RanksFailed: one failed, or the first gave no answer.
        UsageError: a value of the config cannot be written down.
        subprocess.TimeoutExpired: one did not end.
    """
    with sigterm_as_exit(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, answered = folder / "order.json", folder / ANSWER
        path.write_text(json.dumps(_plain(asdict(order) | {"folder": name})), "utf-8")
        command, own = ["-m", RANK, str(path)], fit_environment() | dict(environ or {})
        # What a module prints would stand among what the plan prints for scripts.
        statuses, _ = run_ranks(ranks, command, timeout_s, True, own, folder)
        files = [folder / f"rank-{rank}.err" for rank in range(ranks)]
        said = [file.read_text("utf-8", errors="replace") for file in files]
        if any(statuses) or not answered.exists():
            raise RanksFailed(statuses, said)
        answer: dict[str, Any] = json.loads(answered.read_text("utf-8"))
        return answer, said


def write_answer(order: Order, answer: Any) -> None:
    """Leave the answer of rank 0 where `answer_of` reads it; other ranks leave none.

    Args:
        order: that this rank carried out.
        answer: a dataclass of plain values.
    """
    if os.environ["RANK"] == "0":
        Path(order.folder, ANSWER).write_text(json.dumps(asdict(answer)), "utf-8")


def is_want_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host refused memory."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in REFUSALS)


def failure(statuses: list[int], said: list[str]) -> str:
    """Return why ranks failed: how one of them ended, and its error on one line.

    Args:
        statuses: of each.
        said: what each wrote to standard error.
    """
    rank = _at_fault(statuses, said)
    message = _error_of(said[rank])
    return f"rank {rank} {_ended(statuses[rank])}{': ' if message else ''}{message}"


def _at_fault(statuses: list[int], said: list[str]) -> int:
    """Return the rank whose end explains the others': one without memory, else the first failed
    one that said anything; others fail because they waited for it."""
    failed = [rank for rank, status in enumerate(statuses) if status] or [0]
    hungry = [rank for rank in failed if statuses[rank] in (OUT_OF_MEMORY, KILLED)]
    telling = [rank for rank in failed if said[rank].strip()]
    return (hungry or telling or failed)[0]


def _ended(status: int) -> str:
    """Return how a rank ended, as the end of a sentence."""
    if status == OUT_OF_MEMORY:
        return "ran out of memory"
    if status == KILLED:
        return "was ended by SIGKILL, often for too little memory"
    if status < 0:
        known = {number.value: number.name for number in signal.Signals}
        return f"was ended by {known.get(-status, f'signal {-status}')}"
    return f"ended with {status}" if status else "ended without an answer"


def _error_of(text: str) -> str:
    """Return the last error of what a process said, on one line: it is wrapped to a screen."""
    lines = text.strip().splitlines()
    begins = [index for index, line in enumerate(lines) if line.startswith("error")]
    told = lines[begins[-1] :] if begins else lines[-2:]
    return " ".join(" ".join(told).split()).rstrip(".")


def _plain(value: Any, key: str = "") -> Any:
    """Return a config's value as JSON has it: a date or a path is its text, which the parser of a
    rank reads again.

    Raises:
        UsageError: it is none of a config's kinds.
    """
    if isinstance(value, dict):
        return {str(k): _plain(v, f"{key}.{k}".lstrip(".")) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{key}.{index}") for index, v in enumerate(value)]
    if isinstance(value, date | os.PathLike):  # a datetime is a date
        return str(value)
    if value is None or isinstance(value, str | int | float):
        return value
    raise UsageError(
        f"{key} is {value!r}, a {type(value).__name__}, which `unisono plan --rehearse` cannot "
        "give to a process of its own; write it as text, a number, a list or a group of these."
    )
