"""`unisono plan`: steps, rates and memory by hand, and nothing that is left behind."""

import json
from functools import partial

import pytest
import torch

from lit_models.commands.plan import numbers
from lit_models.commands.plan import plan as plan_command
from lit_models.forecasting import table
from lit_models.forecasting.probe import KeptBytes, Probe, forecast
from lit_models.training.optim import WarmupDecay
from tests.toy import LitToy, ToyData

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
    assert any("different runs" in line for line in table.notes(found))


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
    assert any("original rate first" in line for line in table.notes(found))


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


def test_a_rehearsal_times_steps_and_leaves_no_trace():
    module, data = LitToy(), ToyData()
    found, rows = found_rows(data, devices=(1, 2), module=module, rehearses=True)
    assert all(seconds > 0 for seconds in rows["s per step"])
    assert rows["jobs"][0] >= 1
    assert found.worlds[0].activation_bytes > found.worlds[1].activation_bytes > 0
    fresh = LitToy()
    fresh.configure_model()
    for name, value in fresh.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_what_autograd_keeps_is_counted_once():
    layer = torch.nn.Linear(3, 5, bias=False)
    x = torch.ones(7, 3, requires_grad=True)
    kept = KeptBytes(layer)
    with kept:
        hidden = layer(x)
        (hidden * hidden).sum()
    assert kept.num_bytes == (7 * 3 + 7 * 5) * 4  # the input, and hidden once, not twice


def test_the_command_prints_json(capsys):
    data = {"class_path": "tests.toy.ToyData", "num_samples": 50, "batch_size": 5}
    status = plan_command(
        {"class_path": "tests.toy.LitToy"}, data, {"max_epochs": 1}, devices="1, 2", json=True
    )
    assert status == 0
    assert json.loads(capsys.readouterr().out)["steps per epoch"] == [10, 5]


@pytest.mark.parametrize("devices", ["0", "1,x", "-2", ""])
def test_a_wrong_number_of_devices_is_refused(devices):
    with pytest.raises(ValueError, match="--devices must be numbers"):
        numbers(devices)


def test_a_plan_needs_a_module_and_data():
    with pytest.raises(ValueError, match="needs a module and data"):
        plan_command(None, None)
