"""Jobs of `unisono submit` on the SLURM of two loopback nodes: a slow toy run, and its fate."""

import re
import subprocess
import sys
import time
from pathlib import Path

from lightning.pytorch import Callback

from tests.conftest import TOY
from tests.distributed.launch import ROOT

SLOW = """
  logger: false
  callbacks:
  - class_path: tests.distributed.slurm_jobs.Slow
    init_args: {seconds: SECONDS}
"""
NUM_STEPS = 7  # of an epoch of the toy
Environ = dict[str, str]


class Slow(Callback):
    """Each step takes so long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_) -> None:
        time.sleep(self.seconds)


def config_of(folder: Path, step_s: float) -> Path:
    """Write the config of a toy run of which each step takes so long; return its path."""
    folder.mkdir(exist_ok=True)
    config = folder / "toy.yaml"
    config.write_text(TOY + SLOW.replace("SECONDS", str(step_s)))
    return config


def submitted(folder: Path, environ: Environ, *options: str) -> list[str]:
    """Call `unisono submit` in a folder; return the numbers of the jobs."""
    done = subprocess.run(
        [sys.executable, "-m", "lit_models", "submit", *options],
        **{"cwd": folder, "env": {**environ, "PYTHONPATH": str(ROOT)}, "text": True},
        **{"timeout": 90, "capture_output": True},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"^submitted  job (\d+)", done.stdout, flags=re.MULTILINE)


def facts_of(job: str, environ: Environ) -> dict[str, str]:
    """Return what scontrol knows of a job, such as JobState and ExitCode."""
    shown = slurm_says(environ, "scontrol", "show", "job", "-o", job)
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def slurm_says(environ: Environ, *command: str) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def wait_for(is_there, what: str, timeout_s: float = 90) -> None:
    end = time.monotonic() + timeout_s
    while not is_there():
        assert time.monotonic() < end, what
        time.sleep(0.2)


def wait_for_steps(run: Path, count: int, log: Path) -> None:
    """Wait until a run's ledger has so many lines."""
    ledger = run / "ledger.jsonl"
    wait_for(lambda: ledger.exists() and len(ledger.read_text().splitlines()) > count, said(log))


def wait_for_end(job: str, environ: Environ, timeout_s: float = 120) -> dict[str, str]:
    """Wait until a job has ended; return its facts. A requeued job starts soon."""
    end, restarts = time.monotonic() + timeout_s, "0"
    while True:
        facts = facts_of(job, environ)
        if facts["JobState"] == "PENDING" and facts["Restarts"] != restarts:
            restarts = facts["Restarts"]
            time.sleep(3)  # of a job that starts in the second in which it ended, SLURM knows both
            # It would be held back for two minutes.
            slurm_says(environ, "scontrol", "update", f"JobId={job}", "StartTime=now")
        elif facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return facts
        assert time.monotonic() < end, facts
        time.sleep(0.5)


def said(folder: Path) -> str:
    """Return what jobs have written to their logs."""
    return "\n".join(p.read_text() for p in sorted((folder / "logs").glob("train_*")))
