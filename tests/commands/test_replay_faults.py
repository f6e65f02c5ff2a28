"""The first tensor that is not finite, found sample by sample; -inf is what masks are made of."""

import torch
from torch import Tensor, nn

from lit_models.commands.replay import FaultSearch, SampleLoss, block_of


class Halves(nn.Module):
    """1 / x, then a mask of -inf, then a softmax: a sample of 0 makes the second module's inf."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.ModuleDict({"scale": nn.Identity(), "invert": Invert(), "end": Masked()})

    def forward(self, value: float) -> Tensor:
        hidden = torch.full((1, 2), value)
        for part in self.network.values():
            hidden = part(hidden)
        return hidden.sum()


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


def search(*samples: tuple[int, float, float]) -> list[tuple]:
    """Return the faults of samples: id, value, factor of the loss."""
    module = Halves()
    with torch.no_grad(), FaultSearch(module) as found:
        for sample_id, value, factor in samples:
            share = float(module(value)) * factor
            found.end_sample(SampleLoss(sample_id, {"sum": share}, share))
    assert all(not part._forward_hooks for part in module.modules())
    faults = found.faults.values()
    return [(f.module, f.kind, f.tensor, f.holds, f.count, f.samples) for f in faults]


def test_a_mask_of_minus_infinity_is_no_fault():
    assert search((3, 2.0, 1.0), (4, -2.0, 1.0)) == []


def test_the_first_bad_output_is_named_with_its_samples():
    faults = search((3, 2.0, 1.0), (5, 0.0, 1.0), (8, 0.0, 1.0))
    assert faults == [("network.invert", "output", "", "inf", 2, [5, 8])]


def test_what_goes_wrong_after_the_modules_is_the_losss_own():
    faults = search((3, 2.0, float("nan")), (4, 2.0, 1.0), (6, 1.0, float("inf")))
    assert faults == [("", "loss", "sum", "nan", 1, [3, 6])]


def test_blocks_are_numbered_layers_or_the_modules_above_the_weights():
    assert block_of("network.encoder.layers.11.norm.weight") == "network.encoder.layers.11"
    assert block_of("network.encoder.norm.weight") == "network.encoder.norm"
    assert block_of("a.b.c.d.weight") == "a.b.c"
    assert block_of("weight") == "weight"
