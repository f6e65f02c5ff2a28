"""The shared code through a plain Trainer: one device, two with ddp, two with ddp_spawn."""

import json

import pytest
import torch

from lit_models.training.checkpoints import read_checkpoint
from lit_models.training.lineage import verify_run
from tests.distributed.launch import run
from tests.toy import ledger_lines

RUNS = {
    "one": [],
    "ddp": ["--devices", "2", "--strategy", "ddp"],
    "ddp of Lightning": ["--devices", "2", "--strategy", "ddp", "--by_name"],
}
OTHERS = ["ddp", "ddp of Lightning"]


SPAWN = ["--devices", "2", "--strategy", "ddp_spawn", "--micro", "2"]


def run_toy(folder, options):
    done = run("-m", "tests.distributed.toy_run", str(folder), *options)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    run_toy(folder / "one", RUNS["one"])
    return folder / "one"


@pytest.fixture(scope="module")
def runs(one):
    for name, options in RUNS.items():
        if name != "one":
            run_toy(one.parent / name, options)
    return one.parent


def weights(folder):
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def assert_same_training(one, other):
    for left, right in zip(ledger_lines(one), ledger_lines(other), strict=True):
        for key in ("step", "digest", "samples", "targets", "learning_rate"):
            assert left[key] == right[key]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-10)
        assert left["grad_norm"] == pytest.approx(right["grad_norm"], rel=1e-10)
    expected = weights(one)
    for name, value in weights(other).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-12)


def assert_same_evaluation(one, other):
    expected = json.loads((one / "test.json").read_text())
    result = json.loads((other / "test.json").read_text())
    assert result["test/count"] == expected["test/count"] == 21
    assert result["test/loss"] == pytest.approx(expected["test/loss"], rel=1e-10)
    for name in ("toy.csv", "errors-val.csv", "errors-test.csv"):
        assert (other / name).read_bytes() == (one / name).read_bytes()


@pytest.mark.parametrize("other", OTHERS)
def test_ledger_and_weights_do_not_depend_on_the_devices(runs, other):
    assert_same_training(runs / "one", runs / other)


@pytest.mark.parametrize("other", OTHERS)
def test_metrics_count_each_sample_once_and_predictions_are_identical(runs, other):
    assert_same_evaluation(runs / "one", runs / other)


@pytest.mark.slow
def test_spawned_processes_train_and_evaluate_as_one_does(one, tmp_path):
    run_toy(tmp_path / "spawn", SPAWN)
    assert_same_training(one, tmp_path / "spawn")
    assert_same_evaluation(one, tmp_path / "spawn")


@pytest.mark.parametrize("name", RUNS)
def test_each_run_proves_that_it_used_each_sample_once(runs, name):
    verdict = verify_run(runs / name)
    assert (verdict.findings, len(verdict.epochs)) == ([], 4)
