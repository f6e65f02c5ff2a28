"""Muon and AdamW as one optimizer, against torch's own two."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lit_models.training.optim import MuonAdamW, WarmupDecay, by_name, orthogonal, parameter_groups
from tests.distributed.launch import run
from tests.toy import LitToy, ToyData, ledger_lines, toy_trainer


def network() -> nn.Sequential:
    torch.manual_seed(5)
    layers = [nn.Embedding(5, 4), nn.Linear(4, 3), nn.Linear(3, 7), nn.Linear(7, 5, bias=False)]
    return nn.Sequential(*layers)


def groups_of(net: nn.Sequential) -> list[dict[str, Any]]:
    return parameter_groups(net, heads=[net[3].weight])


def loss_of(net: nn.Module) -> Tensor:
    return net(torch.arange(5)).square().sum()


def test_the_head_and_the_embedding_are_no_matrices_of_hidden_layers():
    net = network()
    kinds = {name: g["kind"] for g in groups_of(net) for name, _ in g["params"]}
    assert kinds == {
        "0.weight": "others",
        "1.weight": "matrices",
        "1.bias": "others",
        "2.weight": "matrices",
        "2.bias": "others",
        "3.weight": "heads",
    }
    decays = {name: "weight_decay" not in g for g in groups_of(net) for name, _ in g["params"]}
    assert [name for name, does in decays.items() if does] == ["1.weight", "2.weight", "3.weight"]
    tied = nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)])
    tied[1].weight = tied[0].weight
    [group] = parameter_groups(tied, heads=[tied[1].weight])
    assert (group["kind"], group["weight_decay"]) == ("others", 0.0)


def test_it_is_torchs_muon_on_matrices_and_torchs_adamw_on_the_rest():
    ours, theirs = network().bfloat16(), network().bfloat16()  # torch's iterates in bfloat16 alone
    optimizer = MuonAdamW(groups_of(ours), lr=0.02, adamw_factor=0.5, weight_decay=0.1)
    matrices = [theirs[1].weight, theirs[2].weight]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    others = [theirs[0].weight, theirs[1].bias, theirs[2].bias]
    adamw_groups = [{"params": others, "weight_decay": 0.0}, {"params": [theirs[3].weight]}]
    adamw = torch.optim.AdamW(
        adamw_groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    for _ in range(4):
        for net, optimizers in ((ours, [optimizer]), (theirs, [muon, adamw])):
            loss_of(net).backward()
            for each in optimizers:
                each.step()
                each.zero_grad()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_the_iterations_bring_singular_values_near_one(shape):
    matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    u, before, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix.clone())
    after = torch.linalg.svdvals(found)
    assert before.max() / before.min() > 2
    assert ((after > 0.6) & (after < 1.3)).all(), after
    torch.testing.assert_close(u.T @ found @ v.T, torch.diag((u.T @ found @ v.T).diag()))


def test_parameters_without_a_gradient_stand_still():
    net = network()
    optimizer = MuonAdamW(groups_of(net), lr=0.1)
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer.step()
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())
    assert not optimizer.state
    (net[1](torch.ones(4)).sum()).backward()
    optimizer.step()
    moved = [name for name, p in net.named_parameters() if not torch.equal(p, before[name])]
    assert moved == ["1.weight", "1.bias"]


def test_its_state_returns_by_name_whatever_the_order_of_groups():
    whole, halved = network(), network()
    optimizers = [by_name(MuonAdamW(groups_of(net), lr=0.1)) for net in (whole, halved)]
    for net, optimizer, steps in ((whole, optimizers[0], 4), (halved, optimizers[1], 2)):
        for _ in range(steps):
            optimizer.zero_grad()
            loss_of(net).backward()
            optimizer.step()
    turned = [{**g, "params": g["params"][::-1]} for g in groups_of(halved)[::-1]]
    resumed = by_name(MuonAdamW(turned, lr=0.1))
    resumed.load_state_dict(optimizers[1].state_dict())
    for _ in range(2):
        resumed.zero_grad()
        loss_of(halved).backward()
        resumed.step()
    for (name, found), expected in zip(halved.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_run_is_scheduled_saved_and_resumed(tmp_path: Path) -> None:
    def fit(folder: str, ckpt_path: Path | None = None, **budget: int) -> Path:
        schedule = partial(WarmupDecay, decay="linear", total_steps=14)
        trainer = toy_trainer(tmp_path / folder, limit_val_batches=0, **budget)
        trainer.fit(LitToy(partial(MuonAdamW, lr=0.01), schedule), ToyData(), ckpt_path=ckpt_path)
        return tmp_path / folder / "checkpoints" / "last.ckpt"

    paths = [fit("whole", max_epochs=2)]
    paths.append(fit("halves", fit("halves", max_steps=5), max_epochs=2))
    weights = [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-12, atol=0)
    rates = [line["learning_rate"] for line in ledger_lines(tmp_path / "whole")]
    assert rates[-1] < 0.1 * rates[0]


@pytest.mark.slow
def test_shards_of_two_processes_move_as_whole_matrices_do(tmp_path: Path) -> None:
    done = run("-m", "tests.distributed.muon_run", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "agreed").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": -1.0}, "lr must be 0 or more, got -1.0"),
        ({"momentum": 1.0}, "momentum must be 0 to below 1, got 1.0"),
        ({"betas": (0.9, 1.0)}, "each of betas must be 0 to below 1, got 1.0"),
    ],
)
def test_wrong_values_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        MuonAdamW(groups_of(network()), **values)


def test_bare_parameters_are_refused():
    with pytest.raises(ValueError, match="must be told which parameters.*parameter_groups"):
        MuonAdamW(network().parameters())
