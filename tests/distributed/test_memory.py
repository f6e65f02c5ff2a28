"""A rehearsal under ddp and fsdp: the rank with the least memory decides, and no trace is left."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.test_matrix import facts, run_world, weights
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp")
FEW, MANY = 40, 80  # the longest row has 9 positions: 4 rows fit, or all 8 of a device's share


def job(family: str, strategy: str, name: str, data: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = {"global_batch_size": 16, **data}
    named = {"name": f"{family}-{strategy}-{name}", "family": family, "strategy": strategy}
    return {**named, "data": data, "trainer": {"max_steps": 5}, **more}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    jobs = []
    for strategy in STRATEGIES:
        for family in ("toy", "tied"):
            jobs.append(job(family, strategy, "given", {"micro_batch_size": 4}))
            jobs.append(job(family, strategy, "auto", {}, positions=[MANY, FEW]))
    run_world(folder, 2, jobs)
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("family", "found"), [("toy", 4), ("tied", 4)])
@pytest.mark.soak
def test_the_run_is_bit_for_bit_that_of_the_number_that_was_found(runs, family, found, strategy):
    auto, given = (runs / f"{family}-{strategy}-{name}" for name in ("auto", "given"))
    assert facts(auto)["micro_batch_size"] == facts(given)["micro_batch_size"] == found
    for a, b in zip(ledger_lines(auto), ledger_lines(given), strict=True):
        own = {"seconds": 0, "hash": ""}  # the hash covers the seconds too
        assert {**a, **own} == {**b, **own}
    torch.testing.assert_close(weights(auto), weights(given), rtol=0, atol=0)
