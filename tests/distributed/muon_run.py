"""Muon on matrices that two processes share, against whole ones, for tests/training/test_optim.py.

python -m tests.distributed.muon_run FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lit_models.training.optim import MuonAdamW, by_name, parameter_groups
from lit_models.training.sharding import sharded_like, whole

WORLD, STEPS = 2, 3


def network() -> nn.Module:
    """One matrix is higher than wide, one wider; three rows do not divide among two."""
    torch.manual_seed(5)
    layers = [nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 7), nn.Linear(7, 5, bias=False)]
    return nn.Sequential(*layers).double()


def optimizer_of(net: nn.Module) -> MuonAdamW:
    groups = parameter_groups(net, heads=[net[3].weight])
    return by_name(MuonAdamW(groups, lr=0.1, weight_decay=0.1))


def train(net: nn.Module, optimizer: MuonAdamW, steps: int) -> None:
    for _ in range(steps):
        net(torch.arange(5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def rank(index: int, folder: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=index, world_size=WORLD
    )
    plain = network()
    plain_optimizer = optimizer_of(plain)
    train(plain, plain_optimizer, 2 * STEPS)

    sharded = fully_shard(network(), mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = optimizer_of(sharded)
    train(sharded, optimizer, STEPS)
    state = optimizer.state_dict()  # through the form of a checkpoint, and back into shards
    whole_state = {
        i: {name: whole(value) for name, value in values.items()}
        for i, values in state["state"].items()
    }
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    cut = {
        i: {name: sharded_like(value, parameters[i]) for name, value in values.items()}
        for i, values in whole_state.items()
    }
    resumed = optimizer_of(sharded)
    resumed.load_state_dict({**state, "state": cut})
    train(sharded, resumed, STEPS)
    for name, parameter in sharded.named_parameters():
        expected = plain.get_parameter(name)
        torch.testing.assert_close(whole(parameter), expected.detach(), rtol=1e-11, atol=1e-12)
    moments = [resumed.state[p] for p in sharded.parameters()]
    assert all(isinstance(m.get("momentum_buffer", m.get("exp_avg")), DTensor) for m in moments)
    if index == 0:
        (Path(folder) / "agreed").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    processes.start_processes(rank, (sys.argv[1],), WORLD, start_method="fork")
