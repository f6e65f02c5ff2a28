"""Runs commands and worlds of processes, and ends every process that came of them afterwards.

`run` starts a command as a user starts it. What else runs `unisono`, and the ranks of a world, are
forks of one process that has imported all, which takes longer than most runs; what they start
themselves are processes as always. The ranks find each other as those of torchrun do.
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
# What an earlier run in this process, or whoever started the tests, may have left.
LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
REMAINS_S = 60.0  # loader workers look every few seconds whether their parent lives
PATIENCE_S = 900.0  # after which a test hangs: no proof, so that a busy machine passes too
IMPORTED = ["tests.distributed.jobs", "lit_models.cli", "tensorboard", "pytest"]
SESSIONS: dict[str, int] = {}  # mark -> that of a fork, whose environment the system does not show


def run(
    *arguments: str, timeout_s: float = PATIENCE_S, **environ: str
) -> subprocess.CompletedProcess:
    """Return the finished `python arguments`; no process of it is left, whatever happened."""
    statuses, outputs = finished(started(*arguments, is_fork=False, **environ), limit_s=timeout_s)
    return subprocess.CompletedProcess(arguments, statuses[0], outputs[0])


def finished(
    *launched: tuple[Any, str], limit_s: float = PATIENCE_S
) -> tuple[list[int], list[str]]:
    """Return the statuses and outputs of started commands; no process of them is left."""
    try:
        outputs = [process.communicate(timeout=limit_s)[0] for process, _ in launched]
    finally:
        for process, mark in launched:
            ended(process, mark)
    return [process.returncode for process, _ in launched], outputs


def run_clean(
    *arguments: str, meanwhile: Callable[[Any], Any] | None = None
) -> subprocess.CompletedProcess:
    """Return the finished `python arguments`, which left no process, port or shared memory.

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
    """Return the names of shared memory that no live process has: those of others stand beside."""
    names = {str(entry.inode()): entry.name for entry in os.scandir("/dev/shm")}
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):  # it ended
            for inode in re.findall(r"(\d+) +/dev/shm/", maps.read_text()):
                names.pop(inode, None)
    return set(names.values())


class Fork:
    """A command that runs in a fork; it has what is used of a `subprocess.Popen`."""

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
                os.kill(pid, signal.SIGABRT)  # at which each writes its stacks
            self.process.join(10)
        output = self.log.read_text(encoding="utf-8")
        assert not is_late, f"no end after {timeout} s\n{output}"
        return output, None

    def wait(self) -> None:
        self.process.join()
        self.log.unlink(missing_ok=True)  # whoever waits has read it

    returncode = property(poll)


def _command(*arguments: str) -> None:
    """Be `python -m lit_models arguments`, also to those that start it once more."""
    warnings.simplefilter("ignore")
    multiprocessing.set_start_method(None, force=True)  # not that of the fork
    sys.argv[1:] = arguments
    runpy.run_module("lit_models", run_name="__main__", alter_sys=True)


def started(*arguments: str, is_fork: bool = True, **environ: str) -> tuple[Any, str]:
    """Start `python arguments` in a session of its own; return it and its mark."""
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
    """Return the environment of this process without what a launcher sets."""
    return {name: value for name, value in os.environ.items() if name not in LAUNCHERS}


def ended(process: subprocess.Popen, mark: str) -> None:
    """Kill what is left of a started command."""
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):  # it ended in between
            os.kill(pid, signal.SIGKILL)
    process.wait()


def processes_of(mark: str) -> list[int]:
    """Return the live processes that inherited a mark, or are in the session of the fork that has
    it; launchers give them groups of their own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended, or belongs to somebody else
            environ, pid = (folder / "environ").read_bytes(), int(folder.name)
            is_of_fork = environ and os.getsid(pid) == SESSIONS.get(mark)
            if is_of_fork or f"{MARK}={mark}".encode() in environ:
                found.append(pid)
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def world(
    size: int, log: Path, function: Callable[..., Any], *arguments: Any, method: str = FORKED
) -> list[BaseProcess]:
    """Start the ranks of a world, in each of which a function is called.

    Args:
        size: how many; one alone has no launcher's variables.
        log: file to which their output is appended.
        function: of a module; its result, where it is a number, is the exit status.
        arguments: of the function.
        method: `spawn` starts interpreters as launchers do, each of which orders sets in its own
            way; by default they are forks of one, by `fork` of this process, without a group.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    place |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "GROUP_RANK": "0"}
    place["TORCHELASTIC_RUN_ID"] = uuid.uuid4().hex
    ranks = []
    for rank in range(size):
        own = {**place, "RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}
        given = ({**inherited(), **own}, log, function, *arguments)
        with mock.patch.dict(os.environ, PYTHONHASHSEED=str(rank)):
            ranks.append(_process(method, *given))
    return ranks


def _process(method: str, *given: Any) -> BaseProcess:
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(IMPORTED)
    process: Any = context.Process(target=_rank, args=given)  # type: ignore[attr-defined]
    process.start()
    return process


def _rank(environ: dict[str, str], log: Path, function: Callable[..., Any], *given: Any) -> None:
    os.setsid()
    gc.freeze()  # a search for garbage in what is imported would copy the pages of the fork
    os.environ.clear()
    os.environ.update(environ)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    for number, name in ((1, "stdout"), (2, "stderr")):  # a fork of pytest's has its own here
        setattr(sys, name, os.fdopen(number, "w", 1, encoding="utf-8", closefd=False))
    sys.exit(function(*given))


def in_world(
    size: int, function: Callable[..., Any], *arguments: Any, status: int = 0, method: str = FORKED
) -> str:
    """Return what the ranks of a `world` printed, which all ended with a status, in time."""
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
    found = [rank.exitcode for rank in ranks]
    assert found == [status] * size, f"status {found}\n{output[-4000:]}"
    return output


def unisono_here(*arguments: str) -> int:
    """Run a command line in this process; return its exit status."""
    from lit_models.__main__ import main

    sys.argv = ["unisono", *arguments]
    return main()


def findings(printed: str) -> list[dict[str, str]]:
    """Return the level, check, what and todo of each line that `unisono doctor` printed."""
    printed = re.sub(r"\n {24}(?!->) *", " ", printed)  # lines that go on
    line = r"^(ok|warning|error) +(\S.{13}) (.*)(?:\n +-> (.*))?$"
    names = ("level", "check", "what", "todo")
    found = [dict(zip(names, one, strict=True)) for one in re.findall(line, printed, re.M)]
    return [one | {"check": one["check"].rstrip()} for one in found]
