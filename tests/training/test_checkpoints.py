"""Checkpoints: whole or absent, plain data, in one file or in a folder of all ranks."""

import errno
import functools
import json
import os
import resource
import signal
import threading
from collections import OrderedDict
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers.logger import DummyLogger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from datamodules.core import store
from lit_models.run_files import damage, put_together, read_checkpoint
from lit_models.training import BestCheckpoint, LastCheckpoint, Ledger, checkpoints
from lit_models.training.checkpoints import (
    SAVES,
    AtomicCheckpointIO,
    gathered,
    load_part,
    newest_checkpoint,
    on_host,
    write_folder,
)
from lit_models.training.hyperparameters import plain_values
from tests.distributed.launch import in_world
from tests.toy import AfterSteps, LitToy, ToyData, toy_trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    toy_trainer(folder).fit(LitToy(), ToyData())
    return folder


@pytest.fixture
def files(run, tmp_path):
    target = tmp_path / "checkpoints"
    target.mkdir()
    for name in ("previous.ckpt", "last.ckpt"):
        (target / name).write_bytes((run / "checkpoints" / name).read_bytes())
    return target


def test_a_checkpoint_of_a_script_is_plain_data_and_rebuilds_the_module(run):
    path = run / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    assert content["hyper_parameters"]["optimizer"] == {
        "class_path": "torch.optim.adamw.AdamW",
        "init_args": {"lr": 0.01},
    }
    module = LitToy.load_from_checkpoint(path)
    assert module.optimizer([torch.nn.Parameter(torch.zeros(1))]).defaults["lr"] == 0.01
    assert plain_values(dict(module.hparams))["optimizer"]["class_path"].endswith("AdamW")
    for name, value in module.state_dict().items():
        assert torch.equal(value, content["state_dict"][name].to(value))


def test_a_value_that_is_no_plain_data_is_refused():
    with pytest.raises(ValueError, match=r"optimizer is <function.*functools\.partial"):
        LitToy(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    with pytest.raises(ValueError, match=r"optimizer is functools\.partial.*instead of a lambda"):
        plain_values({"optimizer": functools.partial(print)})


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda b: b[: len(b) // 2], "cut short"),
        (lambda b: b"", "it is empty"),
        (lambda b: b[: len(b) // 3] + b"\x00\xff" * 8 + b[len(b) // 3 + 16 :], "checksum"),
        (lambda b: b"no checkpoint", "cut short or no checkpoint"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(files, harm, message):
    last = files / "last.ckpt"
    last.write_bytes(harm(last.read_bytes()))
    assert message in damage(last)
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged.*--ckpt_path auto"):
        read_checkpoint(last)
    with pytest.warns(UserWarning, match=r"last\.ckpt is damaged"):
        assert newest_checkpoint(files.parent) == files / "previous.ckpt"


@pytest.mark.parametrize(
    ("last", "previous", "newest"),
    [((1, 14), (1, 7), "last"), ((1, 7), (1, 14), "previous"), ((2, 3), (1, 14), "last")],
)
def test_the_newest_checkpoint_is_of_the_last_attempt_and_step(files, last, previous, newest):
    for name, (attempt, step) in {"last": last, "previous": previous, "best": (9, 99)}.items():
        ledger = {"ledger": {"attempt": attempt}, "global_step": step}
        torch.save({"state_dict": {}, **ledger}, files / f"{name}.ckpt")
        os.utime(files / f"{name}.ckpt", (0, 0) if name == newest else None)
    assert newest_checkpoint(files.parent) == files / f"{newest}.ckpt"


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"state_dict": {}, "evil": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="Only plain data is loaded"):
        read_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "owned").exists()


def saved_on_a_full_disk(path):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"new": torch.ones(100_000)}}, path)


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"old": torch.ones(1)}}, path)
    output = in_world(1, saved_on_a_full_disk, path, status=1, method="fork")
    assert "could not be written" in output
    assert "The one before it is kept" in output
    assert read_checkpoint(path)["state_dict"]["old"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_weights_alone_start_another_run(run, tmp_path):
    path = run / "checkpoints" / "best.ckpt"
    module = LitToy(init_from=f"~/{os.path.relpath(path, Path.home())}")
    trainer = toy_trainer(tmp_path, limit_train_batches=0)
    trainer.fit(module, ToyData())
    assert trainer.global_step == 0
    expected = read_checkpoint(path)["state_dict"]
    assert all(torch.equal(v, expected[n].to(v)) for n, v in module.state_dict().items())


def test_one_part_of_the_weights_can_be_taken_and_what_does_not_fit_is_named(run, tmp_path):
    module, path = LitToy(), run / "checkpoints" / "best.ckpt"
    module.configure_model()
    load_part(module, str(path), "2")
    expected = read_checkpoint(path)["state_dict"]
    assert torch.equal(module.model[2].weight, expected["model.2.weight"].float())
    assert not torch.equal(module.model[0].weight, expected["model.0.weight"].float())
    other = LitToy()
    other.configure_model()
    states = {**other.state_dict(), "model.0.weight": torch.zeros(9, 1)}
    torch.save({"state_dict": states}, wrong := tmp_path / "wrong.ckpt")
    with pytest.raises(ValueError, match=r"model\.0\.weight \[9, 1\] there, \[4, 1\] here"):
        load_part(other, str(wrong))
    with pytest.raises(ValueError, match="init_from_part is 'encoder', but LitToy has none"):
        load_part(other, str(run / "checkpoints" / "best.ckpt"), "encoder")


def test_the_clock_saves_through_the_ledger(tmp_path):
    callbacks = [Ledger(), LastCheckpoint(every_n_minutes=1e-9, every_epoch=False)]
    trainer = toy_trainer(tmp_path, max_epochs=1, callbacks=callbacks, enable_checkpointing=False)
    trainer.fit(LitToy(), ToyData())
    saved = [read_checkpoint(p)["global_step"] for p in (tmp_path / "checkpoints").iterdir()]
    assert len(saved) == 2
    assert min(saved) >= 2


def test_a_save_holds_its_own_step_while_the_next_ones_are_made(tmp_path, monkeypatch):
    ended, write = threading.Event(), torch.save

    class Steps(AfterSteps):
        def on_train_batch_end(self, trainer, *given):
            super().on_train_batch_end(trainer, *given)
            if trainer.global_step == 5:
                ended.set()

    def write_late(*what):
        assert ended.wait(30), "the training waited for the save of step 3"
        write(*what)

    monkeypatch.setattr(torch, "save", write_late)
    callbacks = [LastCheckpoint(every_n_steps=3, every_epoch=False), steps := Steps()]
    options = {"callbacks": callbacks, "enable_checkpointing": False, "max_epochs": 1}
    toy_trainer(tmp_path, **options).fit(LitToy(), ToyData())
    for name, step in (("previous", 3), ("last", 6)):
        found = read_checkpoint(tmp_path / "checkpoints" / f"{name}.ckpt")
        assert found["global_step"] == step
        moments = found["optimizer_states"][0]["state"]
        torch.testing.assert_close(moments, steps.moments[step], rtol=0, atol=0)
        for weight, value in steps.weights[step].items():
            assert torch.equal(found["state_dict"][weight], value)


@pytest.mark.parametrize("hindrance", ["", "no room", "a logger that reads what is saved"])
def test_a_copy_is_written_as_what_it_is_a_copy_of(tmp_path, monkeypatch, hindrance):
    goes_on, looked, write = [], threading.Event(), torch.save

    class Twice(AtomicCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            looked.clear()
            super().save_checkpoint(checkpoint, path)
            goes_on.append(SAVES.writing is not None)
            looked.set()
            SAVES.settle()
            assert read_checkpoint(path)["global_step"] == checkpoint["global_step"]
            super().save_checkpoint(checkpoint, Path(path).with_suffix(".at_once"))

    if hindrance == "no room":
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0))
    if not hindrance:
        monkeypatch.setattr(torch, "save", lambda *what: (looked.wait(1), write(*what)))
    logger = hindrance.startswith("a logger") and DummyLogger()
    toy_trainer(tmp_path, plugins=[Twice()], logger=logger).fit(LitToy(), ToyData())
    assert any(goes_on) is not bool(hindrance)  # of those that wait, the last one ends at once
    for name in ("last", "best"):
        path = tmp_path / "checkpoints" / f"{name}.ckpt"
        assert path.read_bytes() == path.with_suffix(".at_once").read_bytes()


def test_a_write_that_fails_ends_the_run_by_the_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.save", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
    saves = LastCheckpoint(every_n_steps=3, every_epoch=False)
    written = LambdaCallback(on_train_batch_start=lambda *_: wait(filter(None, [SAVES.writing])))
    with pytest.raises(OSError, match=r"last\.ckpt could not be written: .*No space left.*before"):
        toy_trainer(tmp_path, callbacks=[saves, written]).fit(LitToy(), ToyData())
    report = json.loads((tmp_path / "failure.json").read_text())
    assert "No space left" in report["error"]
    assert report["step"] in (3, 4)  # the writer may be faster


class OnGPU(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True


def test_what_a_gpu_holds_under_two_names_is_copied_once(monkeypatch):
    monkeypatch.setattr(checkpoints, "host_copy", lambda tensor: torch.tensor(tensor.tolist()))
    weight = torch.ones(2, 3).as_subclass(OnGPU)
    weights = OrderedDict(weight=weight, tied=weight.detach(), other=torch.zeros(2))
    weights._metadata = {"": {"version": 1}}
    copied = on_host({"state_dict": weights})["state_dict"]
    assert copied["weight"] is copied["tied"]
    assert type(copied["weight"]) is torch.Tensor
    assert copied["other"].data_ptr() != weights["other"].data_ptr()
    assert copied._metadata == weights._metadata


def test_the_best_checkpoint_follows_the_metric_that_the_module_names(tmp_path):
    class Rising(LitToy):
        monitor, monitor_mode = "val/score", "max"

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val/score", -float(self.current_epoch), batch_size=1)

    folder, last = tmp_path / "run", None
    for epochs in (3, 5, 6):
        if epochs == 6:
            last = last.rename(tmp_path / "alone.ckpt")
            folder = tmp_path / "run"
        trainer = toy_trainer(folder, max_epochs=epochs, callbacks=[Ledger(), BestCheckpoint()])
        trainer.fit(Rising(), ToyData(), ckpt_path=last)
        folder = folder.rename(tmp_path / f"moved-{epochs}")
        last = folder / "checkpoints" / "last.ckpt"
        best = read_checkpoint(last.with_name("best.ckpt"))["epoch"]
        assert best == -trainer.checkpoint_callback.best_model_score == (5 if epochs == 6 else 0)


def save(path, step):
    """Write a folder whose weight has two names, as a group of one process does."""
    content = {"state_dict": {"weight": {"_sharded_tensor": "w"}, "tied": {"_sharded_tensor": "w"}}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        content |= {"global_step": step, "ledger": {"attempt": 1}}
        write_folder(content, {"w": torch.ones(4, 3)}, path)
    finally:
        dist.destroy_process_group()


ROWS, FEW = torch.arange(15.0, dtype=torch.float64).reshape(5, 3), torch.ones(1, 2)
TABLE = torch.arange(24.0).reshape(4, 6)


def sharded_content(step):
    """Return uneven rows, a row of one rank, copies, columns, and rows that are split twice."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
    sharded = functools.partial(distribute_tensor, src_data_rank=None)
    weight = sharded(ROWS, line, [Shard(0)])
    weights = {
        "weight": weight,
        "tied": weight,
        "few": sharded(FEW, line, [Shard(0)]),
        "hybrid": sharded(TABLE, square, [Replicate(), Shard(1)]),
        "twice": sharded(TABLE, square, [Shard(0), Shard(0)]),
        "plain": torch.tensor(3),
    }
    return {"state_dict": weights, "global_step": step}


def write_together(folder):
    """Write shards on four ranks while others compute, then again with a full disk on one rank."""
    dist.init_process_group("gloo")
    index, path, device = dist.get_rank(), folder / "last.ckpt", torch.device("cpu")
    rest, own = gathered(sharded_content(4), device, 4)
    group = dist.new_group(backend="gloo")
    SAVES.write(functools.partial(write_folder, rest, own, path, group), in_background=True)
    for _ in range(200):  # as training steps do while a save is under way
        dist.all_reduce(torch.ones(1))
    SAVES.settle()
    rest, own = gathered(sharded_content(4), device, 1)
    assert bool(own) == (index == 0)
    if index == 0:
        torch.save(put_together(rest, own), folder / "one.ckpt")

    newer = gathered(sharded_content(8), device, 4)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    if index == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, unlimited[1]))
    try:
        write_folder(*newer, path)
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        (folder / f"error-{index}").write_text(str(error))
    dist.destroy_process_group()


@pytest.mark.slow
def test_four_ranks_write_what_one_reads_and_a_full_disk_of_one_leaves_the_old_folder(tmp_path):
    in_world(4, write_together, tmp_path)
    path = tmp_path / "last.ckpt"
    for content in (read_checkpoint(path), torch.load(tmp_path / "one.ckpt", weights_only=True)):
        found = content["state_dict"]
        assert content["global_step"] == 4
        assert found["tied"].data_ptr() == found["weight"].data_ptr()
        expected = {"weight": ROWS, "tied": ROWS, "few": FEW, "hybrid": TABLE, "twice": TABLE}
        torch.testing.assert_close(found, {**expected, "plain": torch.tensor(3)}, rtol=0, atol=0)
    for index in range(4):
        text = (tmp_path / f"error-{index}").read_text()
        assert "last.ckpt could not be written: on rank 2: " in text
        assert "File too large" in text
        assert "The one before it is kept; free space" in text
    assert not list(tmp_path.glob(".*"))


def killed_before_the_folder_is_renamed(path):
    store.put_in_place = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    save(path, 8)  # now the marker is written


def test_a_kill_in_the_middle_leaves_the_old_folder_and_the_next_save_is_sound(tmp_path):
    save(path := tmp_path / "checkpoints" / "last.ckpt", 4)
    in_world(1, killed_before_the_folder_is_renamed, path, status=-signal.SIGKILL, method="fork")
    assert list(path.parent.glob(".last.ckpt.unfinished-*/meta.pt"))
    assert newest_checkpoint(tmp_path) == path
    assert read_checkpoint(path)["global_step"] == 4
    save(path, 12)
    assert read_checkpoint(path)["global_step"] == 12
    assert read_checkpoint(path.with_name("previous.ckpt"))["global_step"] == 4
    assert len({file.stat().st_mode for file in path.iterdir()}) == 1  # those of the user's umask
    assert len(os.listdir(path.parent)) == 2
    save(path.with_name("next.ckpt"), 16)
    os.utime(path)  # as a copy or an index changes times
    assert newest_checkpoint(tmp_path) == path.with_name("next.ckpt")


def test_a_missing_checkpoint_and_a_folder_of_another_program_are_named(files):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*lost\.ckpt.*last\.ckpt, prev"):
        read_checkpoint(files / "lost.ckpt")
    with pytest.raises(FileNotFoundError, match="no checkpoint .*/checkpoints holds last.ckpt, "):
        read_checkpoint(files)
    torch.save({"state_dict": {}}, files / "meta.pt")
    with pytest.raises(ValueError, match=r"its meta\.pt is not of this format"):
        read_checkpoint(files)
    with pytest.raises(FileNotFoundError, match="no checkpoint .*/checkpoints holds last.ckpt, "):
        read_checkpoint(files.parent)


def test_a_file_and_a_folder_replace_each_other(tmp_path):
    path = tmp_path / "last.ckpt"
    save(path, 2)
    AtomicCheckpointIO().save_checkpoint({"state_dict": {}, "global_step": 4}, path)
    assert read_checkpoint(path)["global_step"] == 4
    save(path, 8)  # two devices resume
    assert read_checkpoint(path)["global_step"] == 8
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "previous.ckpt"]
