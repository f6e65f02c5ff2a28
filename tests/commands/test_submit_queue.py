"""What SLURM's commands answer to `unisono submit`: they refuse, say never, or say nothing."""

from pathlib import Path

import pytest

from lit_models.scheduling import queue
from lit_models.scheduling.resources import NODE_GPUS
from tests.commands.test_submit import Unisono
from tests.commands.test_submit_chain import chain_call, submitted  # noqa: F401

# Takes longer than a test waits, and leaves no process that would hold its output open.
SILENT = "#!/bin/bash\nexec sleep 20\n"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "ANSWERS_WITHIN_S", 0.2)


def test_a_job_that_never_starts_is_named_at_once(chain) -> None:
    Path("reason.txt").write_text("PartitionTimeLimit\n")
    status, output = chain("--only=first")
    assert status == 0
    assert "SLURM took the job 70 and will not start it, for PartitionTimeLimit" in output
    assert "PartitionTimeLimit" not in "".join(submitted())


def test_where_sbatch_refuses_one_job_none_is_left(chain) -> None:
    Path("most.txt").write_text("2")
    status, output = chain()
    assert status == 1
    assert "sbatch refuses the job: sbatch: error: no such account. The script is" in output
    assert "The jobs before it are taken back: 70, 71." in output
    assert Path("cancelled").read_text() == "70 71\n"


def test_where_sinfo_is_silent_the_usual_number_is_taken_and_said(
    chain,
    impatient: None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    Path("sinfo").write_text(SILENT)
    Path("sinfo").chmod(0o755)
    assert queue.gpus_per_machine(None) == NODE_GPUS
    said = " ".join(capfd.readouterr().err.split())
    assert "warning: sinfo did not answer within 0.2 s: 8 GPUs on a node are assumed" in said


def test_where_squeue_is_silent_the_job_is_in_the_queue_all_the_same(chain, impatient) -> None:
    Path("squeue").write_text(SILENT)
    status, output = chain("--only=first")
    assert (status, len(submitted())) == (0, 1)
    assert "squeue did not answer within 0.2 s. The job 70 is in the queue; whether" in output
    assert "`squeue --jobs=70`" in output


def test_without_sbatch_the_way_out_is_named(
    unisono: Unisono, toy_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    status, output = unisono("submit", "--config", "toy.yaml")
    assert status == 1
    assert "there is no sbatch on this machine" in " ".join(output.split())
    assert Path("jobs/toy/torchrun.sh").exists()
