"""The short runs of `unisono plan --rehearse`: how long they are, what they say, how they fail."""

import dataclasses
import json
from dataclasses import asdict
from datetime import date, datetime
from pathlib import Path

import numpy as np
import pytest

from datamodules.core.plan import PlanRequest, make_plan
from lit_models.commands.plan import plan as plan_command
from lit_models.errors import UsageError, screen
from lit_models.forecasting import exchange, orders, short_run
from lit_models.forecasting.exchange import Exchange, State
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
    assert "rank 1 was ended by SIGKILL, often for too little memory" in orders.failure(
        [1, -9], ["error: the connection was closed", ""]
    )
    assert orders.failure([-6, 0], ["assertion failed\n", ""]) == (
        "rank 0 was ended by SIGABRT: assertion failed"
    )
    assert orders.failure([0], [""]) == "rank 0 ended without an answer"


def test_a_failure_is_told_from_its_beginning():
    message = " ".join(["data.root names a folder that is not there:", "word " * 40 + "end."])
    said = f"error: an earlier one\na warning\n{screen(message)}\n"
    assert len(screen(message).splitlines()) > 2
    told = " ".join(message.split()).rstrip(".")
    assert orders.failure([1], [said]) == f"rank 0 ended with 1: error: {told}"
    elsewhere = said.replace("error: data", "error on rank 0: data")
    assert orders.failure([1], [elsewhere]).endswith(f"error on rank 0: {told}")


@pytest.fixture
def started(monkeypatch):
    """Give what ranks were started with: their environment and their order; none starts."""
    seen = {}

    def run_ranks(ranks, command, timeout_s, is_captured, environ, errors=None):
        seen["environ"] = environ
        if errors is not None:
            seen["order"] = json.loads(Path(command[-1]).read_text("utf-8"))
            (errors / "rank-0.err").write_text("said", "utf-8")
            (errors / orders.ANSWER).write_text('{"step_s": 1.0}', "utf-8")
        return [0] * ranks, json.dumps(asdict(Exchange(1.0, 2.0, 3.0)))

    monkeypatch.setattr(orders, "run_ranks", run_ranks)
    monkeypatch.setattr("lit_models.training.local_ranks.run_ranks", run_ranks)
    return seen


def test_ranks_that_stand_for_a_fit_wait_as_it_does(started, monkeypatch):
    order = dataclasses.replace(ORDER, devices=1, strategy="")
    for given, waits in ((None, "PASSIVE"), ("ACTIVE", "ACTIVE")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        assert exchange.measured(2, State(8, []), 3) == Exchange(1.0, 2.0, 3.0)
        assert started["environ"] == {"OMP_WAIT_POLICY": waits, "OMP_NUM_THREADS": "3"}
        assert orders.answer_of(order, 1, None) == ({"step_s": 1.0}, ["said"])
        assert started["environ"] == {"OMP_WAIT_POLICY": waits}


def test_dates_and_paths_of_a_config_are_written_as_text_and_nothing_else_is(started):
    init_args = {"root": Path("some/where"), "days": [date(2024, 2, 29), datetime(2024, 3, 1, 5)]}
    order = dataclasses.replace(ORDER, data={"class_path": "a.B", "init_args": init_args})
    orders.answer_of(order, 1, None)
    assert started["order"]["data"]["init_args"] == {
        "root": "some/where",
        "days": ["2024-02-29", "2024-03-01 05:00:00"],
    }
    wrong = dataclasses.replace(ORDER, model={"class_path": "a.B", "init_args": {"of": [1, {2}]}})
    with pytest.raises(UsageError, match=r"^model\.init_args\.of\.1 is \{2\}, a set, which"):
        orders.answer_of(wrong, 1, None)


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
    options = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData", "--data.num_samples=20"]
    options += ["--data.batch_size=4", "--trainer.accelerator=cpu", "--trainer.max_epochs=1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert plan_command(options, devices="1,2", rehearse=True) == 0
    said = capsys.readouterr().out
    for strategy in ("ddp", "fsdp"):
        assert f"2 devices under {strategy} were not run here" in said
    assert "an epoch has 3 steps" in said
