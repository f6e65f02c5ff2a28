"""Level B: the same bits on 1, 2 and 4 processes, and after a resume; level A keeps gradients."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lit_models.training.checkpoints import read_checkpoint
from tests.distributed.launch import run
from tests.toy import ledger_lines


def state(folder: Path) -> dict[str, Tensor]:
    """Return all weights and the optimizer's moments of a run's last checkpoint."""
    checkpoint = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    moments = checkpoint["optimizer_states"][0]["state"]
    found = {f"{i}.{k}": v for i, values in moments.items() for k, v in values.items()}
    return {**checkpoint["state_dict"], **found}


def differences(one: Path, other: Path) -> list[str]:
    left, right = state(one), state(other)
    assert left.keys() == right.keys()
    return [name for name, value in left.items() if not torch.equal(value, right[name])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bitwise")
    done = run("-m", "tests.distributed.bitwise_run", str(folder))
    assert done.returncode == 0, done.stdout
    return folder


@pytest.mark.parametrize("other", ["2 devices", "4 devices", "2, then 4 devices"])
def test_weights_and_moments_have_the_same_bits(runs: Path, other: str) -> None:
    lines = ledger_lines(runs / other)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[-1]["world_size"] == int(other.removesuffix(" devices")[-1])
    assert differences(runs / "1 device", runs / other) == []


def test_without_the_fixed_tree_bits_differ_while_gradients_agree(runs: Path) -> None:
    assert differences(runs / "plain, 1 device", runs / "plain, 2 devices") != []
    assert differences(runs / "plain, 1 device", runs / "1 device") != []
    for name in ("plain, 2 devices", "1 device"):
        for a, b in zip(
            ledger_lines(runs / "plain, 1 device"), ledger_lines(runs / name), strict=True
        ):
            assert a["digest"] == b["digest"]
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
