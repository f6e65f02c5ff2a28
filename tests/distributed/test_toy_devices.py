"""The toy on 1, 2 and 4 processes: level A with ddp, ours and Lightning's, and level B.

At level B it learns in float32 with dropout; a step has 8 chunks of 2 samples, an epoch 7 steps.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_models.certify.compare import read_record
from lit_models.commands.verify import verify_run
from lit_models.run_files import read_checkpoint
from lit_models.training import BitwiseSum, ExactDropout
from tests.distributed.jobs import run_jobs
from tests.distributed.launch import in_world
from tests.distributed.test_matrix import assert_same
from tests.toy import assert_same_samples, ledger_lines

EPOCHS = {"max_epochs": 2, "max_steps": 14, "gradient_clip_val": None}
ONE = {"name": "one", "family": "toy", "strategy": "auto", "trainer": EPOCHS}
TWO = {"ddp": {"strategy": "ddp"}, "ddp of Lightning": {"strategy": "ddp", "is_named": True}}
STEPS, CHUNKS, SIZE = 10, 8, 16
SPLIT = "2, then 4 devices"


def bitwise(name: str, steps: int = STEPS, is_bitwise: bool = True, **more: Any) -> dict[str, Any]:
    limits = {"max_steps": steps, "limit_val_batches": 0, "gradient_clip_val": 0.5}
    return {
        **{"name": name, "family": "toy_dropout", "strategy": "ddp", "stages": (), **more},
        "data": {"num_samples": 100, "global_batch_size": SIZE, "micro_batch_size": SIZE // CHUNKS},
        "trainer": {"precision": 32, **limits},
        "last": {"every_n_steps": STEPS // 2},
        "callbacks": [ExactDropout(), *([BitwiseSum()] if is_bitwise else [])],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    plain = [bitwise(f"plain, {n}", is_bitwise=False) for n in ("1 device", "2 devices")]
    two = [{**ONE, "name": name, **way} for name, way in TWO.items()]
    two += [bitwise("2 devices"), bitwise(SPLIT, STEPS // 2), plain[1]]
    in_world(1, run_jobs, folder, [ONE, bitwise("1 device"), plain[0]])
    in_world(2, run_jobs, folder, two)
    resume = str(folder / SPLIT / "checkpoints" / "last.ckpt")
    in_world(4, run_jobs, folder, [bitwise("4 devices"), bitwise(SPLIT, resume=resume)])
    return folder


@pytest.mark.parametrize("name", TWO)
def test_a_run_does_not_depend_on_the_devices_and_uses_each_sample_once(runs, name):
    one, two = runs / "one", runs / name
    assert_same(one, two, norms=1e-10, weights=1e-10)
    num_tested = read_record(two)["metrics"]["test/count"]
    assert num_tested == len((two / "coded.csv").read_text().split()) == 21
    for run in (one, two):
        verdict = verify_run(run)
        assert (verdict.findings, len(verdict.epochs)) == ([], 2)


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


@pytest.mark.parametrize("other", ["2 devices", "4 devices", SPLIT])
def test_weights_and_moments_have_the_same_bits(runs: Path, other: str) -> None:
    lines = ledger_lines(runs / other)
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["world_size"] == int(other.removesuffix(" devices")[-1])
    assert differences(runs / "1 device", runs / other) == []


def test_without_the_fixed_tree_bits_differ_while_gradients_agree(runs: Path) -> None:
    assert differences(runs / "plain, 1 device", runs / "plain, 2 devices") != []
    assert differences(runs / "plain, 1 device", runs / "1 device") != []
    lines = ledger_lines(runs / "plain, 1 device")
    for name in ("plain, 2 devices", "1 device"):
        assert_same_samples(lines, ledger_lines(runs / name), rel=1e-5)
