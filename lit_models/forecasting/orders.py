"""Work that a plan gives to processes of their own: an order in a file, one answer in JSON."""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lit_models.training.local_ranks import run_ranks

RANK = "lit_models.commands._forecast_rank"  # the program of a rank: it builds what a config names


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
        folder: of the run.
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
    """

    def __init__(self, statuses: list[int], said: list[str]) -> None:
        super().__init__(failure(statuses, said))
        self.statuses, self.said = statuses, said


def answer_of(
    order: Order, ranks: int, timeout_s: float | None, environ: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return what the first of some ranks answered; nothing else of them is left.

    Args:
        order: without a folder.
        ranks: how many carry it out, all on this machine.
        timeout_s: how long they may take; none waits until they end.
        environ: variables of theirs.

    Raises:
        RanksFailed: one failed.
        subprocess.TimeoutExpired: one did not end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "order.json"
        # A date or a path of a config is its text, which the parser of a rank reads again.
        content = json.dumps(asdict(order) | {"folder": name}, default=str)
        path.write_text(content, "utf-8")
        command = ["-m", RANK, str(path)]
        statuses, printed = run_ranks(ranks, command, timeout_s, True, environ, folder)
        if any(statuses):
            files = [folder / f"rank-{rank}.err" for rank in range(ranks)]
            raise RanksFailed(statuses, [file.read_text("utf-8") for file in files])
    answer: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return answer


def failure(statuses: list[int], said: list[str]) -> str:
    """Return why ranks failed: the last two lines of the first one that said anything.

    Args:
        statuses: of each.
        said: what each wrote to standard error.
    """
    for rank, (status, text) in enumerate(zip(statuses, said, strict=True)):
        lines = text.strip().splitlines()
        if status > 0 and lines:
            return f"rank {rank} ended with {status}: {' '.join(lines[-2:]).rstrip('.')}"
    return f"ranks ended with {statuses}, where -9 is often too little memory"
