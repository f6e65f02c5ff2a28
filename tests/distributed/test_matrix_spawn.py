"""The column of ddp_spawn in the matrix: families on two processes, two of them on four.

Each run starts its own processes, for seconds: training alone is compared. What evaluates and
predicts is that of ddp, which `test_matrix.py` holds beside one device; test_toy_devices.py and
test_occupation_devices.py do both by ddp_spawn.
"""

import json
from pathlib import Path

import pytest
import torch

from lit_models.training.lineage import verify_run
from tests.distributed.families import FAMILIES
from tests.distributed.launch import run
from tests.distributed.test_matrix import (
    GLOBAL_BATCH,
    IN_FULL,
    UNCUT,
    assert_same_steps,
    weights,
    write_tables,
)

pytestmark = pytest.mark.slow
Cell = tuple[str, int, int]  # family, processes, accumulation
# One of each kind of network and data; the other families are in the soak.
FIRST = ("occupation_coder", "causal_lm", "consistency_lens", "retriever")
CELLS: list[Cell] = [(family, 2, 1 if family in UNCUT else 4) for family in FIRST]
CELLS += [(family, 4, 1) for family in IN_FULL]
OTHER_CELLS: list[Cell] = [(family, 2, 4) for family in FAMILIES if family not in FIRST]


def train(folder: Path, cells: list[Cell]) -> Path:
    """Run cells, and their families on one device."""
    write_tables(folder)
    jobs = []
    for family, processes, accumulation in [*{(c[0], 1, 1): None for c in cells}, *cells]:
        micro = -(-GLOBAL_BATCH // processes // accumulation)
        strategy = {"strategy": "ddp_spawn" if processes > 1 else "auto", "devices": processes}
        data = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro}
        name = f"{family}-{processes}"
        jobs.append({"name": name, "family": family, "data": data, "only_fits": True, **strategy})
    (folder / "jobs.json").write_text(json.dumps(jobs))
    done = run(
        "-m", "tests.distributed.jobs", str(folder), str(folder / "jobs.json"), timeout_s=400
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("spawn"), CELLS)


@pytest.fixture(scope="module")
def other_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("others"), OTHER_CELLS)


def assert_as_one_device(runs: Path, cell: Cell) -> None:
    one, other = runs / f"{cell[0]}-1", runs / f"{cell[0]}-{cell[1]}"
    assert_same_steps(one, other)
    for name, value in weights(other).items():
        torch.testing.assert_close(value, weights(one)[name], rtol=1e-8, atol=1e-10)
    first = json.loads((other / "ledger.jsonl").read_text().partition("\n")[0])
    assert first["world_size"] == cell[1]
    assert verify_run(other).faults == []


def name_of(cell: Cell) -> str:
    return "-".join(map(str, cell))


@pytest.mark.parametrize("cell", CELLS, ids=name_of)
def test_spawned_processes_train_as_one_device(runs: Path, cell: Cell) -> None:
    assert_as_one_device(runs, cell)


@pytest.mark.soak
@pytest.mark.parametrize("cell", OTHER_CELLS, ids=name_of)
def test_so_do_those_of_the_other_families(other_runs: Path, cell: Cell) -> None:
    assert_as_one_device(other_runs, cell)
