"""Look whether machine, job and process group are sound."""

import json as json_format
import math
import os
from pathlib import Path

from lit_models.cli_errors import UsageError

PROCESSES_PER_CORE = 4


def doctor(
    devices: int | None = None,
    num_nodes: int | None = None,
    folder: Path = Path("runs"),
    collectives: bool = False,
    timeout_s: float = 60.0,
    json: bool = False,
) -> int:
    """Look at everything outside of the project that a run depends on, and say what to mend.

    Under srun or torchrun it speaks for the whole job: rank 0 prints, also what is wrong on other
    machines, and all ranks end with the same status.

    Args:
        devices: processes per machine of the run that is meant.
        num_nodes: machines of that run.
        folder: where runs are written.
        collectives: start a real process group, of --devices processes where no launcher did.
        timeout_s: how long ranks of that group wait for each other.
        json: print plain JSON for scripts.

    Returns:
        1 where something is an error, else 0.

    Raises:
        UsageError: a number cannot be meant.
    """
    _check(devices, num_nodes, timeout_s)
    from rich.console import Console

    from lit_models.doctoring import findings as found
    from lit_models.doctoring.examination import examine, joined_environment

    if collectives and joined_environment(os.environ) is None:
        from lit_models.doctoring.collectives import start_ranks

        count = 2 if devices is None else devices
        most = PROCESSES_PER_CORE * len(os.sched_getaffinity(0))
        if count > most:
            raise UsageError(
                f"--devices={count} --collectives would start {count} processes on this machine's "
                f"{most // PROCESSES_PER_CORE} cores, which takes minutes; try up to {most}, or "
                "leave --collectives out."
            )
        arguments = [f"--devices={count}", f"--folder={folder}", f"--timeout_s={timeout_s}"]
        arguments += ["--collectives=true", f"--json={str(json).lower()}"]
        return start_ranks(count, arguments, timeout_s)
    results, level = examine(devices, num_nodes, Path(folder), collectives, timeout_s)
    if results and json:
        print(json_format.dumps(found.as_json(results), indent=1))
    elif results:
        found.show(results, Console(highlight=False))
    return 1 if level == "error" else 0


def _check(devices: int | None, num_nodes: int | None, timeout_s: float) -> None:
    """Refuse a world without processes, and a group that would not wait at all or for ever."""
    for name, value in (("devices", devices), ("num_nodes", num_nodes)):
        if value is not None and value < 1:
            raise UsageError(f"--{name} must be at least 1, got {value}; leave it out if unknown.")
    if not 0 < timeout_s < math.inf:
        raise UsageError(f"--timeout_s must be seconds above 0, such as 60, got {timeout_s:g}.")
