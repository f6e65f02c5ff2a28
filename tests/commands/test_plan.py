"""`unisono plan`: steps, rates and memory by hand, and nothing that is left behind."""

import json
import os
from functools import partial

import pytest
import torch

from lit_models.commands.plan import plan as plan_command
from lit_models.forecasting import exchange, table
from lit_models.forecasting.exchange import State
from lit_models.forecasting.probe import Probe, World, forecast
from lit_models.training.optim import MuonAdamW, WarmupDecay
from lit_models.training.state_size import size_of
from tests.toy import LitToy, ToyData

MIB = 2**20
RUN = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData"]
LINEAR = {"lr_scaling": "linear", "base_global_batch_size": 4}


class ScaledToy(LitToy):
    """The toy whose rate follows the global batch."""

    def __init__(self, lr_scaling: str = "linear", base_global_batch_size: int = 4, **rest) -> None:
        super().__init__(**rest)
        self.save_hyperparameters()


def found_rows(data, devices=(1, 2, 4, 8), module=None, rehearses=False, **trainer):
    trainer = {"accelerator": "cpu", "max_epochs": 3, **trainer}
    found = forecast(module or LitToy(), data, trainer, Probe(devices, rehearses))
    return found, table.rows(found, bandwidth_gib_s=1.0, time_limit_h=1e-6)


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
    options = ["--data.num_samples=50", "--data.batch_size=5", "--trainer.max_epochs=1"]
    status = plan_command([*RUN, *options], devices="1, 2", json=True)
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


def test_the_plan_is_that_of_the_run_with_the_same_seed(monkeypatch):
    seeds, world = [], World(1, 8, 4, 1, 10, 20, None, 0.1, 160)
    monkeypatch.setattr(
        "lit_models.forecasting.probe._world",
        lambda *_: seeds.append(os.environ["PL_GLOBAL_SEED"]) or world,
    )
    for seed in ("1", "3", "true", "false"):
        options = [*RUN, f"--seed_everything={seed}", "--trainer.max_epochs=1"]
        plan_command(options, devices="1", json=True)
    assert seeds == ["1", "3", "0", "0"]


def test_a_plan_parses_as_the_training_does(unisono, toy_config):
    """A class and then its options, and an option of a class that a file names."""
    sgd = ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1")
    status, output = unisono("plan", "--config", "toy.yaml", *sgd, "--devices=1", "--json")
    rows = json.loads(output[output.index("{") :])
    assert (status, rows["learning rate"]) == (0, [0.1])
    assert "GiB, ddp: optimizer" not in rows, "SGD keeps no moments"
    toy_config.write_text(
        toy_config.read_text().replace(
            "data:", "    lr_scheduler: lit_models.training.optim.WarmupDecay\ndata:", 1
        )
    )
    warm = "--model.lr_scheduler.warmup=2"
    status, output = unisono("plan", "--config", "toy.yaml", warm, "--devices=1", "--json")
    rows = json.loads(output[output.index("{") :])
    assert (status, rows["warm-up steps"]) == (0, [2])
