"""Twenty kills in one run: each sample once, and the weights of a run that nobody disturbed."""

import pytest
import torch

from lit_models.training.checkpoint import read_checkpoint
from lit_models.training.lineage import verify_run
from tests.distributed.chaos import EPOCHS, MOMENTS, WORLDS, chaos, finish
from tests.distributed.launch import run

ONE = (1, "auto")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(folder, ONE)
    return weights(folder)


def weights(folder):
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def assert_proven(folder, capsys):
    """Assert the proof by the ledger, and print it."""
    proof = run("-m", "lit_models", "verify", str(folder))
    with capsys.disabled():
        print(f"\n{proof.stdout}")
    assert proof.returncode == 0
    assert verify_run(folder).finished_epochs == EPOCHS


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.soak),
        pytest.param(3, marks=pytest.mark.soak),
    ],
)
def test_twenty_kills_on_changing_devices_leave_no_trace(tmp_path, undisturbed, seed, capsys):
    kills = chaos(tmp_path / "run", seed, WORLDS, MOMENTS)
    assert len(kills) == 20
    assert len({(kill.devices, kill.strategy) for kill in kills}) >= 3
    assert_proven(tmp_path / "run", capsys)
    for name, value in weights(tmp_path / "run").items():
        torch.testing.assert_close(value, undisturbed[name], rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_kills_on_the_same_device_change_no_bit(tmp_path, undisturbed, capsys):
    chaos(tmp_path / "run", 4, [ONE], ["seconds", "checkpoint", "validation"])
    assert_proven(tmp_path / "run", capsys)
    for name, value in weights(tmp_path / "run").items():
        assert torch.equal(value, undisturbed[name]), name
