"""Runs commands in a process group of their own, and ends the whole group afterwards."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*arguments: str, timeout_s: float = 150, **environ: str) -> subprocess.CompletedProcess:
    """Return the finished `python arguments`; no process of it is left, whatever happened."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "NODE_RANK")}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**inherited, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # the group is gone: all ended by themselves
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(arguments, process.returncode, output)
