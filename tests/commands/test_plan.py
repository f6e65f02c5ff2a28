"""`unisono plan`: steps, rates and memory by hand, and no file left behind."""

import shlex
from typing import Any

import pytest

from lit_models.commands import run_command
from lit_models.commands.plan import forecast_of, plan
from lit_models.errors import USAGE, UsageError, run_guarded

RUN = shlex.split("""
--model.class_path=tests.toy.LitToy --model.optimizer=torch.optim.AdamW
--model.optimizer.lr=0.01 --data.class_path=tests.toy.ToyData --data.num_samples=50
--data.global_batch_size=8 --trainer.max_epochs=1
""")
GIB = 2**30


def rows_of(*options: str, devices: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, list[Any]]:
    """Return label -> its value for each number of devices."""
    columns = forecast_of([*RUN, *options], list(devices)).columns
    return {name: [column[name] for column in columns] for name in columns[0]}


def test_a_global_batch_is_the_same_run_on_any_devices():
    rows = rows_of("--data.micro_batch_size=2", "--trainer.max_epochs=3")
    assert rows["steps per epoch"] == [7] * 4
    assert rows["accumulation"] == [4, 2, 1, 1]
    assert rows["steps in all"] == [21] * 4
    assert rows["targets per epoch"] == rows["targets per epoch"][:1] * 4


def test_rate_and_warm_up_are_those_of_the_schedule():
    schedule = "--model.lr_scheduler=lit_models.training.optim.WarmupDecay"
    options = [schedule, "--model.lr_scheduler.warmup=100", "--data.num_samples=2000"]
    rows = rows_of(*options, "--data.global_batch_size=16")
    assert rows["learning rate"] == pytest.approx([0.01] * 4)
    assert rows["warm-up steps"] == [100] * 4


@pytest.mark.parametrize(
    ("options", "label", "value"),
    [
        (["--trainer.limit_train_batches=3"], "steps per epoch", 3),
        (["--trainer.overfit_batches=3"], "steps per epoch", 3),
        (["--trainer.limit_train_batches=3"], "samples seen", 3 * 8),
        (["--trainer.limit_train_batches=3"], "targets per epoch", 52 + 58 + 23),
        (["--trainer.max_steps=5"], "steps in all", 5),
    ],
)
def test_limits_of_the_trainer_count(options, label, value):
    assert rows_of(*options, devices=(1,))[label] == [value]


def test_memory_of_the_state_by_hand():
    rows = rows_of(devices=(1, 2))
    state = 13 * 16  # the toy's weights in float32
    assert rows["GiB, ddp"] == pytest.approx([state / GIB] * 2)
    assert rows["GiB, fsdp"] == pytest.approx([state / GIB, state / 2 / GIB])
    rows = rows_of("--trainer.precision=bf16-true", devices=(1,))
    assert rows["GiB, ddp"] == pytest.approx([state / 2 / GIB])


def test_a_plan_parses_as_the_training_does(done, toy_config):
    """A class and then its options, for a class that a file names."""
    sgd = ("--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1")
    output = done("plan", "--config", "toy.yaml", *sgd, "--devices=1")
    assert "learning rate │ 0.1" in " ".join(output.split())


def test_devices_that_would_have_nothing_to_do_are_named_beside_the_others(capsys):
    assert run_command("plan", [*RUN, "--devices=2,8,16"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "devices ┃ 2 ┃ 8 ┃" in shown
    assert "Left out: 16 devices. data.global_batch_size=8 is smaller than devices x" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--devices=16,32"], "Use fewer devices or data.global_batch_size >= 16."),
        (["--trainer.max_steps=0"], "no step would be made: trainer.limit_train_batches, max_ep"),
        (
            ["--trainer.strategy=fsdp", "--trainer.strategy.tensor_parallel_size=2"],
            "tensor_parallel_size is 2, but `unisono plan` takes every device for a replica",
        ),
        (["--devices=0"], "--devices must be numbers"),
        (["--devices=1,x"], "--devices must be numbers"),
    ],
)
def test_a_plan_that_cannot_be_meant_ends_with_the_status_of_usage(options, says, capsys):
    assert run_guarded(lambda: run_command("plan", [*RUN, *options])) == USAGE
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_plan_needs_a_module_and_data():
    with pytest.raises(UsageError, match="required: data, model; give the"):
        plan()
