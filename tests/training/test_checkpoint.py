"""Checkpoints: whole or absent, plain data, the newest sound one; weights from another run."""

import functools
import subprocess
import sys

import pytest
import torch

from lit_models.training.callbacks import BestCheckpoint, LastCheckpoint, Ledger
from lit_models.training.checkpoints import (
    AtomicCheckpointIO,
    damage,
    newest_checkpoint,
    read_checkpoint,
)
from lit_models.training.hyperparameters import plain_hyperparameters
from tests.toy import LitToy, ToyData, toy_trainer


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
    again = plain_hyperparameters(dict(module.hparams))
    assert again["optimizer"]["class_path"].endswith("AdamW")
    module.configure_model()  # the weights came before the network
    for name, value in module.state_dict().items():
        assert torch.equal(value, content["state_dict"][name].to(value))


def test_a_value_that_is_no_plain_data_is_refused():
    with pytest.raises(ValueError, match=r"optimizer is <function.*functools\.partial"):
        LitToy(optimizer=lambda p: torch.optim.SGD(p, lr=1.0))
    with pytest.raises(ValueError, match=r"only functools\.partial of a class"):
        plain_hyperparameters({"optimizer": functools.partial(print)})


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


def test_the_newest_sound_checkpoint_is_found(files):
    assert newest_checkpoint(files.parent) == files / "last.ckpt"
    assert newest_checkpoint(files.parent / "nowhere") is None


def test_a_missing_checkpoint_names_its_neighbours(files):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint .*lost\.ckpt.*last\.ckpt, prev"):
        read_checkpoint(files / "lost.ckpt")


def test_code_in_a_checkpoint_is_never_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "owned"), "w"))

    torch.save({"state_dict": {}, "evil": Evil()}, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match="Only plain data is loaded"):
        read_checkpoint(tmp_path / "evil.ckpt")
    assert not (tmp_path / "owned").exists()


def test_another_file_is_no_checkpoint(tmp_path):
    torch.save([1, 2], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="holds no state_dict"):
        read_checkpoint(tmp_path / "list.ckpt")


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"old": torch.ones(1)}}, path)
    script = (
        "import resource, signal, sys, torch\n"
        "from lit_models.training.checkpoints import AtomicCheckpointIO\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "big = {'state_dict': {'new': torch.ones(100_000)}}\n"
        "AtomicCheckpointIO().save_checkpoint(big, sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True)
    assert done.returncode != 0
    assert "could not be written" in done.stderr
    assert "The one before it is kept" in done.stderr
    assert read_checkpoint(path)["state_dict"]["old"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_weights_alone_start_another_run(run, tmp_path):
    path = run / "checkpoints" / "best.ckpt"
    module = LitToy(init_from=str(path))
    trainer = toy_trainer(tmp_path, limit_train_batches=0)
    trainer.fit(module, ToyData())
    assert trainer.global_step == 0
    expected = read_checkpoint(path)["state_dict"]
    assert all(torch.equal(v, expected[n].to(v)) for n, v in module.state_dict().items())


def test_one_part_of_the_weights_can_be_taken(run):
    module = LitToy(init_from=str(run / "checkpoints" / "best.ckpt"))
    module.init_from_part = "2"
    module.configure_model()
    expected = read_checkpoint(module.init_from)["state_dict"]
    assert torch.equal(module.model[2].weight, expected["model.2.weight"].float())
    assert not torch.equal(module.model[0].weight, expected["model.0.weight"].float())


def test_weights_that_do_not_fit_are_named(run, tmp_path):
    other = LitToy()
    other.configure_model()
    wrong = tmp_path / "wrong.ckpt"
    states = {**other.state_dict(), "model.0.weight": torch.zeros(9, 1)}
    torch.save({"state_dict": states}, wrong)
    module = LitToy(init_from=str(wrong))
    with pytest.raises(ValueError, match=r"model\.0\.weight: \(9, 1\) instead of \(4, 1\)"):
        module.configure_model()
    module = LitToy(init_from=str(run / "checkpoints" / "best.ckpt"))
    module.init_from_part = "encoder"
    with pytest.raises(ValueError, match="init_from_part is 'encoder', but LitToy has none"):
        module.configure_model()


def test_the_clock_saves_through_the_ledger(tmp_path):
    often = LastCheckpoint(every_n_minutes=1e-9, every_epoch=False)
    trainer = toy_trainer(
        tmp_path, max_epochs=1, callbacks=[Ledger(), often], enable_checkpointing=False
    )
    trainer.fit(LitToy(), ToyData())
    saved = [read_checkpoint(p)["global_step"] for p in (tmp_path / "checkpoints").iterdir()]
    assert len(saved) == 2
    assert min(saved) >= 2


def test_wrong_intervals_are_refused():
    with pytest.raises(ValueError, match="every_n_minutes must be positive, got 0"):
        LastCheckpoint(every_n_minutes=0)
    with pytest.raises(ValueError, match="every_n_steps must be positive, got -1"):
        LastCheckpoint(every_n_steps=-1)


def test_the_best_checkpoint_follows_the_metric_that_the_module_names(tmp_path):
    class Rising(LitToy):
        monitor, monitor_mode = "val/score", "max"

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.log("val/score", -float(self.current_epoch), batch_size=1)

    best = BestCheckpoint()
    toy_trainer(tmp_path, max_epochs=3, callbacks=[Ledger(), best]).fit(Rising(), ToyData())
    assert read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")["epoch"] == 0
    assert best.best_model_score == 0
