"""Faults of a run: repeated signals, steps that are not finite, silent ranks."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

from lit_models.cli import FORWARDED, forward_signals
from lit_models.commands.verify import Status, verify_run
from lit_models.run_files import json_lines, read_checkpoint, stop_reason
from lit_models.training import FailureReport, LastCheckpoint, Ledger, NonFinite, Preemption
from lit_models.training.faults import FAILURE, Watch
from lit_models.training.ledger import ledger_of
from tests.toy import AfterSteps, LitToy, ToyData, ledger_lines, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*its update was not applied")

USR1 = signal.SIGUSR1
PLANTED = 17  # the sample that contains a NaN


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore this process's signal handlers, since child processes inherit ignored signals."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in FORWARDED}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class InStep(Callback):
    """Runs a function in the third step."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.action(trainer)


def warn(_: Any) -> None:
    signal.raise_signal(USR1)


def stop_as_another_rank(trainer: Any) -> None:
    ledger_of(trainer).wants_stop = True  # the vector does not tell which rank asked


def fail_after_warning(_: Any) -> None:
    signal.raise_signal(USR1)
    raise RuntimeError("a broken step")


@pytest.mark.parametrize("action", [warn, stop_as_another_rank, fail_after_warning])
def test_a_run_that_ends_waits_for_its_save_and_ignores_the_warnings_that_follow(
    tmp_path: Path, action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 2 is still running when the third step stops the run or fails."""
    write, at_its_end = torch.save, []

    def write_slowly(*what: Any) -> None:
        time.sleep(0.2)
        write(*what)
        others = [(tmp_path / name).exists() for name in (".lock", FAILURE)]
        at_its_end.append((*others, stop_reason(tmp_path)))

    monkeypatch.setattr(torch, "save", write_slowly)
    saves = LastCheckpoint(every_n_steps=2, every_epoch=False)
    trainer = toy_trainer(tmp_path, callbacks=[Ledger(), Preemption(), saves, InStep(action)])
    fails = action is fail_after_warning
    with pytest.raises(RuntimeError, match="a broken step") if fails else nullcontext():
        trainer.fit(LitToy(), ToyData(micro_batch_size=2))
    assert (2 if fails else 3) <= trainer.global_step <= 5
    assert len(ledger_lines(tmp_path)) == trainer.global_step
    assert set(at_its_end) == {(True, False, None)}
    assert ((tmp_path / FAILURE).exists(), stop_reason(tmp_path) is None) == (fails, fails)
    last = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert last["global_step"] == trainer.global_step
    assert signal.getsignal(USR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_failure_of_a_gpu_that_answers_nothing_any_more_is_reported(tmp_path: Path) -> None:
    """Tensors of the device `meta`, too, have no values to read."""

    class Broken(LitToy):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            batch["sample_id"] = batch["sample_id"].to("meta")
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert") as error:
        toy_trainer(tmp_path).fit(Broken(), ToyData())
    assert "rank 0, sanity_check, epoch 0, step 0, samples unknown" in error.value.__notes__[0]
    assert "meta" in json.loads((tmp_path / FAILURE).read_text())["samples_unknown"]


@pytest.mark.parametrize("said", ["Connection closed by peer", "a broken step"])
def test_the_failure_of_a_training_silences_no_evaluation(tmp_path, monkeypatch, said):
    monkeypatch.setattr("lit_models.training.faults.WAIT_FOR_CAUSE_S", 0.1)
    monkeypatch.setattr(LitToy, "test_step", lambda *_: mock.Mock(side_effect=RuntimeError(said))())
    (tmp_path / FAILURE).touch()
    with pytest.raises(RuntimeError, match=said) as error:
        toy_trainer(tmp_path, callbacks=[FailureReport()]).test(LitToy(), ToyData())
    assert error.value.__notes__[0].startswith("rank 0, test, epoch 0, step 0")
    assert (tmp_path / "failure-test.json").exists() is (said == "a broken step")


def test_a_run_that_heard_nothing_gives_back_what_was_there(tmp_path: Path) -> None:
    before = mock.Mock()
    signal.signal(USR1, before)
    toy_trainer(tmp_path, max_epochs=1, callbacks=[Ledger(), Preemption()]).fit(LitToy(), ToyData())
    assert signal.getsignal(USR1) is before
    before.assert_not_called()


def test_a_warning_before_there_is_a_run_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "kill", kill := mock.Mock())
    forward_signals()
    signal.raise_signal(USR1)
    kill.assert_called_once_with(os.getpid(), USR1)
    assert signal.getsignal(USR1) is signal.SIG_DFL


PLAIN = ("AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
OPTIMIZERS = {name: partial(getattr(torch.optim, name), lr=0.01) for name in PLAIN} | {
    "sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adamw fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "adam amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.01, momentum=0.9),
}


def fit(folder, optimizer, policy, **options):
    states, data, module = AfterSteps(), ToyData(nan_sample=PLANTED), LitToy(optimizer)
    callbacks = [NonFinite(policy), LastCheckpoint(every_n_steps=1, every_epoch=False), states]
    options = {"max_epochs": 1, "limit_val_batches": 0, "callbacks": callbacks, **options}
    toy_trainer(folder, **options).fit(module, data)
    plan = data.plan("train", 0)  # steps count from 1
    return states, 1 + next(s for s in range(plan.num_steps) if PLANTED in plan.step_ids(s))


@pytest.mark.parametrize(("name", "clip"), [(n, None) for n in OPTIMIZERS] + [("AdamW", 1.0)])
def test_a_skipped_step_changes_neither_weights_nor_moments(tmp_path, name, clip):
    states, step = fit(tmp_path, OPTIMIZERS[name], "skip", gradient_clip_val=clip)
    assert 1 < step < len(states.weights) - 1
    for parameter, value in states.weights[step - 1].items():
        assert torch.equal(states.weights[step][parameter], value)
        assert torch.isfinite(states.weights[-1][parameter]).all()
        assert not torch.equal(states.weights[step + 1][parameter], value)
    old, new = states.moments[step - 1 : step + 1]
    assert old
    torch.testing.assert_close(new, old, rtol=0, atol=0)
    lines = json_lines(tmp_path / "ledger.jsonl")
    (event,) = [line for line in lines if line.get("event") == "not_applied"]
    assert (event["step"], PLANTED in event["sample_ids"]) == (step, True)
    assert [x["is_finite"] for x in lines if "digest" in x and x["step"] == step] == [False]
    proof = verify_run(tmp_path)
    assert proof.status == Status.NOT_APPLIED
    assert f"step {step}: its update was not applied; 8 samples are not in" in proof.faults[0]
    assert [use.num_samples for use in proof.epochs] == [50 - 8]


def test_the_run_stops_and_names_the_sample(tmp_path):
    with pytest.raises(FloatingPointError) as error:
        fit(tmp_path, OPTIMIZERS["AdamW"], "stop")
    assert "Samples: " in str(error.value)
    assert "unisono replay" in str(error.value)
    lines = json_lines(tmp_path / "ledger.jsonl")
    (event,) = [line for line in lines if line.get("event") == "not_applied"]
    assert PLANTED in event["sample_ids"]
    assert len(set(event["sample_ids"])) == len(event["sample_ids"])
    assert f"step {event['step']}:" in str(error.value)
    report = json.loads((tmp_path / FAILURE).read_text())  # not those of the step under way
    assert (report["step"], report["sample_ids"]) == (event["step"], event["sample_ids"])


def test_a_gradient_that_is_not_finite_stops_a_run_of_finite_losses(tmp_path):
    class Steep(LitToy):
        def configure_model(self):
            super().configure_model()
            self.model[0].weight.register_hook(lambda gradient: gradient / 0)

    stops = NonFinite()
    for run in ("one", "another"):  # each names its own step
        with pytest.raises(FloatingPointError, match="step 1: loss or gradient is not finite"):
            toy_trainer(tmp_path / run, callbacks=[stops]).fit(Steep(), ToyData())


def test_a_step_that_never_called_exact_mean_is_refused(tmp_path):
    class Plain(LitToy):
        def training_step(self, batch, batch_idx):
            return self(batch).square().mean()

    with pytest.raises(RuntimeError, match="must go through it"):
        toy_trainer(tmp_path).fit(Plain(), ToyData())


def test_too_many_skipped_steps_stop_the_run(tmp_path):
    skips = NonFinite("skip")
    skips.most_skipped = 1
    trainer = toy_trainer(tmp_path, max_epochs=3, limit_val_batches=0, callbacks=[skips])
    with pytest.raises(FloatingPointError, match="1 of 1 left out so far"):
        trainer.fit(LitToy(), ToyData(nan_sample=PLANTED))


def test_a_rank_that_is_silent_writes_its_stack_and_ends(tmp_path, capfd):
    statuses: list[int] = []
    watch = Watch(tmp_path, 3, 0.2, statuses.append)
    watch.beat = (time.monotonic() + 60, {"step": 4})  # a sign of life, on a busy machine too
    time.sleep(0.4)
    assert not statuses
    watch.beat = (time.monotonic(), {"step": 5})
    end = time.monotonic() + 30
    while not statuses and time.monotonic() < end:
        time.sleep(0.02)
    watch.is_over.set()
    for thread in (t for t in threading.enumerate() if t.name == "watch"):  # it may be writing
        thread.join(30)
    assert set(statuses) == {1}
    stack = (tmp_path / "stacks" / "rank-3.txt").read_text()
    assert 'last: {"step": 5}' in stack
    assert "test_a_rank_that_is_silent" in stack
    said = "in {'step': 5}: it hangs, or waits for a rank that does; it ends."
    assert said in capfd.readouterr().err


def test_names_of_libraries_that_are_private_are_still_there(tmp_path):
    trainer = toy_trainer(tmp_path, callbacks=[])
    assert LitToy()._trainer is None
    assert LitToy()._device == LitToy().device
    for name in ("_parse_ckpt_path", "_set_seed", "_run_subcommand"):
        assert callable(getattr(LightningCLI, name))
    assert DDPStrategy(static_graph=True)._ddp_kwargs == {"static_graph": True}
    assert ModelParallelStrategy()._data_parallel_size == "auto"
    assert torch.nn.Linear(1, 1)._compiled_call_impl is None
    assert torch.compile(torch.nn.Linear(1, 1), backend="eager")._orig_mod is not None
    assert callable(trainer._signal_connector.register_signal_handlers)
    loop = trainer.fit_loop.epoch_loop
    assert callable(loop._broadcast_sigterm_tensor)
    assert loop._skip_next_val is False  # the ledger sets it to end a run without validation
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], fused=True)
    assert optimizer._step_supports_amp_scaling
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert torch.optim.lr_scheduler.SequentialLR(optimizer, [constant], [])._schedulers
