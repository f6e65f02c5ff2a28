"""Four ranks write sharded tensors into one folder, then again with a full disk on one."""

import resource
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lit_models.training.checkpoints import SAVES, gathered, put_together, write_folder

WORLD, FULL = 4, 2  # processes, and the rank whose disk is full in the second save
ROWS, FEW = torch.arange(15.0, dtype=torch.float64).reshape(5, 3), torch.ones(1, 2)
TABLE = torch.arange(24.0).reshape(4, 6)


def content(step: int) -> dict:
    """Return uneven rows, a rank without any, copies, columns, and rows that are split twice."""
    line, square = init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2))
    sharded = partial(distribute_tensor, src_data_rank=None)
    weight = sharded(ROWS, line, [Shard(0)])
    weights = {
        "weight": weight,
        "tied": weight,
        "few": sharded(FEW, line, [Shard(0)]),
        "hybrid": sharded(TABLE, square, [Replicate(), Shard(1)]),
        "twice": sharded(TABLE, square, [Shard(0), Shard(0)]),
        "plain": torch.tensor(3),
    }
    return {"state_dict": weights, "global_step": step}


def write(folder: Path) -> None:
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    index = dist.get_rank()
    rest, own = gathered(content(4), device, WORLD)
    save = partial(write_folder, rest, own, folder / "last.ckpt", dist.new_group(backend="gloo"))
    SAVES.write(save, in_background=True)
    for _ in range(200):  # as training steps do while a save is under way
        dist.all_reduce(torch.ones(1))
    SAVES.settle()
    rest, own = gathered(content(4), device, 1)
    assert bool(own) == (index == 0)
    if index == 0:
        torch.save(put_together(rest, own), folder / "one.ckpt")

    newer = gathered(content(8), device, WORLD)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if index == FULL:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        write_folder(*newer, folder / "last.ckpt")
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        (folder / f"error-{index}").write_text(str(error))
    dist.destroy_process_group()
