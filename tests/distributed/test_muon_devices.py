"""Muon over strategies and devices: the same steps, and moments that go from one to the other."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_matrix import assert_same, run_jobs, weights
from tests.toy import ledger_lines

# The matrix moves language models by Muon on all strategies.
pytestmark = [pytest.mark.slow, pytest.mark.soak]


def job(name: str, strategy: str, **more: Any) -> dict[str, Any]:
    data = {"global_batch_size": 16}
    return {"name": name, "family": "muon", "strategy": strategy, "data": data, **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("muon")
    half = {"trainer": {"max_steps": 5}}
    first = {name: str(folder / name / "checkpoints" / "last.ckpt") for name in ("ddp-1", "fsdp-2")}
    run_jobs(folder, 1, [job("one", "ddp"), job("ddp-1", "ddp", **half)])
    sharded = {"sharding": {"sharded_checkpoint": True}}
    two = [
        job("ddp", "ddp"),
        job("fsdp", "fsdp"),
        job("fsdp-2", "fsdp", **half),
        job("shards", "fsdp", **sharded, **half),
        job("ddp-1 to fsdp-2", "fsdp", resume=first["ddp-1"]),
        job("shards to fsdp-2", "fsdp", resume=first["fsdp-2"].replace("fsdp-2", "shards")),
    ]
    run_jobs(folder, 2, two)
    run_jobs(folder, 1, [job("fsdp-2 to ddp-1", "ddp", resume=first["fsdp-2"])])
    return folder


@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_two_devices_move_the_weights_as_one_does(runs, name):
    assert_same(runs / "one", runs / name)


@pytest.mark.parametrize("name", ["ddp-1 to fsdp-2", "fsdp-2 to ddp-1", "shards to fsdp-2"])
def test_momentum_goes_on_under_another_strategy(runs, name):
    whole = ledger_lines(runs / "one")
    for expected, line in zip(whole[5:], ledger_lines(runs / name), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-10)
    for parameter, value in weights(runs / name).items():
        expected = weights(runs / "one")[parameter]
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)
