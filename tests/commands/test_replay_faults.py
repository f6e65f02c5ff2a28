"""The first tensor that is not finite, found sample by sample; -inf is what masks are made of."""

from typing import Any

import torch
from torch import Tensor, nn

from lit_models.commands.replay import (
    FaultSearch,
    block_of,
    gradients,
    highest_dropout,
    sample_loss,
)
from lit_models.training.exact import ExactModule, LossSum


class Halves(ExactModule):
    """1 / x, then a mask of -inf, then a softmax: a sample of 0 makes the second module's inf."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.ModuleDict({"scale": nn.Identity(), "invert": Invert(), "end": Masked()})

    def training_terms(self, batch: dict[str, Any]) -> dict[str, LossSum]:
        hidden = batch["values"]
        for part in self.network.values():
            hidden = part(hidden)
        total = hidden.sum() * batch["factor"]
        return {"sum": LossSum(total, batch["weight"].sum())}


class Invert(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1 / x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.tensor([0.0, float("-inf")]))
        self.soft = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.soft(x * self.weight + self.mask)


def one(sample_id: int, value: float, factor: float = 1.0) -> dict[str, Any]:
    return {
        "values": torch.full((1, 2), value),
        "factor": torch.tensor(factor),
        "sample_id": torch.tensor([sample_id]),
        "weight": torch.ones(1),
        "step_denominators": {"sum": 2.0},
    }


def search(*batches: dict[str, Any]) -> list[tuple]:
    module = Halves()
    with torch.no_grad(), FaultSearch(module) as found:
        for batch in batches:
            found.end_sample(sample_loss(module, batch))
    assert all(not part._forward_hooks for part in module.modules())
    return [(f.module, f.kind, f.tensor, f.holds, f.count, f.samples) for f in found.all_faults()]


def test_a_mask_of_minus_infinity_is_no_fault():
    assert search(one(3, 2.0), one(4, -2.0)) == []


def test_the_first_bad_output_is_named_with_its_samples():
    faults = search(one(3, 2.0), one(5, 0.0), one(8, 0.0))
    assert faults == [("network.invert", "output", "", "inf", 2, [5, 8])]


def test_what_goes_wrong_after_the_modules_is_the_losss_own():
    faults = search(one(3, 2.0, float("nan")), one(4, 2.0), one(6, 1.0, float("inf")))
    assert faults == [("", "loss", "sum", "nan", 1, [3, 6])]


def test_a_bad_weight_that_no_sample_meets_is_listed_too():
    module = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    module[1].bias.data.fill_(float("inf"))
    (fault,) = FaultSearch(module).all_faults()
    assert (fault.module, fault.kind, fault.tensor, fault.samples) == ("1", "weight", "bias", [])


def test_a_gradient_that_is_not_finite_is_found_where_the_loss_is():
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(0.0)

    def root(batch: dict[str, Any]) -> Tensor:
        return module(batch["values"]).abs().sqrt().sum()  # slope inf at 0

    total, fault = gradients(module, iter([{"values": torch.ones(1, 1)}]), root)
    assert total == 0.0
    assert fault is not None
    assert (fault.kind, fault.tensor) == ("gradient", "weight")
    assert gradients(module, iter([{"values": torch.zeros(1, 1)}]), lambda b: root(b) * 0)[1]


def test_blocks_are_numbered_layers_or_the_modules_above_the_weights():
    assert block_of("network.encoder.layers.11.norm.weight") == "network.encoder.layers.11"
    assert block_of("network.encoder.norm.weight") == "network.encoder.norm"
    assert block_of("a.b.c.d.weight") == "a.b.c"
    assert block_of("weight") == "weight"


def test_the_largest_dropout_counts():
    assert highest_dropout(nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.3))) == 0.3
    assert highest_dropout(nn.Linear(1, 1)) == 0.0
