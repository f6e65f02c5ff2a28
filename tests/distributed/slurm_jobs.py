"""Jobs of `unisono submit` on the SLURM of two loopback nodes: a slow toy run, and its fate."""

import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lightning.pytorch import Callback

from tests.conftest import TOY
from tests.distributed.launch import ROOT

SLOW = """
  log_every_n_steps: 1
  callbacks:
  - class_path: tests.distributed.slurm_jobs.Slow
    init_args: {seconds: SECONDS}
"""
Environ = dict[str, str]


class Slow(Callback):
    """Each step takes so long, until the run has been stopped once."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_start(self, trainer, *_) -> None:
        ledger = Path(trainer.default_root_dir) / "ledger.jsonl"
        if ledger.exists() and '"stopped"' in ledger.read_text():
            self.seconds = 0.0

    def on_train_batch_end(self, *_) -> None:
        time.sleep(self.seconds)


def write_config(folder: Path, step_s: float, extra: str = "") -> None:
    """Write the config of a toy run of which each step takes so long."""
    (folder / "toy.yaml").write_text(TOY + SLOW.replace("SECONDS", str(step_s)) + extra)


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


def wait_for(is_there: Callable[[], bool], what: Callable[[], str] | str) -> None:
    """Wait for something, for 150 s at most; `what` says what is not there."""
    end = time.monotonic() + 150
    while not is_there():
        assert time.monotonic() < end, what if isinstance(what, str) else what()
        time.sleep(0.2)


def steps_of(run: Path) -> int:
    """Return how many lines the ledger of a run has; 0 before it is there."""
    ledger = run / "ledger.jsonl"
    return len(ledger.read_text().splitlines()) if ledger.exists() else 0


def wait_for_end(
    job: str, environ: Environ, timeout_s: float = 150, folder: Path | None = None
) -> dict[str, str]:
    """Wait until a job has ended; return its facts. A requeued job starts soon.

    Args:
        job: its number.
        environ: of the cluster.
        timeout_s: how long to wait.
        folder: of its logs; once the run has stopped and saved, the job has more time, since on a
            busy machine Python alone may take what it had.
    """
    end, restarts = time.monotonic() + timeout_s, "0"
    while True:
        facts = facts_of(job, environ)
        if facts["JobState"] == "PENDING" and facts["Restarts"] != restarts:
            restarts = facts["Restarts"]
            time.sleep(3)  # of a job that starts in the second in which it ended, SLURM knows both
            # It would be held back for two minutes.
            eased = ["TimeLimit=30"] if folder and "with status 75" in said(folder) else []
            slurm_says(environ, "scontrol", "update", f"JobId={job}", "StartTime=now", *eased)
        elif facts["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            return facts
        assert time.monotonic() < end, facts
        time.sleep(0.5)


def said(folder: Path) -> str:
    """Return what jobs have written to their logs."""
    return "\n".join(p.read_text() for p in sorted((folder / "logs").glob("train_*")))
