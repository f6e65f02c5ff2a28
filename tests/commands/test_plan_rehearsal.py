"""What a rehearsal for `unisono plan` looks at: which steps, and what autograd keeps of them."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from datamodules.core.plan import Plan
from lit_models.forecasting.rehearsal import MOST_STEPS, KeptBytes, Rehearsal, spread_steps
from lit_models.training.state_size import sharded_groups


def test_what_autograd_keeps_is_counted_once_and_logits_apart():
    layer = torch.nn.Linear(3, 5, bias=False)
    module = torch.nn.ModuleList([layer, torch.nn.Embedding(5, 2)])
    x = torch.ones(7, 3, requires_grad=True)
    kept = KeptBytes(module)
    with kept:
        hidden = layer(x)
        (hidden * hidden).sum()
    assert kept.num_bytes == (7 * 3 + 7 * 5) * 4  # the input, and hidden once, not twice
    assert kept.logit_bytes == 7 * 5 * 4


def test_any_beginning_of_the_rehearsed_steps_is_like_the_epoch():
    widths = np.random.default_rng(0).lognormal(4, 1, 1000).astype(int)
    steps = spread_steps(widths)
    assert len(set(steps)) == len(steps) == MOST_STEPS
    for first, apart in ((1, 0.05), (3, 0.05), (16, 0.05), (64, 0.02)):
        places = np.argsort(np.argsort(widths))[steps[:first]] / len(widths)
        assert places.mean() == pytest.approx(0.5, abs=apart)
    assert sorted(spread_steps(np.array([3, 1, 2]))) == [0, 1, 2]
    assert spread_steps(np.array([7])) == [0]


@pytest.mark.parametrize("taken", [1, 2, 5])
def test_a_rehearsal_with_little_time_is_no_shorter_than_the_epoch(taken, monkeypatch):
    widths = np.random.default_rng(0).lognormal(4, 1, 1000).astype(int)
    rehearsal = Rehearsal.__new__(Rehearsal)
    # steps of one sample each, which are as wide as they are long
    rehearsal.plan = Plan(np.arange(1000), np.arange(1001))
    rehearsal.dataset = SimpleNamespace(lengths=widths)
    rehearsal._timed = lambda step: 0.01 * widths[step]
    clock = itertools.chain([0.0] * taken, itertools.repeat(1e3))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    assert rehearsal._step_s() == pytest.approx(0.01 * widths.mean())


def test_the_groups_that_fsdp_gathers_are_the_blocks_and_the_rest():
    class Toy(nn.Module):
        def __init__(self):
            super().__init__()
            self.block, self.rest = nn.Linear(3, 5), nn.Linear(2, 2)

        def blocks(self):
            return [self.block]

    toy = Toy()
    toy.block.bias.requires_grad = False
    assert sharded_groups(toy) == [(15, 5), (6, 0)]
