"""fsdp: what each rank holds, resuming across strategies, and every option with its effect."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_matrix import assert_same, facts, run_jobs, weights
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
HALF = {"max_steps": 5}
DATA = {"global_batch_size": 16}


def job(name: str, strategy: str = "fsdp", **more: Any) -> dict[str, Any]:
    return {"name": name, "family": "tied", "strategy": strategy, "data": DATA, **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole runs, and runs in two halves by two strategies and numbers of processes."""
    folder = tmp_path_factory.mktemp("sharding")

    def last(name: str) -> str:
        return str(folder / name / "checkpoints" / "last.ckpt")

    single = job("one-32", "ddp", trainer={"precision": "32-true"})
    run_jobs(folder, 1, [job("one", "ddp"), single, job("first-ddp-1", "ddp", trainer=HALF)])
    two = [
        job("sharded"),
        job("first-fsdp-2", trainer=HALF),
        job("ddp-1 to fsdp-2", resume=last("first-ddp-1")),
        job("kept", sharding={"reshard_after_forward": False}),
        job("ddp-2", "ddp"),
        job("bf16", trainer={"precision": "bf16-mixed"}),
    ]
    run_jobs(folder, 2, two)
    run_jobs(folder, 1, [job("fsdp-2 to ddp-1", "ddp", resume=last("first-fsdp-2"))])
    four = [
        job("hybrid", sharding={"replicate_size": 2}),
        job("fsdp-2 to fsdp-4", resume=last("first-fsdp-2")),
    ]
    run_jobs(folder, 4, four)
    return folder


def test_two_ranks_hold_half_of_parameters_and_moments_each(runs):
    for name in ("sharded", "ddp-1 to fsdp-2"):
        for file in ("facts.json", "facts-1.json"):
            held = json.loads((runs / name / file).read_text())
            for moment in ("bytes", "bytes_after"):  # after fit; after validation, test, prediction
                assert 0.4 <= held[moment]["local"] / held[moment]["whole"] <= 0.6
    assert facts(runs / "ddp-2")["bytes"]["local"] == facts(runs / "ddp-2")["bytes"]["whole"]


def test_hybrid_sharding_keeps_a_copy_in_each_group(runs):
    held = facts(runs / "hybrid")["bytes"]
    assert 0.4 <= held["local"] / held["whole"] <= 0.6  # on four devices: two groups of two


@pytest.mark.parametrize("name", ["sharded", "kept", "hybrid", "ddp-2"])
def test_no_option_changes_the_run(runs, name):
    assert_same(runs / "one", runs / name)


@pytest.mark.parametrize("name", ["ddp-1 to fsdp-2", "fsdp-2 to ddp-1", "fsdp-2 to fsdp-4"])
def test_a_run_goes_on_under_another_strategy_and_number_of_devices(runs, name):
    whole = ledger_lines(runs / "one")
    for expected, line in zip(whole[5:], ledger_lines(runs / name), strict=True):
        assert line["digest"] == expected["digest"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    for parameter, value in weights(runs / name).items():
        expected = weights(runs / "one")[parameter]
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)


def test_mixed_precision_uses_the_same_samples_and_nearly_the_same_losses(runs):
    single = ledger_lines(runs / "one-32")  # float64 begins with other random weights
    for expected, line in zip(single, ledger_lines(runs / "bf16"), strict=True):
        assert line["digest"] == expected["digest"]
        assert line["targets"] == expected["targets"]
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-2)
        assert line["loss"] != expected["loss"]
