"""Refuses the worlds in which launchers silently train N copies of one run, or one rank of several.

Pure functions of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping

SPAWNING = ("ddp_spawn", "ddp_fork", "ddp_notebook")


def check_world(
    world_size: int, strategy: str | None, environ: Mapping[str, str], warnings: list[str]
) -> None:
    """Refuses a launcher's world that differs from the trainer's: N silent copies of one run, or
    one silent rank of several.

    Raises:
        ValueError: the worlds differ.
    """
    for name, started in launched_worlds(environ).items():
        if started != world_size:
            raise ValueError(
                f"the launcher started {started} processes ({name}={started}), but trainer.devices "
                f"x trainer.num_nodes is {world_size}: each would train a copy of its own. Set "
                "--trainer.devices to the processes per node and --trainer.num_nodes to the nodes."
            )
        if strategy in SPAWNING:
            raise ValueError(
                f"trainer.strategy={strategy} starts its own processes, but {name}={started} says "
                "that a launcher did; use --trainer.strategy=ddp."
            )
    if world_size > 1 and is_one_task(environ):
        raise ValueError(
            f"SLURM has one task (SLURM_NTASKS=1), but trainer.devices x trainer.num_nodes is "
            f"{world_size}: rank 0 would train alone, without a word. Ask for --ntasks-per-node="
            "DEVICES and --nodes=NODES, with `srun` before the command."
        )
    if _is_batch_script_without_srun(environ):
        warnings.append(
            "this looks like a SLURM batch script with several tasks and no `srun` before the "
            "command: it would wait for the others for ever"
        )


def launched_worlds(environ: Mapping[str, str]) -> dict[str, int]:
    """Returns the worlds larger than one process that a launcher set up, by variable."""
    worlds = {name: int(environ[name]) for name in ("WORLD_SIZE",) if environ.get(name)}
    # In an interactive allocation only `srun` starts the tasks; there Lightning ignores SLURM.
    is_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if environ.get("SLURM_NTASKS") and not (is_shell and "SLURM_STEP_ID" not in environ):
        worlds["SLURM_NTASKS"] = int(environ["SLURM_NTASKS"])
    if "TORCHELASTIC_RUN_ID" in environ:  # torchrun wins over SLURM
        worlds.pop("SLURM_NTASKS", None)
    return {name: size for name, size in worlds.items() if size > 1}


def is_one_task(environ: Mapping[str, str]) -> bool:
    """Returns whether Lightning takes its world from a SLURM job of a single task."""
    is_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ
    return environ.get("SLURM_NTASKS") == "1" and not (is_shell or is_torchrun)


def _is_batch_script_without_srun(environ: Mapping[str, str]) -> bool:
    return (
        int(environ.get("SLURM_NTASKS") or 1) > 1
        and "SLURM_PROCID" in environ
        and "SLURM_STEP_ID" not in environ
        and "TORCHELASTIC_RUN_ID" not in environ
        and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")
    )
