"""Look whether machine, job and process group are sound."""

import json as json_format
import os
from pathlib import Path


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
    """
    from rich.console import Console

    from lit_models.doctoring import findings as found
    from lit_models.doctoring.examination import examine, joined_environment

    if collectives and joined_environment(os.environ) is None:
        from lit_models.doctoring.collectives import start_ranks

        count = devices or 2
        arguments = [f"--devices={count}", f"--folder={folder}", f"--timeout_s={timeout_s}"]
        arguments += ["--collectives=true", f"--json={str(json).lower()}"]
        return start_ranks(count, arguments, timeout_s)
    results, level = examine(devices, num_nodes, Path(folder), collectives, timeout_s)
    if results and json:
        print(json_format.dumps(found.as_json(results), indent=1))
    elif results:
        found.show(results, Console(highlight=False))
    return 1 if level == "error" else 0
