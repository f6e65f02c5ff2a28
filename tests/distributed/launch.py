"""Runs commands and worlds of processes, and ends every process that they leave.

`run` starts a command as a user starts it. Other calls of `unisono`, and the ranks of a world, are
forks of one process that has imported everything, since importing takes longer than most runs;
processes that they start themselves are ordinary ones. Ranks find each other as under torchrun.
"""

import contextlib
import gc
import multiprocessing
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
MARK = "UNISONO_TEST_RUN"
FORKED = "forkserver"
# What an earlier run in this process, or the program that started the tests, may have set.
LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMAINS_S = 60.0  # loader workers check every few seconds whether their parent is alive
PATIENCE_S = 900.0  # a test that takes longer hangs; generous, so that a busy machine passes too
IMPORTED = ["tests.distributed.jobs", "lit_models.cli", "tensorboard", "pytest"]
SESSIONS: dict[str, int] = {}  # mark -> session of a fork, whose environment /proc does not show


def run(
    *arguments: str, timeout_s: float = PATIENCE_S, **environ: str
) -> subprocess.CompletedProcess:
    """Run `python arguments` to its end; return it. None of its processes survives."""
    statuses, outputs = finished(started(*arguments, is_fork=False, **environ), limit_s=timeout_s)
    return subprocess.CompletedProcess(arguments, statuses[0], outputs[0])


def finished(
    *launched: tuple[Any, str], limit_s: float = PATIENCE_S
) -> tuple[list[int], list[str]]:
    """Return the statuses and outputs of started commands; none of their processes survives."""
    try:
        outputs = [process.communicate(timeout=limit_s)[0] for process, _ in launched]
    finally:
        for process, mark in launched:
            ended(process, mark)
    return [process.returncode for process, _ in launched], outputs


def run_clean(
    *arguments: str, meanwhile: Callable[[Any], Any] | None = None
) -> subprocess.CompletedProcess:
    """Run `python arguments` to its end; assert that it left no process, port or memory.

    Args:
        arguments: of Python.
        meanwhile: called with the running process.
    """
    port, before = free_port(), abandoned_memory()
    process, mark = started(*arguments, MASTER_PORT=str(port))
    try:
        if meanwhile is not None:
            meanwhile(process)
        output, _ = process.communicate(timeout=PATIENCE_S)
        end = time.monotonic() + REMAINS_S
        while left := [*processes_of(mark), *(abandoned_memory() - before)]:
            assert time.monotonic() < end, (left, output)
            time.sleep(0.2)
    finally:
        ended(process, mark)
    assert not is_listening(port)
    return subprocess.CompletedProcess(arguments, process.returncode, output)


def is_listening(port: int) -> bool:
    lines = [
        line.split()
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]
    return any(int(f[1].rpartition(":")[2], 16) == port and f[3] == "0A" for f in lines)


def abandoned_memory() -> set[str]:
    """Return the names of shared memory that no live process maps; others use /dev/shm too."""
    names = {str(entry.inode()): entry.name for entry in os.scandir("/dev/shm")}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):  # the process ended
            for inode in re.findall(r"(\d+) +/dev/shm/", maps.read_text()):
                names.pop(inode, None)
    return set(names.values())


class Fork:
    """A command that runs in a fork, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, environ: dict[str, str], arguments: tuple[str, ...]) -> None:
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self.log = Path(file.name)
        self.mark = environ[MARK]
        self.process = _process(FORKED, environ, self.log, _command, *arguments)
        self.pid, self.send_signal = self.process.pid, partial(os.kill, self.process.pid)

    def poll(self) -> int | None:
        return self.process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.process.join(timeout)
        if is_late := self.poll() is None:
            for pid in processes_of(self.mark):
                os.kill(pid, signal.SIGABRT)  # each then writes its stack traces
            self.process.join(10)
        output = self.log.read_text(encoding="utf-8")
        assert not is_late, f"no end after {timeout} s\n{output}"
        return output, None

    def wait(self) -> None:
        self.process.join()
        self.log.unlink(missing_ok=True)  # `communicate` has read it

    returncode = property(poll)


def _command(*arguments: str) -> None:
    """Act as `python -m lit_models arguments`, also for launchers that start it again."""
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method(None, force=True)  # undo the fork's choice
    sys.argv[1:] = arguments
    runpy.run_module("lit_models", run_name="__main__", alter_sys=True)


def started(*arguments: str, is_fork: bool = True, **environ: str) -> tuple[Any, str]:
    """Start `python arguments` in a session of its own; return the process and its mark."""
    mark = uuid.uuid4().hex
    environ = {
        **{**inherited(), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        **{"PYTHONFAULTHANDLER": "1", **environ, MARK: mark},
    }
    if is_fork and arguments[:2] == ("-m", "lit_models"):
        process: Any = Fork(environ, arguments[2:])
        SESSIONS[mark] = process.pid
    else:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            **{"cwd": ROOT, "env": environ, "text": True, "start_new_session": True},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    return process, mark


def inherited() -> dict[str, str]:
    """Return this process's environment without the variables that a launcher sets."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHERS}


def ended(process: subprocess.Popen, mark: str) -> None:
    """Kill all remaining processes of a started command."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(pid, signal.SIGKILL)
    process.wait()


def processes_of(mark: str) -> list[int]:
    """Return the live processes that inherited a mark or are in the session of its fork; launchers
    put them into process groups of their own."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to another user
            environ, pid = (folder / "environ").read_bytes(), int(folder.name)
            is_of_fork = environ and os.getsid(pid) == SESSIONS.get(mark)
            if is_of_fork or f"{MARK}={mark}".encode() in environ:
                pids.append(pid)
    return pids


def free_port() -> int:
    """Return a port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def world(
    size: int, log: Path, function: Callable[..., Any], *arguments: Any, method: str = FORKED
) -> list[BaseProcess]:
    """Start the ranks of a world, each of which calls a function.

    Args:
        size: number of ranks; a single one gets no launcher's variables.
        log: file to which their output is appended.
        function: of a module; if its result is a number, it is the exit status.
        arguments: of the function.
        method: `spawn` starts interpreters as launchers do, each of which orders sets in its own
            way; by default ranks fork from one process; `fork` forks this one, without a group.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
    place["TORCHELASTIC_RUN_ID"] = uuid.uuid4().hex
    ranks = []
    for rank in range(size):
        own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
        rank_arguments = ({**inherited(), **own}, log, function, *arguments)
        with mock.patch.dict(os.environ, PYTHONHASHSEED=str(rank)):
            ranks.append(_process(method, *rank_arguments))
    return ranks


def _process(method: str, *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(IMPORTED)
    process: Any = context.Process(target=_rank, args=arguments)  # type: ignore[attr-defined]
    process.start()
    return process


def _rank(environ: dict[str, str], log: Path, function: Callable[..., Any], *args: Any) -> None:
    os.setsid()
    gc.freeze()  # garbage collection of the imports would copy the fork's pages
    os.environ.clear()
    os.environ.update(environ)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for number, name in ((1, "stdout"), (2, "stderr")):  # a fork of pytest has pytest's streams
        setattr(sys, name, os.fdopen(number, "w", 1, encoding="utf-8", closefd=False))
    sys.exit(function(*args))


def in_world(
    size: int, function: Callable[..., Any], *arguments: Any, status: int = 0, method: str = FORKED
) -> str:
    """Return what the ranks of a `world` printed; all must end with this status, in time."""
    end = time.monotonic() + PATIENCE_S
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        log.touch()
        ranks = world(size, log, function, *arguments, method=method)
        try:
            for rank in ranks:
                rank.join(max(0.0, end - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
        for rank in ranks:
            rank.join()
        output = log.read_text(encoding="utf-8")
    statuses = [rank.exitcode for rank in ranks]
    assert statuses == [status] * size, f"status {statuses}\n{output[-4000:]}"
    return output


def unisono_here(*arguments: str) -> int:
    """Run a command line in this process; return its exit status."""
    from lit_models.__main__ import main

    sys.argv = ["unisono", *arguments]
    return main()


def findings(printed: str) -> list[dict[str, str]]:
    """Return level, check, what and todo of each finding that `unisono doctor` printed."""
    printed = re.sub(r"\n {24}(?!->) *", " ", printed)  # join continued lines
    line = r"^(ok|warning|error) +(\S.{13}) (.*)(?:\n +-> (.*))?$"
    names = ("level", "check", "what", "todo")
    rows = [dict(zip(names, row, strict=True)) for row in re.findall(line, printed, re.M)]
    return [row | {"check": row["check"].rstrip()} for row in rows]
