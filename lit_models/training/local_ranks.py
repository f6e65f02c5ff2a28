"""Processes of one group on this machine, started for a short look and ended afterwards."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping

GRACE_S = 120.0  # for imports on a busy machine
# Of a launcher around this process, whose world is not theirs.
FOREIGN = ("SLURM_", "TORCHELASTIC_", "NODE_RANK", "GROUP_RANK")


def run_ranks(
    devices: int,
    command: list[str],
    timeout_s: float,
    is_captured: bool = False,
    environ: Mapping[str, str] | None = None,
) -> tuple[list[int], str]:
    """Return the exit status of each rank, and what rank 0 printed where it is captured.

    Args:
        devices: ranks.
        command: arguments of Python; RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
            are in its environment. Ranks other than 0 print nothing.
        timeout_s: how long ranks wait for each other.
        is_captured: keep what rank 0 prints.
        environ: further variables.

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
            ranks.append(subprocess.Popen(arguments, env=own | place, stdout=out, text=True))
        printed, _ = ranks[0].communicate(timeout=timeout_s + GRACE_S)
        return [rank.wait(timeout_s + GRACE_S) for rank in ranks], printed or ""
    finally:
        for process in ranks:
            process.kill()
            process.wait()


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
    }
