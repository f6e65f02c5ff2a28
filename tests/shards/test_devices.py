"""A mixture of shards on two devices, killed and resumed on one, equals the run of one device."""

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from datamodules import LoaderOptions, ShardDataModule
from datamodules.files.splitting import TextSplit
from datamodules.shards.datamodule import SourceOptions
from lit_models import LitCausalLM
from lit_models.causal_lm.network import DecoderConfig
from lit_models.commands.verify import Status, verify_run
from lit_models.training import LastCheckpoint
from tests.distributed.launch import in_world
from tests.shards.small import write_folder
from tests.toy import callbacks_with, ledger_lines, toy_trainer

STEPS, KILLED_AT = 40, 13


class KillAt(Callback):
    """Kills this process after an optimizer step, as a machine failure does."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, is_killed: bool = False) -> None:
    """Train in `run` of the folder on a mixture, from its last checkpoint if there is one."""
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    shards = folder.parent
    data = ShardDataModule(
        sources={
            "web": SourceOptions(str(shards / "web"), weight=0.7),
            "books": SourceOptions(str(shards / "books"), weight=1.5),
        },
        shuffle_shards=2,
        split=TextSplit(0.1),
        context_length=64,
        global_batch_size=12,
        loader=LoaderOptions(num_workers=0),
    )
    network = DecoderConfig(max_positions=64, hidden_size=16, num_layers=1, num_heads=2)
    module = LitCausalLM(partial(torch.optim.AdamW, lr=0.01), network=network)
    callbacks = callbacks_with(LastCheckpoint(every_n_steps=5), *[KillAt()] * is_killed)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = toy_trainer(
        folder, devices=world, strategy="ddp" if world > 1 else "auto", callbacks=callbacks
    )
    last = folder / "checkpoints" / "last.ckpt"
    trainer.fit(module, data, ckpt_path=last if last.exists() else None, weights_only=True)


@pytest.mark.slow
def test_two_devices_and_a_kill_leave_the_losses_of_one_device(tmp_path):
    for seed, name in enumerate(("web", "books")):
        write_folder(tmp_path / name, num_shards=4, seed=seed)
    in_world(2, train, tmp_path / "two", True, status=-signal.SIGKILL)
    train(tmp_path / "two")
    train(tmp_path / "one")
    one, two = (ledger_lines(tmp_path / name) for name in ("one", "two"))
    assert len(one) == len(two) == STEPS
    for expected, found in zip(one, two, strict=True):
        for name in ("digest", "samples", "targets", "sources", "epoch", "step_in_epoch"):
            assert found[name] == expected[name]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    proof = verify_run(tmp_path / "two")
    assert proof.status is Status.PROVEN, proof.findings
    assert (proof.attempts, proof.discarded) == ([2, 1], ["attempt 1, steps 11 to 12"])
    assert set(proof.sources) == {"web", "books"}
