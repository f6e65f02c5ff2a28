"""The parts of Throughput: clocks, peaks, counted arithmetic, slow ranks, readings."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lit_models.training.throughput import peaks, profiler
from lit_models.training.throughput.clock import (
    CHECKPOINT,
    DATA,
    EVALUATION,
    FORWARD,
    MOST_MARKS,
    OTHER,
    PHASES,
    DeviceClock,
)
from lit_models.training.throughput.flops import FlopCount, matmul_ceiling, model_flops
from lit_models.training.throughput.lines import Capacity


class Timeline:
    """A GPU's stream: makes events, whose times are those of a list, in milliseconds."""

    def __init__(self):
        self.now, self.waited = 0.0, 0

    def __call__(self):
        return Event(self)


class Event:
    def __init__(self, timeline):
        self.timeline = timeline

    def record(self):
        self.at = self.timeline.now

    def synchronize(self):
        self.timeline.waited += 1

    def query(self):
        return True

    def elapsed_time(self, end):
        return end.at - self.at


def named(seconds):
    return {name: s for name, s in zip(PHASES, seconds, strict=True) if s}


def test_time_belongs_to_the_innermost_phase_and_an_evaluation_keeps_its_own():
    timeline = Timeline()
    clock = DeviceClock(timeline)
    script = [
        (1, clock.switch, DATA),  # 1 ms of other are over
        (2, clock.switch, OTHER),
        (3, clock.enter, FORWARD),
        (4, clock.leave),
        (5, clock.enter, EVALUATION),
        (6, clock.enter, DATA),  # of the validation
        (7, clock.leave),
        (8, clock.enter, CHECKPOINT),  # the best one, in its end
        (9, clock.enter, DATA),
        (10, clock.leave),
        (11, clock.leave),
        (12, clock.leave),
    ]
    for ms, move, *phase in script:
        timeline.now += ms
        move(*phase)
    cut = clock.cut()
    timeline.now += 100
    clock.switch(DATA)
    found = clock.read(cut)
    assert timeline.waited == 1  # for the whole interval
    expected = {"other": 9, "data": 2, "forward": 4, "evaluation": 33, "checkpoint": 30}
    assert named(found) == pytest.approx({name: ms / 1e3 for name, ms in expected.items()})
    assert named(clock.read(clock.cut())) == pytest.approx({"other": 0.1})


def test_many_marks_are_added_up_before_the_interval_ends():
    timeline = Timeline()
    clock = DeviceClock(timeline)
    for number in range(3 * MOST_MARKS):
        timeline.now += 1
        clock.switch(DATA if number % 2 else FORWARD)
    assert len(clock._marks) <= MOST_MARKS
    assert sum(clock.read(clock.cut())) == pytest.approx(3 * MOST_MARKS / 1e3)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.4),
        ("NVIDIA A100-SXM4-80GB", "16-mixed", 312.0),
        ("NVIDIA A100-SXM4-80GB", "32-true", 19.5),
        ("NVIDIA H200", "64-true", None),
        ("Tesla V100-SXM2-16GB", "bf16-true", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-true", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-true", None),
        ("NVIDIA H9000", "bf16-true", None),
    ],
)
def test_a_peak_is_that_of_the_sheet_or_unknown(name, precision, tera):
    assert peaks.peak_of(name, precision) == (None if tera is None else tera * 1e12)


def test_float32_counts_as_tf32_where_torch_may_use_it(monkeypatch):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peaks.peak_of("NVIDIA H200", "32-true") == 494.7e12
    assert peaks.peak_flops(torch.device("cpu"), "32-true") is None


def test_the_arithmetic_of_a_layer_and_of_attention_is_counted_and_changes_nothing():
    layer = nn.Linear(5, 7)
    x = torch.randn(3, 5, requires_grad=True)
    expected = layer(x)
    forward, backward = FlopCount(), FlopCount()
    with forward:
        result = layer(x)
    with backward:
        result.sum().backward()
    assert torch.equal(result, expected)
    assert (forward.total, backward.total) == (2 * 3 * 5 * 7, 2 * 2 * 3 * 5 * 7)
    q = torch.randn(2, 4, 6, 8)  # [B, H, T, K]
    with forward:
        F.scaled_dot_product_attention(q, q, q)
    assert forward.total - 2 * 3 * 5 * 7 == 2 * 2 * (2 * 4 * 6 * 6 * 8)


def test_recomputation_is_no_work_that_the_model_needs():
    assert model_flops(10, 20) == 30
    assert model_flops(10, 12) == 22  # frozen parts
    assert model_flops(10, 30) == 30  # the forward, once more


def test_the_share_of_a_peak_by_hand():
    capacity = Capacity(peak=1e12, ceiling=None, flops_per_position=6e6)
    assert capacity.share_of(capacity.peak, 1e5, 2) == 0.3
    assert capacity.share_of(capacity.ceiling, 1e5, 2) is None
    assert Capacity(peak=1e12).share_of(1e12, 1e5, 2) is None


def test_a_ceiling_is_measured_without_touching_the_random_state(monkeypatch):
    from lit_models.training.throughput import flops

    monkeypatch.setattr(flops, "SMALL_SIZE", 64)
    before = torch.get_rng_state()
    assert matmul_ceiling(torch.device("cpu"), torch.float32) > 1e6
    assert torch.equal(torch.get_rng_state(), before)


def test_a_device_without_memory_has_no_known_ceiling(monkeypatch):
    def refuse(*_, **__):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr(torch, "randn", refuse)
    with pytest.warns(UserWarning, match="no memory left for two matrices of 1024 x 1024"):
        assert matmul_ceiling(torch.device("cpu"), torch.float32) is None


def test_lightning_still_calls_the_parts_by_these_names():
    from lightning.pytorch.loops import training_epoch_loop as loop

    names = loop._TrainingEpochLoop._on_before_fetch.__code__.co_consts
    assert any(profiler.FETCH in str(name) for name in names)
