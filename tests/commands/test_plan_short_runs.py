"""The short runs of `unisono plan --rehearse`: how long they are, what they say, how they fail."""

import dataclasses

import numpy as np
import pytest

from datamodules.plan import PlanRequest, make_plan
from lit_models.commands.plan import plan as plan_command
from lit_models.forecasting import orders, short_run
from lit_models.forecasting.orders import Order
from lit_models.forecasting.rehearsal import step_widths
from lit_models.forecasting.short_run import LEAST_STEPS, MOST_STEPS, WARM_UP

TOY = {"class_path": "tests.toy.LitToy", "init_args": {}}
DATA = {"class_path": "tests.toy.ToyData", "init_args": {"num_samples": 80, "batch_size": 4}}
ORDER = Order(TOY, DATA, {"accelerator": "cpu", "accumulate_grad_batches": 1}, 1, 2, "ddp")


def test_a_short_run_is_as_long_as_its_time_allows():
    assert short_run.num_steps(1.5, 1000) == WARM_UP + 10
    assert short_run.num_steps(0.001, 1000) == WARM_UP + MOST_STEPS
    assert short_run.num_steps(60.0, 1000) == WARM_UP + LEAST_STEPS
    assert short_run.num_steps(1.5, 9) == 9
    assert short_run.num_steps(1.5, WARM_UP + LEAST_STEPS - 1) == 0


def test_the_width_of_a_step_is_its_rows_times_its_longest_sample():
    lengths = np.array([3, 9, 1, 4, 2], np.int32)
    plan = make_plan(PlanRequest("", 5, global_batch_size=2, seed=0, bucket_window=1), lengths, 0)
    by_hand = [
        len(plan.step_ids(step)) * lengths[plan.step_ids(step)].max()
        for step in range(plan.num_steps)
    ]
    assert step_widths(plan, lengths).tolist() == by_hand


def test_a_failure_is_told_by_the_rank_that_said_why():
    said = ["", "Traceback\nValueError: no such\nthing.\n"]
    assert orders.failure([1, 1], said) == "rank 1 ended with 1: ValueError: no such thing"
    assert "too little memory" in orders.failure([0, -9], said)


@pytest.mark.slow
def test_ranks_train_and_leave_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    order = dataclasses.replace(ORDER, steps=12)
    run = short_run.measured(order, 0.1, 1)
    assert 0 < run.step_s < 5
    assert 0.1 < run.peak_bytes / 2**30 < 2  # torch alone is more, this process does not count
    assert not list(tmp_path.iterdir())
    assert not capfd.readouterr().err
    wrong = dataclasses.replace(order, data={**DATA, "class_path": "tests.toy.NoData"})
    with pytest.raises(RuntimeError, match=r"rank \d ended with 2: .*by its import path"):
        short_run.measured(wrong, 0.1, 1)


@pytest.mark.slow
def test_the_table_says_which_worlds_were_not_run(capsys, monkeypatch):
    few = {**DATA, "init_args": {"num_samples": 20, "batch_size": 4}}
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert (
        plan_command(
            TOY, few, {"accelerator": "cpu", "max_epochs": 1}, devices="1,2", rehearse=True
        )
        == 0
    )
    said = capsys.readouterr().out
    for strategy in ("ddp", "fsdp"):
        assert f"2 devices under {strategy} were not run here" in said
    assert "an epoch has 3 steps" in said
