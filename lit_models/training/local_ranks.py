"""Processes of one group on this machine, started for a short look and ended afterwards."""

import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

GRACE_S = 120.0  # for imports on a busy machine
# Of a launcher around this process, whose world is not theirs.
FOREIGN = ("SLURM_", "TORCHELASTIC_", "NODE_RANK", "GROUP_RANK")
LAUNCHED_BY = "UNISONO_LAUNCHED_BY"  # process id of the one that started a rank
_PR_SET_PDEATHSIG = 1  # man 2 prctl


def run_ranks(
    devices: int,
    command: list[str],
    timeout_s: float | None,
    is_captured: bool = False,
    environ: Mapping[str, str] | None = None,
    errors: Path | None = None,
) -> tuple[list[int], str]:
    """Return the exit status of each rank, and what rank 0 printed where it is captured.

    Args:
        devices: ranks.
        command: arguments of Python; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and
            what `end_with_parent` reads are in its environment. Ranks other than 0 print nothing.
        timeout_s: how long ranks wait for each other; none waits until they end.
        is_captured: keep what rank 0 prints.
        environ: further variables.
        errors: folder that takes what each rank says besides, a file each; none shows it.

    Raises:
        subprocess.TimeoutExpired: a rank did not end.
    """
    own = _environment(devices) | dict(environ or {})
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank in range(devices):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            kept = subprocess.PIPE if is_captured else None
            out = kept if rank == 0 else subprocess.DEVNULL
            arguments = [sys.executable, *command]
            with _errors_of(errors, rank) as err:
                ranks.append(
                    subprocess.Popen(arguments, env=own | place, stdout=out, stderr=err, text=True)
                )
        limit_s = None if timeout_s is None else timeout_s + GRACE_S
        printed, _ = ranks[0].communicate(timeout=limit_s)
        return [rank.wait(limit_s) for rank in ranks], printed or ""
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def fit_environment() -> dict[str, str]:
    """Return the variables of ranks that stand for those of a `fit`: its threads sleep while they
    wait, unless the user says otherwise (`lit_models.__main__` says why)."""
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}


def end_with_parent(environ: MutableMapping[str, str]) -> None:
    """Let this rank end with the process that started it, however that ends; Linux.

    A rank waits for others, or works as long as it needs, and nobody would read its answer. What
    says so is taken away: processes that this one starts are not meant.

    Args:
        environ: the environment; without `LAUNCHED_BY` it is no such rank, and nothing is done.

    Raises:
        OSError: the system refuses.
        RuntimeError: that process has ended already.
    """
    parent = environ.pop(LAUNCHED_BY, None)
    if parent is None or sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if int(parent) != os.getppid():  # it ended before it was watched
        raise RuntimeError("the process that started this rank is gone; start the run again.")


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit meanwhile, so that ranks are ended and folders removed.

    Only the main thread can; in another one nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would end the clearing up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        # None stands for a handler that Python did not set, and cannot set again.
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def leave_group() -> None:
    """End the group that this rank is in, if any, before Python ends.

    What is left of a group at the end of Python aborts the process after its success; a cycle of
    references, as fsdp makes them, keeps one.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


@contextmanager
def _errors_of(errors: Path | None, rank: int) -> Iterator[IO[str] | None]:
    """Give the file of what a rank says besides; none without a folder."""
    if errors is None:
        yield None
        return
    with (errors / f"rank-{rank}.err").open("w", encoding="utf-8") as file:
        yield file


def _environment(devices: int) -> dict[str, str]:
    """Return what all ranks have in common: a world of their own, at a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
    return own | {
        "WORLD_SIZE": str(devices),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        LAUNCHED_BY: str(os.getpid()),
    }
