"""Signals, really sent: every rank stops at the same step, saved, and goes on as if undisturbed."""

import json

import pytest
import torch

from lit_models.training.lineage import stop_reason, verify_run
from tests.distributed.launch import run
from tests.distributed.test_toy_devices import weights

SCRIPT = ["-m", "tests.distributed.toy_run"]
TWO = ["--devices", "2", "--strategy", "ddp"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(*SCRIPT, str(folder), "--fit_only").returncode == 0
    return weights(folder)


@pytest.mark.parametrize(
    ("name", "rank", "options"),
    [
        pytest.param("SIGTERM", 1, TWO, id="SIGTERM to rank 1 of ddp"),
        pytest.param("SIGUSR1", 0, ["--devices", "2", "--strategy", "fsdp"], id="SIGUSR1, fsdp"),
        pytest.param("SIGINT", 0, [], id="Ctrl-C on one device"),
    ],
)
def test_a_signal_to_one_rank_stops_all_at_one_step(tmp_path, undisturbed, name, rank, options):
    signalled = ["--signal", name, "--signal_at", "10", "--signal_rank", str(rank)]
    stopped = run(*SCRIPT, str(tmp_path), "--fit_only", *options, *signalled)
    assert stopped.returncode == 0, stopped.stdout
    assert stop_reason(tmp_path) in (name, "SIGTERM")  # rank 0 may know the decision alone
    *_, step, event = map(json.loads, (tmp_path / "ledger.jsonl").read_text().splitlines())
    assert 11 <= step["step"] == event["step"] <= 12
    assert run(*SCRIPT, str(tmp_path), "--fit_only", "--resume").returncode == 0
    verdict = verify_run(tmp_path)
    assert (verdict.findings, verdict.discarded, len(verdict.epochs)) == ([], [], 4)
    for parameter, value in weights(tmp_path).items():
        torch.testing.assert_close(value, undisturbed[parameter], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "options", "status"),
    [
        pytest.param("SIGTERM", [], 75, id="one device"),
        pytest.param("SIGINT", [], 130, id="Ctrl-C"),
        pytest.param("SIGUSR1", [], 75, id="a warning that is repeated to the end"),
        pytest.param(
            "SIGTERM",
            ["--trainer.devices=2", "--trainer.strategy=ddp_spawn"],
            75,
            id="ddp_spawn",
            marks=pytest.mark.soak,
        ),
        pytest.param(
            "SIGUSR1",
            ["--trainer.devices=2", "--trainer.strategy=ddp_spawn"],
            75,
            id="repeated to ddp_spawn",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_the_command_says_by_its_status_that_it_wants_to_be_started_again(
    tmp_path, name, options, status
):
    command = [
        *("-m", "tests.distributed.signalled", name, str(tmp_path / "ledger.jsonl")),
        *("fit", "--config", "occupation_coder/debug.yaml", "--trainer.max_epochs=2000"),
        *("--trainer.limit_train_batches=1.0", f"--trainer.default_root_dir={tmp_path}", *options),
    ]
    done = run(*command)
    assert done.returncode == status, done.stdout
    assert f"stopped by {name}; everything is saved" in done.stdout
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
