"""The column of ddp_spawn in the matrix: one family of each kind on two processes.

All train; one also tests and predicts, and each of these stages starts new processes.
"""

from pathlib import Path
from typing import Any

import pytest

from lit_models.commands.verify import verify_run
from tests.distributed.jobs import run_jobs
from tests.distributed.launch import in_world
from tests.distributed.test_matrix import GLOBAL_BATCH, assert_same, write_tables
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
EVALUATED = "toy"
FAMILIES = (EVALUATED, "occupation_coder", "consistency_lens")


def job(family: str, processes: int, accumulation: int) -> dict[str, Any]:
    micro = GLOBAL_BATCH // processes // accumulation
    return {
        **{"name": f"{family}-{processes}", "family": family, "devices": processes},
        "strategy": "ddp_spawn" if processes > 1 else "auto",
        "data": {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro},
        "stages": ("test", "prediction") if family == EVALUATED else (),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spawn")
    write_tables(folder)
    jobs = [job(family, *way) for way in ((1, 1), (2, 4)) for family in FAMILIES]
    in_world(1, run_jobs, folder, jobs)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_spawned_processes_learn_as_one_device(runs: Path, family: str) -> None:
    one, two = runs / f"{family}-1", runs / f"{family}-2"
    assert_same(one, two)
    assert ledger_lines(two)[0]["world_size"] == 2
    assert verify_run(two).faults == []
