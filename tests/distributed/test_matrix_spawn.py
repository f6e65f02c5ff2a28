"""The column of ddp_spawn in the matrix: one family of each kind on two processes, one on four.

Training alone is compared: evaluation and prediction are those of ddp, and test_toy_devices.py does
both by ddp_spawn.
"""

import json
from pathlib import Path

import pytest
import torch

from lit_models.training.lineage import verify_run
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
FIRST = ("occupation_coder", "causal_lm", "consistency_lens", "retriever")
CELLS: list[Cell] = [(family, 2, 1 if family in UNCUT else 4) for family in FIRST]
CELLS += [(family, 4, 1) for family in IN_FULL]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cells, and their families on one device."""
    folder = tmp_path_factory.mktemp("spawn")
    write_tables(folder)
    jobs = []
    for family, processes, accumulation in [*((family, 1, 1) for family in FIRST), *CELLS]:
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


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: "-".join(map(str, cell)))
def test_spawned_processes_train_as_one_device(runs: Path, cell: Cell) -> None:
    one, other = runs / f"{cell[0]}-1", runs / f"{cell[0]}-{cell[1]}"
    assert_same_steps(one, other)
    for name, value in weights(other).items():
        torch.testing.assert_close(value, weights(one)[name], rtol=1e-8, atol=1e-10)
    first = json.loads((other / "ledger.jsonl").read_text().partition("\n")[0])
    assert first["world_size"] == cell[1]
    assert verify_run(other).faults == []
