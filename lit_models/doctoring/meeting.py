"""Where the ranks of a job meet before there is a process group, and what it means if not."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lit_models.doctoring import launchers
from lit_models.doctoring.findings import Finding

TIMEOUT_S, GRACE_S = 60.0, 60.0


@dataclass(frozen=True)
class Meeting:
    """The place at which all ranks of a job meet, before there is a group.

    Args:
        store: of torch, below a name of its own.
        rank: of this process.
        world: ranks in all.
        local_rank: of this process on its machine.
        timeout_s: how long to wait for the other ranks.
    """

    store: Any
    rank: int
    world: int
    local_rank: int
    timeout_s: float


def meet(environ: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> Meeting | Finding:
    """Return the meeting of the ranks that a launcher started, or why there is none.

    Args:
        environ: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
        timeout_s: how long to wait for rank 0.
    """
    import torch.distributed as dist

    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    try:
        store = dist.TCPStore(
            address,
            port,
            world,
            is_master=rank == 0 and not launchers.has_agent_store(environ),
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except dist.DistError as error:
        return _unreached(rank, f"{address}:{port}", timeout_s, error)
    # Rank 0 may wait for a missing rank and look at its machine before it answers.
    store.set_timeout(timedelta(seconds=2 * timeout_s + GRACE_S))
    store = dist.PrefixStore("doctor", store)
    store.set(f"here-{rank}", socket.gethostname())
    return Meeting(store, rank, world, int(environ.get("LOCAL_RANK", 0)), timeout_s)


def left_alone(rank: int, reason: str) -> Finding:
    """Return the finding of a rank that another one left in the middle."""
    return Finding(
        "group",
        "error",
        f"rank {rank} on {socket.gethostname()} was left by another rank ({reason})",
        "a rank ended, or its machine is not reached any more",
        "look at the logs of the other ranks; NCCL_DEBUG=INFO and NCCL_SOCKET_IFNAME on machines "
        "with GPUs",
    )


def _unreached(rank: int, place: str, timeout_s: float, error: Exception) -> Finding:
    reason = str(error).partition("\n")[0]
    if rank == 0:
        return Finding(
            "group",
            "error",
            f"rank 0 cannot listen at {place} ({reason})",
            "no rank finds rank 0: a run cannot begin",
            "another MASTER_PORT, or end the program that has it; MASTER_ADDR must be an address "
            "of rank 0's machine",
        )
    return Finding(
        "group",
        "error",
        f"rank {rank} on {socket.gethostname()} did not reach rank 0 at {place} within "
        f"{timeout_s:.0f} s ({reason})",
        "a run would wait, and end after the time limit of its process group",
        "the same MASTER_ADDR and MASTER_PORT on all machines, a firewall that lets it through, "
        "and rank 0's own log",
    )
