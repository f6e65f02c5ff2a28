"""Runs commands, and ends every process that came of them afterwards."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = "UNISONO_TEST_RUN"
# What an earlier run in this process, or whoever started the tests, may have left.
LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run(*arguments: str, timeout_s: float = 150, **environ: str) -> subprocess.CompletedProcess:
    """Return the finished `python arguments`; no process of it is left, whatever happened."""
    process, mark = started(*arguments, **environ)
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        ended(process, mark)
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def started(*arguments: str, **environ: str) -> tuple[subprocess.Popen, str]:
    """Start `python arguments` in a session of its own; return it and its mark."""
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={
            **{**inherited, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            **{"PYTHONFAULTHANDLER": "1", **environ, MARK: mark},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    return process, mark


def ended(process: subprocess.Popen, mark: str) -> None:
    """Kill what is left of a started command."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            os.kill(pid, signal.SIGKILL)
    process.wait()


def processes_of(mark: str) -> list[int]:
    """Return the live processes that inherited a mark; launchers give them groups of their own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
