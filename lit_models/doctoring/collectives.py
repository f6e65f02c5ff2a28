"""A real process group: known answers, bandwidth by message size, and who is slow or missing.

Shapes: W ranks.
"""

import json
import socket
import statistics
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from lit_models.doctoring.findings import Finding, Level, ok, worst
from lit_models.doctoring.meeting import Meeting, left_alone
from lit_models.training.local_ranks import run_ranks

SIZES_BYTES = (4 * 2**10, 256 * 2**10, 4 * 2**20, 64 * 2**20)
ROUNDS = 5
LEAVE_S = 10.0
SLOW_FACTOR, SLOW_LEAST_S = 2.0, 0.05
MOST_CLOCK_S = 5.0


def check_as_rank(meeting: Meeting, own: list[Finding]) -> tuple[list[Finding], Level]:
    """Return what is to be shown, on rank 0 alone, and the level with which every rank ends.

    Args:
        meeting: of all ranks.
        own: what this rank found on its machine.
    """
    import torch.distributed as dist

    try:
        return _checked(meeting, own)
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        return [left_alone(meeting.rank, reason)], "error"


def start_ranks(devices: int, arguments: list[str], timeout_s: float) -> int:
    """Start one process per device on this machine; return 0 where each of them does.

    Args:
        devices: ranks.
        arguments: of `unisono doctor`, without those that choose the devices.
        timeout_s: how long each waits for the others.
    """
    command = ["-m", "lit_models", "doctor", *arguments]
    statuses, _ = run_ranks(devices, command, timeout_s)
    return 1 if any(statuses) else 0


def _checked(meeting: Meeting, own: list[Finding]) -> tuple[list[Finding], Level]:
    """As `check_as_rank`, where the ranks stay together."""
    store, rank = meeting.store, meeting.rank
    missing = _missing(store, meeting.world, meeting.timeout_s) if rank == 0 else []
    if rank == 0:
        store.set("missing", json.dumps(missing))
    if json.loads(store.get("missing")):
        findings = [_missing_finding(missing, meeting.world, meeting.timeout_s)]
    else:
        findings = _group(meeting, own)
    if rank == 0:
        findings = [*own, *findings]
        store.set("level", worst(findings))
    level: Level = store.get("level").decode()
    _leave(meeting, missing)
    return findings if rank == 0 else [], level


def _group(meeting: Meeting, own: list[Finding]) -> list[Finding]:
    """Form a real process group, and try it; findings of other machines come first."""
    import torch.distributed as dist

    store, rank, world = meeting.store, meeting.rank, meeting.world
    elsewhere = _of_other_machines(meeting, own)
    backend, device = _backend(meeting.local_rank)
    options: dict[str, Any] = {"timeout": timedelta(seconds=meeting.timeout_s)}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)
    try:
        findings = [
            *elsewhere,
            ok("group", f"{world} ranks by {backend} on {_hosts(store, world)}"),
            _answers(rank, world, device),
            _clocks(world, device),
            _stragglers(store, world, device),
            _bandwidth(world, device),
        ]
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return findings


def _of_other_machines(meeting: Meeting, own: list[Finding]) -> list[Finding]:
    """Tell rank 0 what is wrong on this machine; return on rank 0 what the others told."""
    store, host = meeting.store, socket.gethostname()
    if meeting.rank != 0:
        faults = [asdict(finding) for finding in own if finding.level != "ok"]
        store.set(f"found-{meeting.rank}", json.dumps([host, faults]))
        return []
    findings = []
    for rank in range(1, meeting.world):
        name, faults = json.loads(store.get(f"found-{rank}"))
        for fault in faults:
            what = f"{name} (rank {rank}): {fault['what']}"
            findings.append(Finding(**{**fault, "what": what}))
    return findings


def _leave(meeting: Meeting, missing: list[int]) -> None:
    """Let rank 0, where the store may live, be the last one to go."""
    store, rank = meeting.store, meeting.rank
    store.set(f"left-{rank}", "")
    if rank == 0:
        others = [f"left-{r}" for r in range(1, meeting.world) if r not in missing]
        end = time.monotonic() + LEAVE_S
        while not all(store.check([name]) for name in others) and time.monotonic() < end:
            time.sleep(0.02)


def _missing(store: Any, world: int, timeout_s: float) -> list[int]:
    """Return the ranks that did not come in time."""
    end = time.monotonic() + timeout_s
    missing = list(range(world))
    while missing and time.monotonic() < end:
        missing = [rank for rank in missing if not store.check([f"here-{rank}"])]
        time.sleep(0.02)
    return missing


def _missing_finding(missing: list[int], world: int, timeout_s: float) -> Finding:
    shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
    return Finding(
        "group",
        "error",
        f"rank {shown} of {world} did not come within {timeout_s:.0f} s",
        "a run would wait for it, and end after the time limit of its process group",
        "look at that rank's log; the same MASTER_ADDR and MASTER_PORT on all machines, and a "
        "firewall that lets it through",
    )


def _backend(local_rank: int) -> tuple[str, Any]:
    import torch

    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return "nccl", device
    return "gloo", torch.device("cpu")


def _hosts(store: Any, world: int) -> str:
    names = [store.get(f"here-{rank}").decode() for rank in range(world)]
    return ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names))


def _answers(rank: int, world: int, device: Any) -> Finding:
    """Sum and gather numbers whose result is known."""
    import torch
    import torch.distributed as dist

    summed = torch.full((1000,), float(rank + 1), device=device)
    dist.all_reduce(summed)
    gathered = [torch.zeros(3, device=device) for _ in range(world)]
    dist.all_gather(gathered, torch.full((3,), float(rank), device=device))
    right = bool((summed == world * (world + 1) / 2).all()) and all(
        bool((values == index).all()) for index, values in enumerate(gathered)
    )
    agreed = torch.tensor([float(right)], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    if not bool(agreed):
        return Finding(
            "answers",
            "error",
            "an all-reduce or an all-gather gave a wrong result",
            "every gradient would be wrong",
            "NCCL_P2P_DISABLE=1 tells whether a link between GPUs is at fault; else mend the "
            "driver or the network card",
        )
    return ok("answers", "barrier, all-reduce and all-gather gave the known results")


def _clocks(world: int, device: Any) -> Finding:
    import torch
    import torch.distributed as dist

    dist.barrier()
    times = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(world)]
    now = torch.tensor([time.time()], dtype=torch.float64, device=device)
    dist.all_gather(times, now)
    values = [float(value) for value in times]
    apart = max(values) - min(values)
    if apart > MOST_CLOCK_S:
        middle = statistics.median_low(values)
        worst = max(range(world), key=lambda rank: abs(values[rank] - middle))
        return Finding(
            "clocks",
            "error",
            f"{apart:.0f} s between the clocks of the ranks; rank {worst} is the furthest off",
            "claims and checkpoints are compared by their time, and logs of ranks do not fit",
            "set the clocks by NTP (timedatectl set-ntp true)",
        )
    return ok("clocks", f"the ranks agree within {apart:.2f} s")


def _stragglers(store: Any, world: int, device: Any) -> Finding:
    """Time the same work on every rank, and name one that takes much longer."""
    import torch
    import torch.distributed as dist

    matrix = torch.ones(512, 512, device=device)
    dist.barrier()
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(10):
            matrix = (matrix @ matrix).clamp(max=1.0)
        float(matrix[0, 0])  # waits for a GPU
        seconds.append(time.perf_counter() - begun)
    mine = torch.tensor([statistics.median(seconds)], dtype=torch.float64, device=device)
    all_times = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(all_times, mine)
    values = [float(value) for value in all_times]
    slowest, middle = max(range(world), key=values.__getitem__), statistics.median(values)
    what = f"a step of multiplications: {min(values) * 1e3:.1f} to {max(values) * 1e3:.1f} ms"
    if values[slowest] > max(SLOW_FACTOR * middle, middle + SLOW_LEAST_S):
        host = store.get(f"here-{slowest}").decode()
        return Finding(
            "slowest rank",
            "warning",
            f"{what}; rank {slowest} on {host} takes {values[slowest] / middle:.1f} times the "
            "median",
            "all wait for it in every step",
            "another program, a hot GPU or a lower clock: nvidia-smi, top",
        )
    return ok("slowest rank", f"{what}, rank {slowest} the slowest")


def _bandwidth(world: int, device: Any) -> Finding:
    """Time all-reduces; bandwidth is that of the ring: 2 (W - 1) / W of the message per second."""
    import torch
    import torch.distributed as dist

    shown = []
    for size in SIZES_BYTES:
        values = torch.zeros(size // 4, device=device)
        dist.all_reduce(values)
        seconds = []
        for _ in range(ROUNDS):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(values)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - begun)
        rate = 2 * (world - 1) / world * size / statistics.median(seconds) / 2**30
        unit = f"{size // 2**10} KiB" if size < 2**20 else f"{size // 2**20} MiB"
        shown.append(f"{unit} {statistics.median(seconds) * 1e3:.2f} ms ({rate:.2f} GiB/s)")
    return ok("all-reduce", ", ".join(shown))
