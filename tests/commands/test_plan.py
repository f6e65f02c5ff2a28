"""`unisono plan`: steps, rates and memory by hand, and nothing that is left behind."""

import json
import os
from functools import partial

import pytest
import torch

from lit_models.cli_errors import UsageError
from lit_models.commands.plan import plan as plan_command
from lit_models.forecasting import exchange, prediction, table
from lit_models.forecasting.exchange import Exchange, State
from lit_models.forecasting.probe import Forecast, Probe, World, forecast
from lit_models.forecasting.rehearsal import Rehearsed
from lit_models.training.memory import StateSize
from lit_models.training.muon import MuonAdamW
from lit_models.training.optim import WarmupDecay
from lit_models.training.state_size import size_of
from tests.toy import LitToy, ToyData

MIB = 2**20
LINEAR = {"lr_scaling": "linear", "base_global_batch_size": 4}


def seconds(found, is_sharded, bandwidth_gib_s=None):
    return prediction.step_s(found, found.worlds[0], is_sharded, bandwidth_gib_s)


class ScaledToy(LitToy):
    """The toy whose rate follows the global batch."""

    def __init__(self, lr_scaling: str = "linear", base_global_batch_size: int = 4, **rest) -> None:
        super().__init__(**rest)
        self.save_hyperparameters()


def found_rows(data, devices=(1, 2, 4, 8), module=None, rehearses=False, **trainer):
    trainer = {"accelerator": "cpu", "max_epochs": 3, **trainer}
    found = forecast(module or LitToy(), data, trainer, Probe(devices, rehearses))
    return found, table.rows(found, bandwidth_gib_s=1.0, time_limit_h=1e-6)


def made(num_devices=2, rehearsed=None, exchanges=None, **size):
    """Return a forecast of one world of a network of 10 MiB, 2 MiB of them gathered at a time."""
    world = World(num_devices, 8, 4, 1, 10, 20, None, 0.1, 160, rehearsed)
    values = {"num_parameters": 10 * MIB // 4, "num_trained": 10 * MIB // 4, **size}
    counted = StateSize(gathered_parameters=2 * MIB // 4, **values)
    state = State(10 * MIB, [(2 * MIB // 4, 0)] * 5)
    return Forecast(80, counted, state, "none", True, [world], exchanges or {})


def test_a_batch_per_device_divides_the_steps():
    found, rows = found_rows(ToyData(num_samples=29_500, batch_size=4))
    assert rows["steps per epoch"] == [7375, 3688, 1844, 922]
    assert rows["global batch"] == [4, 8, 16, 32]
    assert rows["samples seen"] == [88_500] * 4
    assert any("different runs" in line for line in table.notes(found, rows))


def test_a_global_batch_is_the_same_run_on_any_devices():
    _, rows = found_rows(ToyData(num_samples=50, global_batch_size=8, micro_batch_size=2))
    assert rows["steps per epoch"] == [7] * 4
    assert rows["accumulation"] == [4, 2, 1, 1]
    assert rows["steps in all"] == [21] * 4


def test_rate_and_warm_up_follow_the_scaling_rule():
    schedule = partial(WarmupDecay, warmup=100)
    module = ScaledToy(lr_scheduler=schedule)
    found, rows = found_rows(ToyData(num_samples=2000, batch_size=4), module=module)
    assert rows["learning rate"] == pytest.approx([0.01, 0.02, 0.04, 0.08])
    assert rows["warm-up steps"] == [100, 50, 25, 13]
    assert any("original rate first" in line for line in table.notes(found, rows))


def test_limits_of_the_trainer_count():
    _, rows = found_rows(ToyData(), devices=(1,), max_epochs=2, limit_train_batches=3)
    assert rows["steps per epoch"] == [3]
    assert rows["samples seen"] == [2 * 3 * 8]
    assert found_rows(ToyData(), devices=(1,), max_steps=5)[1]["steps in all"] == [5]


def test_memory_of_the_state_by_hand():
    found, rows = found_rows(ToyData(), devices=(1, 2))
    num_bytes = 13 * 4 * 4  # weights, gradients and two moments, in float32
    assert found.size.num_parameters == 13
    assert rows["GiB, ddp"] == pytest.approx([num_bytes / 2**30, (num_bytes + 52) / 2**30])


def test_an_optimizer_that_keeps_less_for_matrices_is_counted_by_kind():
    module = LitToy(partial(MuonAdamW, lr=0.1))
    layers = {"a": torch.nn.Linear(20, 30), "b": torch.nn.Embedding(5, 20)}
    module.model = torch.nn.ModuleDict(layers)
    moments = (20 * 30 * 1 + 30 * 2 + 5 * 20 * 2) / (20 * 30 + 30 + 5 * 20)
    assert size_of(module).moments_per_parameter == pytest.approx(moments)


def test_a_rehearsal_times_steps_and_leaves_no_trace():
    module, data = LitToy(), ToyData()
    found, rows = found_rows(data, devices=(1, 2), module=module, rehearses=True)
    assert all(seconds > 0 for seconds in rows["s per step"])
    assert rows["jobs"][0] >= 1
    kept = [world.rehearsed.kept_bytes for world in found.worlds]
    assert kept[0] > kept[1] > 0
    assert rows["GiB, ddp"][0] > rows["GiB, ddp: program"][0] > 0.1  # torch alone is more
    fresh = LitToy()
    fresh.configure_model()
    for name, value in fresh.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


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
    found.short_runs = {(2, "ddp"): 3 * computed[0]}
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


@pytest.mark.slow
def test_ranks_on_this_machine_measure_what_they_cost_each_other():
    state = State(4 * MIB, [(MIB // 8, MIB // 8)] * 4)
    found = exchange.measured(2, state, 1)
    assert min(found.sum_s, found.sharded_s) > 0
    assert found.slowdown >= 1


def test_an_exchange_that_fails_says_what_to_do():
    with pytest.raises(RuntimeError, match="doctor --collectives --devices=2"):
        exchange.measured(2, State("no number", []), 1)


def test_the_command_prints_json(capsys):
    data = {"class_path": "tests.toy.ToyData", "num_samples": 50, "batch_size": 5}
    trainer = {"max_epochs": "1"}  # text, as options beside a config are
    status = plan_command(
        {"class_path": "tests.toy.LitToy"}, data, trainer, devices="1, 2", json=True
    )
    assert status == 0
    assert json.loads(capsys.readouterr().out)["steps per epoch"] == [10, 5]


@pytest.mark.parametrize(
    "given", [["--trainer.strategy=fsdp"], ["--config", "hardware/fsdp.yaml"]], ids=["name", "file"]
)
def test_groups_that_share_samples_are_not_planned(given, unisono, toy_config):
    option = "--trainer.strategy.tensor_parallel_size=2"
    status, output = unisono("plan", "--config", "toy.yaml", *given, option)
    assert status != 0
    shown = " ".join(output.split())
    assert "tensor_parallel_size is 2, but `unisono plan` takes every device for a replica" in shown
    in_class = {"class_path": "FullyShardedStrategy", "init_args": {"tensor_parallel_size": 2}}
    with pytest.raises(UsageError, match="numbers of tensor groups"):
        plan_command({}, {}, {"strategy": in_class})


def test_the_plan_is_that_of_the_run_with_the_same_seed(monkeypatch):
    seeds = []
    monkeypatch.setattr(
        "lit_models.forecasting.probe._world",
        lambda *_: seeds.append(os.environ["PL_GLOBAL_SEED"]) or made().worlds[0],
    )
    toy, data = "tests.toy.LitToy", {"class_path": "tests.toy.ToyData", "num_samples": 50}
    for seed in (1, 3, True, None):
        plan_command({"class_path": toy}, data, {"max_epochs": 1}, seed, devices="1", json=True)
    assert seeds == ["1", "3", "0", "0"]
