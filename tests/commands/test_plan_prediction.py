"""Memory and seconds that follow from a rehearsal and from short runs, by hand."""

import pytest
import torch

from lit_models.forecasting import prediction, table
from lit_models.forecasting.exchange import Exchange, State
from lit_models.forecasting.probe import Forecast, World
from lit_models.forecasting.rehearsal import Rehearsed
from lit_models.forecasting.short_run import ShortRun
from lit_models.training.memory import StateSize

MIB = 2**20
PROCESS = "libraries and data included"  # of the note on memory


def seconds(found, is_sharded, bandwidth_gib_s=None):
    return prediction.step_s(found, found.worlds[0], is_sharded, bandwidth_gib_s)


def made(num_devices=2, rehearsed=None, exchanges=None, **size):
    """Return a forecast of one world of a network of 10 MiB, 2 MiB of them gathered at a time."""
    world = World(num_devices, 8, 4, 1, 10, 20, None, 0.1, 160, rehearsed)
    values = {"num_parameters": 10 * MIB // 4, "num_trained": 10 * MIB // 4, **size}
    counted = StateSize(gathered_parameters=2 * MIB // 4, **values)
    state = State(10 * MIB, [(2 * MIB // 4, 0)] * 5)
    return Forecast(80, counted, state, "none", True, [world], exchanges or {})


def test_the_parts_of_memory_by_hand():
    rehearsed = Rehearsed(1.0, kept_bytes=MIB, logit_bytes=MIB, peak_bytes=7 * MIB,
                          program_bytes=400 * MIB)  # fmt: skip
    found = made(rehearsed=rehearsed)
    shared = {"activations": 6, "logits": 1, "program": 400 + prediction.FIT_BYTES / MIB}
    (world,) = found.worlds
    parts = {k: v / MIB for k, v in prediction.memory_parts(found, world, False).items()}
    assert parts == {"weights": 10, "gradients": 10, "optimizer": 20, "buckets": 10, **shared}
    parts = {k: v / MIB for k, v in prediction.memory_parts(found, world, True).items()}
    gathered = 2 * 2 * prediction.GATHERED_ON_CPU  # weights and gradients
    assert parts == {"weights": 5, "gradients": 5, "optimizer": 10, "gathered": gathered, **shared}


def test_what_short_runs_held_beyond_arithmetic_is_a_part_of_its_own():
    rehearsed = Rehearsed(1.0, kept_bytes=MIB, logit_bytes=0, program_bytes=100 * MIB)
    found = made(rehearsed=rehearsed)
    found.worlds.append(made(4, rehearsed).worlds[0])
    two, four = found.worlds
    found.short_runs = {
        (2, "ddp"): ShortRun(1.0, peak_bytes=(10 + 10 + 20 + 10 + 1 + 100 + 5) * MIB),
        (2, "fsdp"): ShortRun(1.0, peak_bytes=MIB),  # a whole run holds more than its first steps
    }
    for world in (two, four):  # of which the second was not run
        assert prediction.memory_parts(found, world, False)["ranks"] == 5 * MIB
        assert prediction.memory_parts(found, world, True)["ranks"] == 0
    held = found.short_runs[2, "ddp"].peak_bytes + prediction.FIT_BYTES  # loggers of a whole run
    assert prediction.memory_bytes(found, two, False) == held
    rows = table.rows(found)
    assert rows["GiB, ddp: ranks"] == pytest.approx([5 / 1024] * 2)
    assert any(PROCESS in line for line in table.notes(found, rows))
    assert "ranks" not in prediction.memory_parts(found, made(1, rehearsed).worlds[0], False)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_where_the_program_is_not_told_ranks_are_compared_on_gpus_alone(on_cpu):
    found = made(rehearsed=Rehearsed(1.0, kept_bytes=MIB, logit_bytes=0))
    found.on_cpu = on_cpu
    found.short_runs = {(2, "ddp"): ShortRun(1.0, peak_bytes=(10 + 10 + 20 + 10 + 1 + 5) * MIB)}
    parts = prediction.memory_parts(found, found.worlds[0], False)
    assert parts.get("ranks") == (None if on_cpu else 5 * MIB)
    assert not any(PROCESS in line for line in table.notes(found, table.rows(found)))


def test_a_rehearsal_that_did_not_end_leaves_its_memory_open():
    found = made(1)
    found.worlds.append(made(2, Rehearsed(1.0, 0, 0)).worlds[0])
    found.unrehearsed[1] = "ranks ended with [-9]"
    rows = table.rows(found, bandwidth_gib_s=1.0)
    assert rows["GiB, ddp"][0] is None is rows["s per step"][0]
    assert rows["GiB, ddp: weights"][0] == 10 / 1024
    assert rows["GiB, ddp"][1] > 0 < rows["s per step"][1]
    lines = table.notes(found, rows)
    assert any("devices=1, the rehearsal did not end: ranks ended" in line for line in lines)


def test_the_seconds_of_a_step_by_hand(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(prediction, "num_cpus", lambda: 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = (1.0 + prediction.LOOP_S) * prediction.WAITING_ON_CPU
    measured = {2: Exchange(sum_s=0.3, sharded_s=0.4, slowdown=1.5)}
    try:
        found = made(2, Rehearsed(1.0, 0, 0), measured)
        assert seconds(found, False) == pytest.approx(1.5 * alone + 0.3)
        assert seconds(found, True) == pytest.approx(1.5 * alone + 0.4)
        given = 10 / 1024 / 0.5  # once around a ring of two, at half a GiB a second
        assert seconds(found, False, 0.5) == pytest.approx(1.5 * alone + given)
        crowded = made(4, Rehearsed(1.0, 0, 0), measured)  # two processes on each CPU
        assert seconds(crowded, False) == pytest.approx(2 * 1.5 * alone + 0.3 * 1.5)
        assert any(
            "follows from 2 processes" in line for line in table.notes(crowded, table.rows(crowded))
        )
    finally:
        torch.set_num_threads(threads)


def test_what_short_runs_took_comes_before_arithmetic():
    found = made(2, Rehearsed(1.0, 0, 0), {2: Exchange(0.3, sharded_s=0.4, slowdown=1.5)})
    found.worlds.append(made(4, Rehearsed(0.6, 0, 0)).worlds[0])
    computed = [prediction.computed_s(found, world, False, None) for world in found.worlds]
    found.short_runs = {(2, "ddp"): ShortRun(3 * computed[0], peak_bytes=0)}
    two, four = found.worlds
    assert prediction.step_s(found, two, False, None) == pytest.approx(3 * computed[0])
    assert prediction.step_s(found, four, False, None) == pytest.approx(3 * computed[1])
    # of the other strategy nothing was run, and another network was not measured
    for world, is_sharded, bandwidth in ((two, True, None), (two, False, 0.5)):
        arithmetic = prediction.computed_s(found, world, is_sharded, bandwidth)
        assert prediction.step_s(found, world, is_sharded, bandwidth) == arithmetic


def test_more_devices_than_measured_pass_on_more_of_what_is_sent():
    found = made(4, Rehearsed(1.0, 0, 0), {2: Exchange(0.3, sharded_s=0.4, slowdown=1.5)})
    (world,) = found.worlds  # 3/4 of a message pass each of four, 1/2 each of two
    assert prediction.exchange_s(found, world, False, None) == pytest.approx(0.3 * 1.5)
    assert prediction.exchange_s(found, world, True, None) == pytest.approx(0.4 * 1.5)
