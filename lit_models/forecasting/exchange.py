"""What ranks on one machine cost each other: the exchange of gradients, and shared cores.

`python -m lit_models.forecasting.exchange GRADIENT_BYTES GATHERED_BYTES` runs as one of some ranks.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

TIMEOUT_S = 120.0
ROUNDS = 5
BUCKET_BYTES = 25 * 2**20  # of ddp, unless its option says another number
LEAST_BYTES = 2**20  # below, the time of a message hardly depends on its size
ROWS, WIDTH = 512, 512  # of the work with which ranks disturb each other


@dataclass(frozen=True)
class Exchange:
    """Measured with real ranks on this machine.

    Args:
        sum_s: seconds in which ddp sums all gradients, bucket by bucket.
        gather_s: seconds in which fsdp gathers all weights once, block by block.
        scatter_s: seconds in which fsdp sums all gradients into shards, block by block.
        slowdown: how many times longer the same work takes where all ranks do it at once.
    """

    sum_s: float
    gather_s: float
    scatter_s: float
    slowdown: float


def measured(num_devices: int, num_bytes: int, block_bytes: int, threads: int) -> Exchange:
    """Return what so many ranks on this machine measure of each other.

    Args:
        num_devices: ranks; at most what the machine has for them.
        num_bytes: of all gradients.
        block_bytes: of what fsdp gathers at a time.
        threads: of each rank on a CPU.

    Raises:
        RuntimeError: a rank failed, or did not end.
    """
    from lit_models.training.local_ranks import run_ranks

    command = ["-m", "lit_models.forecasting.exchange", str(num_bytes), str(block_bytes)]
    environ = {"OMP_NUM_THREADS": str(threads)}
    try:
        statuses, printed = run_ranks(num_devices, command, TIMEOUT_S, True, environ)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(_failed(num_devices, "they did not end")) from error
    if any(statuses):
        raise RuntimeError(_failed(num_devices, f"their exit statuses are {statuses}"))
    return Exchange(**json.loads(printed))


def ring_share(num_devices: int) -> float:
    """Return how many times a message passes each device when it is summed around a ring."""
    return 2 * (num_devices - 1) / num_devices


def _failed(num_devices: int, why: str) -> str:
    return (
        f"the rehearsal of the exchange between {num_devices} processes failed: {why}. `unisono "
        f"doctor --collectives --devices={num_devices}` says more; --bandwidth_gib_s gives the "
        "speed without measuring."
    )


def _as_rank(num_bytes: int, block_bytes: int) -> Exchange:
    """Measure as one rank of those that were started."""
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
    world = dist.get_world_size()
    try:
        slowdown = 1.0 if on_gpu else _slowdown(dist, torch)
        bucket = torch.zeros(_elements(min(num_bytes, BUCKET_BYTES), world), device=device)
        block = torch.zeros(_elements(block_bytes, world), device=device)
        shares = list(block.chunk(world))
        share = torch.zeros_like(shares[0])
        of_bucket = num_bytes / (4 * len(bucket))
        of_block = num_bytes / (4 * len(block))
        return Exchange(
            _seconds(torch, lambda: dist.all_reduce(bucket)) * of_bucket,
            _seconds(torch, lambda: dist.all_gather(shares, share)) * of_block,
            _seconds(torch, lambda: dist.reduce_scatter(share, shares)) * of_block,
            slowdown,
        )
    finally:
        dist.destroy_process_group()


def _elements(num_bytes: int, world: int) -> int:
    """Return the float32 values of a message, a multiple of the ranks."""
    values = max(num_bytes, LEAST_BYTES) // 4
    return values // world * world


def _seconds(torch: Any, exchange: Callable[[], Any]) -> float:
    """Return the median seconds of a message, of the rank that waits longest."""
    import torch.distributed as dist

    exchange()
    seconds = []
    for _ in range(ROUNDS):
        dist.barrier()
        begun = time.perf_counter()
        exchange()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return _largest(torch, statistics.median(seconds))


def _slowdown(dist: Any, torch: Any) -> float:
    """Return the time of equal work by all ranks at once, over that of rank 0 alone."""
    alone = together = 0.0
    work = _work(torch)
    for _ in range(2):  # in turns, so that both meet the same machine
        dist.barrier()
        if dist.get_rank() == 0:
            alone += work()
        dist.barrier()
        together += work()
    together = _largest(torch, together)
    return max(1.0, together / _largest(torch, alone))


def _work(torch: Any) -> Callable[[], float]:
    """Return a function that does about what layers do, products and passes over memory, and
    returns its seconds."""
    rows = torch.ones(ROWS, WIDTH)
    up, down = torch.full((WIDTH, 4 * WIDTH), 1e-3), torch.full((4 * WIDTH, WIDTH), 1e-3)
    gelu = torch.nn.functional.gelu

    def work() -> float:
        begun = time.perf_counter()
        for _ in range(30):
            (rows + gelu(rows @ up) @ down).softmax(-1)
        return time.perf_counter() - begun

    work()
    return work


def _largest(torch: Any, value: float) -> float:
    import torch.distributed as dist

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


if __name__ == "__main__":
    result = _as_rank(*map(int, sys.argv[1:3]))
    if os.environ["RANK"] == "0":
        print(json.dumps(asdict(result)))
