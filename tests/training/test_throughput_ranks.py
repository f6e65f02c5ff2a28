"""What Throughput is told by ranks, batches and the machine."""

import sys
import types

import pytest
import torch

from datamodules.core.loader import load_of
from datamodules.core.plan import MicroBatch
from lit_models.training.throughput import machine
from lit_models.training.throughput.ranks import Share, Shares, Stragglers, slowest_rank
from tests.toy import ToySequences


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
    assert machine._nvml_reading(nvml, "handle") == {**expected, "power_w": None}
    assert machine._nvml_reading(None, None) == {}


@pytest.mark.parametrize("known", ["GPU-7", "MIG-7", "7", None])
def test_a_slice_of_a_gpu_is_found_by_any_of_its_names_or_told_once(monkeypatch, known):
    class Refused(Exception):
        pass

    def handle(name):
        if name != known:
            raise Refused("Not Found")
        return name

    nvml = types.SimpleNamespace(NVMLError=Refused, nvmlDeviceGetHandleByUUID=handle)
    properties = types.SimpleNamespace(uuid="7")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: properties)
    if known is not None:
        assert machine._handle(nvml, 0) == known
        return
    with pytest.warns(UserWarning, match="GPU 7 are not recorded: NVML: Not Found"):
        assert machine._handle(nvml, 0) is None
    assert machine._nvml_reading(nvml, None) == {}


def test_a_missing_extra_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.warns(UserWarning, match=r"pip install 'unisono\[gpu\]'"):
        assert machine._nvml() is None
