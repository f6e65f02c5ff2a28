"""SLURM's own commands, and what to do where they refuse."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lit_models.errors import say, screen
from lit_models.scheduling.resources import NODE_GPUS, gpus_of_nodes

ANSWERS_WITHIN_S = 30.0
# Reasons for which sbatch takes a job that the cluster never starts.
FOR_EVER = ("PartitionTimeLimit", "PartitionNodeLimit", "BadConstraints")


def gpus_per_machine(partition: str | None) -> int:
    """Return how many GPUs a node has as sinfo says, or the usual number where it does not."""
    if shutil.which("sinfo") is None:
        return NODE_GPUS
    asked = ["sinfo", "--noheader", "--format=%G"]
    asked += [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S)
    except subprocess.TimeoutExpired:
        _warn(
            f"sinfo did not answer within {ANSWERS_WITHIN_S:g} s: {NODE_GPUS} GPUs on a node are "
            "assumed; say with --node-gpus how many there are."
        )
        return NODE_GPUS
    return gpus_of_nodes(done.stdout) or NODE_GPUS


def sbatch_command(script: Path, after: str | None) -> list[str]:
    """Return the command that puts a job into the queue.

    Args:
        script: of the job.
        after: the job, or the shell's word for it, that must have ended well before; where it
            cannot any more, this one is cancelled too.
    """
    waits = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *waits, str(script)]


def submit_all(scripts: Sequence[Path]) -> list[str]:
    """Put jobs into the queue, each after the one before it; all of them or none.

    Returns:
        their numbers.

    Raises:
        RuntimeError: sbatch is not here, or refuses.
    """
    if shutil.which("sbatch") is None:
        raise RuntimeError(
            "there is no sbatch on this machine, so nothing is submitted. Call this on a login "
            "node of the cluster; or write the scripts with --dry-run: one of them, torchrun.sh, "
            "needs no SLURM."
        )
    jobs: list[str] = []
    # Its own job's variables, where this is called within one, would win over the script.
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
    environ |= {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CLUSTERS")}
    for script in scripts:
        command = sbatch_command(script, jobs[-1] if jobs else None)
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            if jobs:
                subprocess.run(["scancel", *jobs], capture_output=True)
            raise RuntimeError(_refusal(command, done.stderr, jobs))
        jobs.append(done.stdout.strip().partition(";")[0])
    return jobs


def never_starts(job: str) -> str | None:
    """Return why a job that was just submitted will wait for ever, in SLURM's word; none if it will
    not, or if SLURM does not answer, which is said."""
    asked = ["squeue", "--noheader", f"--jobs={job}", "--format=%r"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=ANSWERS_WITHIN_S)
    except subprocess.TimeoutExpired:
        _warn(
            f"squeue did not answer within {ANSWERS_WITHIN_S:g} s. The job {job} is in the queue; "
            f"whether SLURM will start it is not known: look with `squeue --jobs={job}`."
        )
        return None
    reason = done.stdout.strip()
    return reason if reason in FOR_EVER else None


def _warn(message: str) -> None:
    say(screen(message, "warning"))


def _refusal(command: list[str], words: str, jobs: list[str]) -> str:
    taken_back = f" The jobs before it are taken back: {', '.join(jobs)}." if jobs else ""
    return (
        f"sbatch refuses the job: {' '.join(words.split()) or 'it does not say why'}. The script "
        f"is {command[-1]}; change what it asks for by the options of `unisono submit`, and call "
        f"it again: {shlex.join(command)} would be refused again.{taken_back}"
    )
