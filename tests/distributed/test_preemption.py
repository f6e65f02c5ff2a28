"""Real signals: every rank stops at the same step, saves, and resumes as if undisturbed."""

import signal
import time

import pytest
import torch

from lit_models.commands.verify import verify_run
from lit_models.run_files import stop_reason
from tests.distributed.breaks import SignalledAt
from tests.distributed.jobs import run_jobs
from tests.distributed.launch import PATIENCE_S, ended, in_world, started
from tests.distributed.test_matrix import weights
from tests.toy import json_rows

pytestmark = pytest.mark.slow
EPOCHS = {"max_epochs": 4, "max_steps": 28, "gradient_clip_val": None}
JOB = {"family": "toy", "strategy": "auto", "trainer": EPOCHS, "stages": ()}
JOB["last"] = {"every_n_steps": 4}
SPAWN = ["--trainer.devices=2", "--trainer.strategy=ddp_spawn"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    in_world(1, run_jobs, folder, [{**JOB, "name": "run"}])
    return weights(folder / "run")


@pytest.mark.parametrize(
    ("name", "rank", "devices", "strategy"),
    [("SIGTERM", 1, 2, "ddp"), ("SIGUSR1", 0, 2, "fsdp"), ("SIGINT", 0, 1, "auto")],
)
def test_a_signal_to_one_rank_stops_all_at_one_step(
    tmp_path, undisturbed, name, rank, devices, strategy
):
    job, run = {**JOB, "name": "run"}, tmp_path / "run"
    signalled = {**job, "strategy": strategy, "callbacks": [SignalledAt(10, name, rank)]}
    in_world(devices, run_jobs, tmp_path, [signalled])
    assert stop_reason(run) in (name, "SIGTERM")  # rank 0 alone may know the signal
    *_, step, event = json_rows(run / "ledger.jsonl")
    assert 11 <= step["step"] == event["step"] <= 12
    resume = str(run / "checkpoints" / "last.ckpt")
    in_world(1, run_jobs, tmp_path, [{**job, "resume": resume}])
    verdict = verify_run(run)
    assert (verdict.findings, verdict.discarded, len(verdict.epochs)) == ([], [], 4)
    torch.testing.assert_close(weights(run), undisturbed, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        pytest.param("SIGTERM", [], 75, id="one device"),
        pytest.param("SIGINT", [], 130, id="Ctrl-C"),
        pytest.param("SIGUSR1", [], 75, id="a warning that is repeated to the end"),
        pytest.param("SIGTERM", SPAWN, 75, id="ddp_spawn", marks=pytest.mark.soak),
        pytest.param("SIGUSR1", SPAWN, 75, id="repeated to ddp_spawn", marks=pytest.mark.soak),
    ],
)
def test_the_command_says_by_its_status_that_it_wants_to_be_started_again(
    tmp_path, name, options, status
):
    """SIGUSR1 repeats until the process has ended, as a job's script repeats it."""
    process, mark = started(
        *("-m", "lit_models", "fit", "--config", "occupation_coder/debug.yaml"),
        *("--trainer.max_epochs=2000", "--trainer.limit_train_batches=1.0"),
        *(f"--trainer.default_root_dir={tmp_path}", *options),
    )
    ledger, signum = tmp_path / "ledger.jsonl", signal.Signals[name]
    try:
        while not ledger.exists() or ledger.read_text().count("\n") < 6:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        process.send_signal(signum)
        while signum == signal.SIGUSR1 and process.poll() is None:
            process.send_signal(signum)
            time.sleep(0.02)
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        ended(process, mark)
    assert process.returncode == status, output
    assert f"stopped by {name}; everything is saved" in output
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
