"""The progress line and the start banner say what a person wants to know, and cost no step."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from lit_models.training import run as progress
from lit_models.training.run import ProgressLine, print_banner, total_steps

PLAN = {
    "global_batch_size": 64,
    "num_replicas": 2,
    "micro_batch_size": 8,
    "accumulate_grad_batches": 4,
    "steps_per_epoch": 313,
    "samples_per_epoch": 20000,
    "planned_steps": 313,
    "num_samples": 20000,
    "padding_share": 0.043,
    "plan_digest": "0123456789abcdef",
}
FACTS = {
    "strategy": "ddp",
    "backend": "gloo",
    "world_size": 2,
    "host_rank_device": ["a:2:cuda:2", "a:3:cuda:3"],
    "rendezvous": "10.0.0.1:29500",
    "visible_devices": "2,3",
    "precision": "32-true",
    "learning_rates": [0.003, 0.003],
    "lr_scale": 2.0,
    "fallback": "asked for 4 GPUs",
    "plan": PLAN,
    "exactness": {
        "level": "bitwise",
        "exact_dropout": True,
        "num_chunks": 8,
        "num_threads": 1,
        "gradient_copies": 3,
    },
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def trainer(**values: Any) -> Any:
    known = {
        "global_step": 40,
        "fit_loop": SimpleNamespace(
            epoch_progress=SimpleNamespace(current=SimpleNamespace(started=1))
        ),
        "max_epochs": 3,
        "max_steps": -1,
        "num_training_batches": 200,
        "accumulate_grad_batches": 2,
        "callback_metrics": {"train/loss": 2.3125},
        "callbacks": [],
        "datamodule": SimpleNamespace(batching=SimpleNamespace(global_batch_size=64)),
    }
    return SimpleNamespace(**{**known, **values})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def test_the_line_has_loss_rows_per_second_and_time_left(clock: SimpleNamespace) -> None:
    line = ProgressLine(stream=io.StringIO())
    line.on_train_start(trainer(global_step=20), None)
    clock.seconds += 10
    # 20 steps of 64 rows in 10 s; 300 steps in all, 260 are left at 2 a second
    assert line.train_line(trainer()) == (
        "epoch 1/3  step 40/300  loss 2.312  128 rows/s  0:02:10 left"
    )


def test_a_log_gets_a_line_per_interval_and_a_last_one(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    line = ProgressLine(interval_s=10, stream=stream)
    line.on_train_start(trainer(global_step=0), None)
    for step in range(1, 31):
        clock.seconds += 1
        line.on_train_batch_end(trainer(global_step=step), None, None, None, 0)
    line.on_train_end(trainer(global_step=30), None)
    lines = stream.getvalue().splitlines()
    assert [text.split("step ")[1].split("/")[0] for text in lines] == ["10", "20", "30", "30"]


def test_a_terminal_gets_one_line_that_is_overwritten(clock: SimpleNamespace) -> None:
    stream = Terminal()
    line = ProgressLine(stream=stream)
    line.on_train_start(trainer(global_step=0), None)
    for _ in range(3):
        clock.seconds += 1
        line.on_train_batch_end(trainer(), None, None, None, 0)
    line.on_train_end(trainer(), None)
    assert stream.getvalue().count("\r") == 4
    assert stream.getvalue().count("\n") == 1


def test_a_rank_that_does_not_speak_writes_nothing(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    line = ProgressLine(stream=stream)
    line.disable()
    line.on_train_start(trainer(), None)
    clock.seconds += 100
    line.on_train_batch_end(trainer(), None, None, None, 0)
    line.on_train_end(trainer(), None)
    assert stream.getvalue() == ""


def test_the_end_of_a_run_is_its_first_limit() -> None:
    assert total_steps(trainer()) == 300
    assert total_steps(trainer(max_steps=50)) == 50
    assert total_steps(trainer(num_training_batches=3, max_epochs=1)) == 2
    assert total_steps(trainer(max_epochs=-1)) is None


def test_the_banner_names_devices_and_plan(capsys: pytest.CaptureFixture[str]) -> None:
    print_banner(FACTS, "runs/demo")
    shown = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert shown == [
        "run runs/demo",
        "devices 2 (ddp, gloo, 32-true)",
        "host:rank:device a:2:cuda:2, a:3:cuda:3",
        "rendezvous 10.0.0.1:29500",
        "visible GPUs 2,3",
        "global batch 64 = 2 devices x 8 x 4 accumulated",
        "epoch 313 steps, 20,000 samples, 4.3% padding, plan 0123456789ab",
        "exactness bitwise: 8 chunks a step, 1 thread(s), 3 x the gradients",
        "dropout keyed by seed, epoch and sample",
        "learning rate 0.003 at this step, scaled by 2",
        "fallback asked for 4 GPUs",
    ]
