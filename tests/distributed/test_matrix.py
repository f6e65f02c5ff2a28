"""Level A over families x {1, 2, 4 processes} x strategies x accumulation, and small sets.

All runs of one world share its processes: they start once, by torchrun.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_models.training.checkpoint import read_checkpoint
from lit_models.training.lineage import verify_run
from tests.distributed.families import FAMILIES, occupation_table, story_files, text_files
from tests.distributed.jobs import STEPS
from tests.distributed.launch import run
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
GLOBAL_BATCH = 16
SMALL_SETS = (1, 2, 7, 21)


def run_jobs(folder: Path, num_processes: int, jobs: list[dict[str, Any]]) -> None:
    """Run jobs in one world of processes, and fail with its output."""
    path = folder / f"jobs-{num_processes}.json"
    path.write_text(json.dumps(jobs))
    if not (folder / "occupations.csv").exists():
        occupation_table(folder / "occupations.csv")
        text_files(folder)
        story_files(folder)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}"]
    script = ["-m", "tests.distributed.jobs", str(folder), str(path)]
    done = run("-m", *launcher, *script, timeout_s=400)
    assert done.returncode == 0, done.stdout[-4000:]


def matrix_jobs(num_processes: int) -> list[dict[str, Any]]:
    jobs = []
    for family in FAMILIES:
        for strategy in ("ddp", "fsdp"):
            for accumulation in (1, 4):
                micro = GLOBAL_BATCH // num_processes // accumulation
                data = {"global_batch_size": GLOBAL_BATCH, "micro_batch_size": micro}
                name = f"{family}-{num_processes}-{strategy}-{accumulation}"
                jobs.append({"name": name, "family": family, "strategy": strategy, "data": data})
    return jobs


def small_jobs(num_processes: int) -> list[dict[str, Any]]:
    jobs = []
    for strategy in ("ddp", "fsdp"):
        for rows in SMALL_SETS:
            data = {"num_samples": rows, "num_evaluated": rows, "global_batch_size": 8}
            name = f"rows{rows}-{num_processes}-{strategy}"
            job = {"name": name, "family": "toy", "strategy": strategy, "data": data}
            jobs.append({**job, "trainer": {"max_steps": 3}, "save_every": 3})
    return jobs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("matrix")
    for num_processes in (1, 2, 3, 4):
        jobs = matrix_jobs(num_processes) if num_processes != 3 else []
        run_jobs(folder, num_processes, jobs + small_jobs(num_processes))
    return folder


def facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "facts.json").read_text())


def predictions(folder: Path) -> Path:
    (found,) = folder.glob("coded.*")
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def assert_same(one: Path, other: Path) -> None:
    """Assert level A in float64: the same steps, losses within 1e-10, weights within 1e-8."""
    left, right = ledger_lines(one), ledger_lines(other)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        for key in ("step", "digest", "samples", "targets", "learning_rate"):
            assert a[key] == b[key]
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-10)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-9)
    for name, value in weights(other).items():
        torch.testing.assert_close(value, weights(one)[name], rtol=1e-8, atol=1e-10)
    for stage in ("validation", "test"):
        expected, found = facts(one)[stage], facts(other)[stage]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert predictions(other).read_bytes() == predictions(one).read_bytes()


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_does_not_depend_on_devices_strategy_or_accumulation(
    runs, family, num_processes, strategy, accumulation
):
    one = runs / f"{family}-1-ddp-1"
    other = runs / f"{family}-{num_processes}-{strategy}-{accumulation}"
    assert len(ledger_lines(other)) == STEPS
    assert facts(other)["world_size"] == num_processes
    assert_same(one, other)
    assert verify_run(other).faults == []


@pytest.mark.parametrize("rows", SMALL_SETS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_sets_smaller_than_the_world_are_used_once(runs, rows, strategy, num_processes):
    one, other = runs / f"rows{rows}-1-ddp", runs / f"rows{rows}-{num_processes}-{strategy}"
    assert facts(other)["test"]["test/count"] == rows
    assert len(predictions(other).read_text().splitlines()) == rows
    assert_same(one, other)
