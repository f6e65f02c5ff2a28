"""`unisono submit` on a real SLURM: jobs are requeued, cancelled, fail, or wait for each other."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_models.commands.verify import verify_run
from lit_models.run_files import LEDGER, json_lines
from tests.distributed import slurm as cluster

pytestmark = pytest.mark.slow
TWO_TASKS = ["--config=toy.yaml", "--tasks-per-node=2", "--time-limit=30"]
MINUTE = ["--time-limit=1", "--save-ahead-s=5", "--trainer.max_epochs=9"]
NUM_STEPS = 7  # in an epoch of the toy
FAILS = """
  - class_path: tests.distributed.breaks.FailsAt
    init_args: {step: 3, how: raise}
"""
CHAIN = """
to: chain
stages:
  first: {verb: fit, config: toy.yaml}
  second: {verb: test, checkpoint: first, config: toy.yaml}
"""


@pytest.fixture(scope="module", autouse=True)
def minute(slurm: cluster.Environ, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A job that exceeds its limit of a minute; it runs while the first tests do."""
    folder = tmp_path_factory.mktemp("minute")
    cluster.write_config(folder, step_s=1.2)
    (job,) = cluster.submitted(folder, slurm, *TWO_TASKS, *MINUTE)
    return folder, job


def assert_whole(run: Path, num_epochs: int) -> None:
    """Assert that each epoch used every sample once, and that there is one curve."""
    verdict = verify_run(run)
    assert (verdict.findings, verdict.discarded) == ([], [])
    assert len(verdict.epochs) == num_epochs
    curve = EventAccumulator(str(run / "tensorboard")).Reload().Scalars("train/loss")
    assert [point.step for point in curve] == sorted({point.step for point in curve})
    assert len(curve) >= num_epochs * NUM_STEPS - 1


def test_a_cancelled_job_stays_cancelled_and_its_run_goes_on_on_two_nodes(slurm, tmp_path) -> None:
    cluster.write_config(tmp_path, step_s=0.5)
    (job,) = cluster.submitted(tmp_path, slurm, *TWO_TASKS, "--trainer.max_epochs=3")
    run = tmp_path / f"runs/toy_{job}"
    ledger = run / LEDGER
    cluster.wait_for(lambda: len(json_lines(ledger)) > 3, lambda: cluster.logs(tmp_path))
    cluster.slurm_says(slurm, "scancel", job)
    facts = cluster.wait_for_end(job, slurm)
    assert (facts["JobState"], facts["Restarts"]) == ("CANCELLED", "0"), cluster.logs(tmp_path)
    cluster.wait_for(
        lambda: "stopped by SIGTERM; everything is saved" in cluster.logs(tmp_path), "not saved"
    )
    root = f"--trainer.default_root_dir=runs/toy_{job}"
    again = ["--config=toy.yaml", "--nodes=2", "--time-limit=30", "--trainer.max_epochs=3", root]
    (job,) = cluster.submitted(tmp_path, slurm, *again)
    assert cluster.wait_for_end(job, slurm)["JobState"] == "COMPLETED", cluster.logs(tmp_path)
    assert_whole(run, 3)
    facts = json.loads((run / "topology.json").read_text())
    assert (facts["world_size"], facts["num_nodes"]) == (2, 2)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [run.name]


def test_a_rank_that_fails_ends_the_job_which_is_not_requeued(slurm, tmp_path) -> None:
    cluster.write_config(tmp_path, 0.0, FAILS)
    (job,) = cluster.submitted(tmp_path, slurm, *TWO_TASKS)
    facts = cluster.wait_for_end(job, slurm)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0"), cluster.logs(tmp_path)
    assert "a word that no dictionary has" in cluster.logs(tmp_path)


def test_a_stage_waits_for_the_one_before_it_however_often_that_is_requeued(slurm, tmp_path):
    """The warning comes while Python starts, long before the training can handle it."""
    cluster.write_config(tmp_path, 0.0)
    (tmp_path / "chain.yaml").write_text(CHAIN)
    first, second = cluster.submitted(
        tmp_path, slurm, "--config=chain.yaml", "--change.first.devices=2", "--time-limit=30"
    )
    cluster.wait_for(
        lambda: f"{first}.0" in cluster.slurm_says(slurm, "squeue", "-h", "-s"), "no step"
    )
    cluster.slurm_says(slurm, "scancel", "--signal=USR1", "--batch", first)
    facts = cluster.wait_for_end(first, slurm)
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "1"), cluster.logs(tmp_path)
    assert_whole(tmp_path / "chain/first", 1)
    assert cluster.wait_for_end(second, slurm)["JobState"] == "COMPLETED", cluster.logs(tmp_path)
    assert "stage second is complete" in cluster.logs(tmp_path)


def test_a_job_that_reaches_its_time_limit_is_requeued_and_finishes(slurm, minute) -> None:
    folder, job = minute
    facts = cluster.wait_for_end(job, slurm, 300, folder)
    assert facts["JobState"] == "COMPLETED", cluster.logs(folder)
    assert int(facts["Restarts"]) >= 1
    assert f"job {job} ended with status 75 and is requeued" in cluster.logs(folder)
    assert_whole(folder / f"runs/toy_{job}", 9)
