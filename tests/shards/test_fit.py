"""A folder of shards is trained on by the command line, and the run is verified."""

import pytest

from lit_models.commands.verify import Status
from tests.shards.small import write_folder

SMALL = (
    *("fit", "--config", "causal_lm/debug.yaml", "--data=datamodules.ShardDataModule"),
    *(
        "--data.context_length=64",
        "--data.global_batch_size=8",
        "--data.split.validation_share=0.1",
    ),
    "--trainer.max_epochs=2",
)


@pytest.mark.parametrize("more", [(), ("--data.layout=documents", "--data.shuffle_shards=1")])
def test_a_folder_of_shards_trains_a_language_model(unisono, tmp_path, monkeypatch, more):
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "shards")
    status, output = unisono(*SMALL, f"--data.train_files={folder}", *more)
    assert status == 0, output
    status, output = unisono("verify", "runs/causal_lm-debug")
    assert status in (Status.PROVEN, Status.CUT), output
