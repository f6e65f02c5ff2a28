"""Schedules count optimizer steps; groups know their names; larger batches scale the rate."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from lit_models.training.optim import WarmupDecay, lr_scale, parameter_groups
from tests.toy import LitToy, ToyData, ledger_lines, toy_trainer


def rates(steps, total, **options):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = WarmupDecay(optimizer, **options)
    schedule.set_total_steps(total)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_warmup_in_steps_and_as_a_share_are_the_same_ramp():
    assert rates(4, 100, warmup=3, decay="constant") == [0.25, 0.5, 0.75, 1.0]
    assert rates(10, 20, warmup=0.15) == rates(10, 20, warmup=3)


def test_a_rate_that_is_held_decays_in_what_is_left():
    held = rates(10, 10, warmup=2, hold=4, decay="linear")
    assert held == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25])
    assert held == pytest.approx(rates(10, 10, warmup=0.2, hold=0.4, decay="linear"))


def test_warm_up_and_hold_in_steps_follow_a_larger_batch():
    schedule = WarmupDecay(torch.optim.SGD([torch.zeros(1)], lr=1.0), warmup=4, hold=6)
    schedule.set_total_steps(20, batch_growth=2)
    same = WarmupDecay(torch.optim.SGD([torch.zeros(1)], lr=1.0), warmup=2, hold=3)
    same.set_total_steps(20)
    assert [schedule.factor(i) for i in range(20)] == [same.factor(i) for i in range(20)]
    share = WarmupDecay(torch.optim.SGD([torch.zeros(1)], lr=1.0), warmup=0.1, hold=0.3)
    share.set_total_steps(20, batch_growth=2)
    assert (share.warmup, share.hold) == (0.1, 0.3)


def test_decay_follows_its_formula():
    linear = rates(11, 10, decay="linear", final_factor=0.2)
    assert linear == pytest.approx([1 - 0.08 * step for step in range(11)])
    cosine = rates(10, 10)
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * s / 10)) for s in range(10)])


def test_the_schedule_is_the_same_over_accumulation_and_reaches_the_end(tmp_path):
    seen = []
    for micro in (None, 2):
        schedule = partial(WarmupDecay, warmup=0.25, decay="linear")
        folder = tmp_path / str(micro)
        toy_trainer(folder).fit(LitToy(lr_scheduler=schedule), ToyData(micro_batch_size=micro))
        seen.append([line["learning_rate"] for line in ledger_lines(folder)])
    assert seen[0] == seen[1]
    assert len(seen[0]) == 14
    assert max(seen[0]) == pytest.approx(0.01, rel=0.1)
    assert seen[0][-1] == pytest.approx(0.01 / (14 - 3.5), rel=1e-6)


def test_a_longer_run_follows_its_own_length_after_a_resume(tmp_path):
    schedule = partial(WarmupDecay, decay="linear")
    toy_trainer(tmp_path, max_epochs=1).fit(LitToy(lr_scheduler=schedule), ToyData())
    last = tmp_path / "checkpoints" / "last.ckpt"
    longer = toy_trainer(tmp_path, max_epochs=2)
    longer.fit(LitToy(lr_scheduler=schedule), ToyData(), ckpt_path=last)
    assert ledger_lines(tmp_path)[8]["learning_rate"] == pytest.approx(0.01 * (1 - 8 / 14))


def test_wrong_schedules_are_refused(tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match="warmup must be 0 or more, got -1"):
        WarmupDecay(optimizer, warmup=-1)
    with pytest.raises(ValueError, match="hold must be 0 or more, got -2"):
        WarmupDecay(optimizer, hold=-2)
    with pytest.raises(ValueError, match="warmup 3 and hold 0.9 together take 21.9 steps, but"):
        rates(1, 21, warmup=3, hold=0.9)
    with pytest.raises(ValueError, match="warmup is 30 steps, but the run has 14"):
        toy_trainer(tmp_path).fit(LitToy(lr_scheduler=partial(WarmupDecay, warmup=30)), ToyData())


def test_vectors_and_tables_do_not_decay_and_depth_lowers_the_rate():
    net = nn.ModuleDict(
        {"low": nn.Linear(2, 2), "table": nn.Embedding(3, 2), "top": nn.Linear(2, 1)}
    )
    groups = parameter_groups(net, layer_decay=0.5, depths={"low": 2})
    found = {name: group for group in groups for name, _ in group["params"]}
    assert found["table.weight"]["weight_decay"] == found["low.bias"]["weight_decay"] == 0
    assert "weight_decay" not in found["top.weight"]
    assert found["low.weight"]["lr_factor"] == 0.25
    assert found["top.weight"]["lr_factor"] == 1
    with pytest.raises(ValueError, match="layer_decay must be above 0"):
        parameter_groups(net, layer_decay=0)


def test_the_scaling_rules_are_linear_or_a_square_root():
    assert [lr_scale(rule, 256, 64) for rule in ("none", "linear", "sqrt")] == [1.0, 4.0, 2.0]


def test_a_batch_that_grew_scales_the_rate_and_shortens_the_warmup(tmp_path):
    class Scaled(LitToy):
        def __init__(self, optimizer, lr_scheduler, lr_scaling, base_global_batch_size):
            super().__init__(optimizer, lr_scheduler)
            self.save_hyperparameters()

    module = Scaled(
        partial(torch.optim.SGD, lr=1e-4),
        partial(WarmupDecay, warmup=4, decay="constant"),
        "linear",
        8,
    )
    toy_trainer(tmp_path, max_epochs=4).fit(module, ToyData(batch_size=16))
    assert module.lr_scale == 2
    seen = [line["learning_rate"] for line in ledger_lines(tmp_path)]
    assert seen[:4] == pytest.approx([2e-4 / 3, 4e-4 / 3, 2e-4, 2e-4])
