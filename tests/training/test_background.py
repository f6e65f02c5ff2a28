"""Checkpoints written while the training goes on."""

import threading
import time

import pytest
import torch
from lightning.pytorch import Callback

from lit_models.training.callbacks import LastCheckpoint, Ledger, NonFinite
from lit_models.training.checkpoints import (
    AtomicCheckpointIO,
    BackgroundWriter,
    copied,
    read_checkpoint,
)
from tests.toy import LitToy, ToyData, toy_trainer


class SlowIO(AtomicCheckpointIO):
    """Sleeps before it writes, and says which saves there were and when they were whole."""

    def __init__(self, seconds=0.0, fails_at=None):
        self.seconds, self.fails_at = seconds, fails_at
        self.begun, self.whole, self.at_once = [], [], 0

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.begun.append(checkpoint["global_step"])
        self.at_once = max(self.at_once, len(self.begun) - len(self.whole))
        time.sleep(self.seconds)
        if len(self.begun) == self.fails_at:
            raise OSError(f"the checkpoint {path} could not be written: no space left")
        super().save_checkpoint(checkpoint, path, storage_options)
        self.whole.append(checkpoint["global_step"])


class Watch(Callback):
    """Notes the weights after each step, and at which steps a thread was writing."""

    def __init__(self, stop_at=None):
        self.weights, self.steps_meanwhile, self.stop_at = {}, [], stop_at

    def on_train_batch_end(self, trainer, module, *_):
        step = trainer.global_step
        self.weights[step] = {n: v.clone() for n, v in module.state_dict().items()}
        if any(thread.name.startswith("checkpoint") for thread in threading.enumerate()):
            self.steps_meanwhile.append(step)
        if step == self.stop_at:
            raise KeyError("the run is cut")


def fit(folder, io=None, every=5, watch=None, resume=None, saver=None, **options):
    """Train to step 14 of two epochs of 7 steps, saving in the background."""
    saver = saver or LastCheckpoint(every_n_steps=every, every_epoch=False, asynchronous=True)
    callbacks = [Ledger(), *([watch] if watch else []), saver]
    trainer = toy_trainer(folder, callbacks=callbacks, enable_checkpointing=False, **options)
    trainer.strategy.checkpoint_io = io or AtomicCheckpointIO()
    module = LitToy()
    trainer.fit(module, ToyData(), ckpt_path=resume)
    return module


def content(folder, name="last"):
    return read_checkpoint(folder / "checkpoints" / f"{name}.ckpt")


def test_the_file_holds_the_weights_of_its_step_though_the_training_went_on(tmp_path):
    io, watch = SlowIO(seconds=0.3), Watch()
    fit(tmp_path, io, watch=watch)
    assert io.whole == [5, 10]
    assert len(watch.steps_meanwhile) >= 3
    for name, step in (("previous", 5), ("last", 10)):
        found = content(tmp_path, name)
        assert found["global_step"] == step
        for parameter, value in watch.weights[step].items():
            assert torch.equal(found["state_dict"][parameter], value)
        moments = found["optimizer_states"][0]["state"].values()
        assert all(state["step"] == step for state in moments)


def test_a_save_waits_for_the_one_before_it(tmp_path):
    io = SlowIO(seconds=0.1)
    fit(tmp_path, io, every=2)
    assert io.whole == [2, 4, 6, 8, 10, 12, 14]
    assert io.at_once == 1
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "last.ckpt",
        "previous.ckpt",
    ]


def test_a_run_that_ends_has_its_last_checkpoint(tmp_path):
    fit(tmp_path, SlowIO(seconds=0.5), every=14)
    assert content(tmp_path)["global_step"] == 14


def test_a_run_that_fails_keeps_what_was_being_written(tmp_path):
    with pytest.raises(KeyError, match="the run is cut"):
        fit(tmp_path, SlowIO(seconds=0.3), watch=Watch(stop_at=6))
    assert content(tmp_path)["global_step"] == 5


@pytest.mark.parametrize(("every", "fails_at", "kept"), [(5, 2, 5), (3, 2, 3), (7, 2, 7)])
def test_what_the_thread_could_not_write_is_told_and_the_old_one_kept(
    tmp_path, every, fails_at, kept
):
    io = SlowIO(fails_at=fails_at)  # its step, the next save or the end tells it
    with pytest.raises(OSError, match=r"next\.ckpt could not be written: no space left"):
        fit(tmp_path, io, every=every)
    assert content(tmp_path)["global_step"] == kept
    assert not (tmp_path / "checkpoints" / "next.ckpt").exists()
    assert len(io.begun) == fails_at


def test_a_failing_run_with_a_failing_writer_names_both(tmp_path):
    io = SlowIO(seconds=0.3, fails_at=1)
    with (
        pytest.raises(KeyError, match="the run is cut"),
        pytest.warns(UserWarning, match="no space left"),
    ):
        fit(tmp_path, io, watch=Watch(stop_at=6))


def test_a_resumed_run_equals_the_uninterrupted_one(tmp_path):
    whole = fit(tmp_path / "whole").state_dict()
    with pytest.raises(KeyError, match="the run is cut"):
        fit(tmp_path / "cut", SlowIO(seconds=0.2), watch=Watch(stop_at=8))
    last = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    for name, value in fit(tmp_path / "cut", resume=last).state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12)


def test_a_background_file_is_that_of_a_save_at_once(tmp_path):
    fit(tmp_path / "behind")
    fit(tmp_path / "once", saver=LastCheckpoint(every_n_steps=5, every_epoch=False))
    behind, once = content(tmp_path / "behind"), content(tmp_path / "once")
    assert behind.keys() == once.keys()
    assert type(behind["state_dict"]) is type(once["state_dict"])
    assert behind.pop("ledger") != once.pop("ledger")  # seconds are in the lines
    assert {k: str(v) for k, v in behind.items()} == {k: str(v) for k, v in once.items()}


def test_a_rollback_takes_the_checkpoint_that_is_still_being_written(tmp_path):
    saver = LastCheckpoint(every_n_steps=1, every_epoch=False, asynchronous=True)
    callbacks = [Ledger(), NonFinite(policy="rollback", most_skipped=3), saver]
    trainer = toy_trainer(tmp_path, max_epochs=1, callbacks=callbacks, enable_checkpointing=False)
    io = trainer.strategy.checkpoint_io = SlowIO(seconds=0.2)
    with pytest.warns(UserWarning, match="rollback"):
        trainer.fit(LitToy(), ToyData(nan_sample=3))
    assert io.whole == sorted(io.whole)


def test_a_copy_keeps_tied_tensors_tied_and_shares_no_memory_with_the_weights():
    weight = torch.ones(3, requires_grad=True)
    twin = copied({"a": weight, "b": [weight.detach(), 1], "c": (torch.zeros(0), None)})
    with torch.no_grad():
        weight.add_(1)
    assert torch.equal(twin["a"], torch.ones(3))
    assert twin["a"].data_ptr() == twin["b"][0].data_ptr()
    assert not twin["a"].requires_grad


def test_an_error_is_raised_once():
    def refuse():
        raise OSError("full")

    writer = BackgroundWriter()
    writer.start(refuse)
    with pytest.raises(OSError, match="full"):
        writer.wait()
    writer.wait()
