"""The parts of Throughput: clocks, peaks, counted arithmetic, slow ranks, readings."""

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from datamodules.loader import load_of
from datamodules.plan import MicroBatch
from lit_models.training.throughput import machine, peaks, profiler
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
from lit_models.training.throughput.ranks import Share, Shares, Stragglers, slowest_rank
from tests.toy import ToySequences


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


def test_a_rank_is_slow_above_a_fifth_more_than_the_median():
    assert slowest_rank([1.0]) is None
    assert slowest_rank([1.0, 1.19]) is None
    assert slowest_rank([1.0, 1.21]) == 1
    assert slowest_rank([1.3, 1.0, 1.0, 1.1]) == 0


def test_a_slow_rank_is_named_once_when_it_stays_slow():
    watch = Stragglers()
    slow, other, fine = [0.1, 0.1, 0.15], [0.15, 0.1, 0.1], [0.1, 0.1, 0.1]
    assert [watch.warning(s) for s in (slow, slow, other, fine, slow, slow)] == [None] * 6
    assert "rank 2 is slow: 150.0 ms" in watch.warning(slow)
    assert watch.warning(slow) is None
    tiny = Stragglers()
    assert [tiny.warning([0.001, 0.002]) for _ in range(4)] == [None] * 4


def test_one_rank_reads_its_own_share_at_once():
    mine = Share(0.5, 3, 20, 24)
    shares = Shares(mine, torch.device("cpu"))
    assert not shares.has_others
    assert shares.read() == [mine]


@pytest.mark.parametrize(("is_padded", "positions"), [(True, 27), (False, 22)])
def test_the_load_of_a_micro_batch_leaves_fillers_and_padding_out(is_padded, positions):
    dataset = ToySequences(4, 0)
    dataset.lengths, dataset.is_padded = torch.tensor([9, 4, 7, 2]).numpy(), is_padded
    ids = torch.tensor([0, 1, 0]).numpy()
    batch = MicroBatch(0, 0, ids, torch.tensor([1.0, 1.0, 0.0]).numpy(), {})
    assert load_of(dataset, batch) == {"samples": 2, "tokens": 13, "positions": positions}


def test_the_processors_are_read_between_two_readings(tmp_path, monkeypatch):
    stat = tmp_path / "stat"
    monkeypatch.setattr(machine, "_STAT", stat)
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\ncpu0 1 1 1 1\n")
    readings = machine.Machine(tmp_path, torch.device("cpu"), 1)
    stat.write_text("cpu  130 0 100 760 110 0 0 0 0 0\n")
    reading = readings.reading()
    assert reading["cpu_percent"] == 30.0
    assert set(reading) == {"cpu_percent", "memory_bytes", "disk_free_bytes"}
    monkeypatch.setattr(machine, "_STAT", tmp_path / "none")  # as on macOS
    assert readings.reading()["cpu_percent"] is None


def test_what_a_gpu_does_not_tell_is_none(monkeypatch):
    class Refused(Exception):
        pass

    def refuse(handle):
        raise Refused

    nvml = types.SimpleNamespace(
        NVMLError=Refused,
        NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetUtilizationRates=lambda handle: types.SimpleNamespace(gpu=93),
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=2**30),
        nvmlDeviceGetPowerUsage=refuse,
        nvmlDeviceGetTemperature=lambda handle, kind: 61,
    )
    expected = {"utilization_percent": 93, "memory_bytes": 2**30, "temperature_c": 61}
    assert machine._nvml_reading(nvml, None) == {**expected, "power_w": None}
    assert machine._nvml_reading(None, None) == {}


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.warns(UserWarning, match=r"pip install 'unisono\[gpu\]'"):
        assert machine._nvml() is None


def test_lightning_still_calls_the_parts_by_these_names():
    from lightning.pytorch.loops import training_epoch_loop as loop

    names = loop._TrainingEpochLoop._on_before_fetch.__code__.co_consts
    assert any(profiler.FETCH in str(name) for name in names)
