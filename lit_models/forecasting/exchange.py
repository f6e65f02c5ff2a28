"""What ranks on one machine cost each other: the exchange of gradients, and shared cores.

`python -m lit_models.forecasting.exchange STATE` runs as one of some ranks; it is `State` in JSON.
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
# Rounds of a measurement: the first of fsdp's take twice as long as later ones.
LEAST_ROUNDS, MOST_ROUNDS, ENOUGH_S = 4, 24, 12.0
BUCKET_BYTES = 25 * 2**20  # of ddp, unless its option says another number
LEAST_BYTES = 2**20  # below, the time of a message hardly depends on its size
ROWS, WIDTH = 512, 512  # of the work with which ranks disturb each other


@dataclass(frozen=True)
class State:
    """What a run's devices send each other.

    Args:
        gradient_bytes: of all gradients.
        groups: (trained, frozen) parameters of each group that fsdp gathers at a time.
        frees: whether fsdp frees a group between its forward and its backward pass.
        bytes_per_parameter: 8, 4 or 2.
    """

    gradient_bytes: int
    groups: list[tuple[int, int]]
    frees: bool = True
    bytes_per_parameter: int = 4


@dataclass(frozen=True)
class Exchange:
    """Measured with real ranks on this machine.

    Args:
        sum_s: seconds in which ddp sums all gradients, bucket by bucket.
        sharded_s: seconds by which fsdp makes a micro-batch longer: groups gathered and freed,
            gradients summed into shards.
        slowdown: how many times longer the same work takes where all ranks do it at once.
    """

    sum_s: float
    sharded_s: float
    slowdown: float


def measured(num_devices: int, state: State, threads: int) -> Exchange:
    """Return what so many ranks on this machine measure of each other.

    Args:
        num_devices: ranks; at most what the machine has for them.
        state: of the run.
        threads: of each rank on a CPU.

    Raises:
        RuntimeError: a rank failed, or did not end.
    """
    from lit_models.training.local_ranks import fit_environment, run_ranks, sigterm_as_exit

    command = ["-m", "lit_models.forecasting.exchange", json.dumps(asdict(state))]
    environ = fit_environment() | {"OMP_NUM_THREADS": str(threads)}
    try:
        with sigterm_as_exit():
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


def _as_rank(state: State) -> Exchange:
    """Measure as one rank of those that were started."""
    from lit_models.training.local_ranks import end_with_parent, leave_group

    end_with_parent(os.environ)  # before torch is there, which takes seconds
    import torch
    import torch.distributed as dist

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        slowdown = 1.0 if on_gpu else _slowdown(dist, torch)
        size = min(state.gradient_bytes, BUCKET_BYTES)
        bucket = torch.zeros(_elements(size, dist.get_world_size()), device=device)
        buckets = state.gradient_bytes / (4 * len(bucket))
        sum_s = _seconds(torch, lambda: dist.all_reduce(bucket)) * buckets
        return Exchange(sum_s, _sharded_s(torch, state, device), slowdown)
    finally:
        leave_group()


def _sharded_s(torch: Any, state: State, device: Any) -> float:
    """Return by how much fsdp makes a micro-batch longer, of a module that has the run's sizes
    and computes next to nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # Parameters of other sizes are rare, and count as float32.
    dtype = {8: torch.float64, 2: torch.bfloat16}.get(state.bytes_per_parameter, torch.float32)

    class Group(torch.nn.Module):
        def __init__(self, trained: int, frozen: int) -> None:
            super().__init__()
            for name, count in (("trained", trained), ("frozen", frozen)):
                if count:
                    values = torch.zeros(-(-count // WIDTH), WIDTH, dtype=dtype, device=device)
                    self.register_parameter(name, torch.nn.Parameter(values, name == "trained"))

        def forward(self, x: Any) -> Any:
            return x + sum(part[:1].sum() for part in self.parameters())

    groups = [Group(*counts) for counts in state.groups if any(counts)]
    whole = torch.nn.Sequential(*groups)
    x = torch.zeros(1, device=device, requires_grad=True)

    def micro_batch() -> None:
        whole(x).sum().backward()
        whole.zero_grad()

    alone = _seconds(torch, micro_batch)
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for group in groups[:-1]:
        fully_shard(group, mesh=mesh, reshard_after_forward=state.frees)
    fully_shard(whole, mesh=mesh, reshard_after_forward=False)
    return max(0.0, _seconds(torch, micro_batch) - alone)


def _elements(num_bytes: int, world: int) -> int:
    """Return the float32 values of a message, a multiple of the ranks."""
    values = max(num_bytes, LEAST_BYTES) // 4
    return values // world * world


def _seconds(torch: Any, exchange: Callable[[], Any]) -> float:
    """Return the median seconds of a message, of the rank that waits longest, once the first
    third of the rounds is over."""
    exchange()
    first = _largest(torch, _round_s(torch, exchange))  # all ranks want as many rounds
    rounds = min(MOST_ROUNDS, max(LEAST_ROUNDS, int(ENOUGH_S / first)))
    seconds = [_round_s(torch, exchange) for _ in range(rounds)]
    return _largest(torch, statistics.median(seconds[rounds // 3 :]))


def _round_s(torch: Any, exchange: Callable[[], Any]) -> float:
    torch.distributed.barrier()
    begun = time.perf_counter()
    exchange()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


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
    result = _as_rank(State(**json.loads(sys.argv[1])))
    if os.environ["RANK"] == "0":
        print(json.dumps(asdict(result)))
