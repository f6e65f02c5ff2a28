"""The occupation coder by the command line: one device and several give the same everything."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from lit_models.training.checkpoints import read_checkpoint
from lit_models.training.lineage import verify_run
from tests.distributed.launch import ROOT, run
from tests.toy import ledger_lines

STEPS = 30
TRADES = {
    "baker": "77610",
    "smith": "83110",
    "weaver": "75400",
    "sailor": "98135",
    "clerk": "39310",
}
PLACES = ["village", "town", "ship", "old", "young", "master", "second", "royal", "poor"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Return a folder with train.csv, some records of two codes, and mine.csv to be coded."""
    folder = tmp_path_factory.mktemp("tables")
    rows = [
        (f"{place} {trade}{' and ' + other if other else ''} {number}", code, TRADES.get(other, ""))
        for number in range(3)
        for place in PLACES
        for trade, code in TRADES.items()
        for other in ("", *(["clerk"] if place == "town" and trade != "clerk" else []))
    ]
    for name in ("train.csv", "mine.csv"):
        with open(folder / name, "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["job", "first", "second"])
            writer.writerows(rows if name == "train.csv" else [*rows[:90], *rows[:11]])
    return folder


def arguments(verb, folder, tables, *options):
    return [
        *("-m", "lit_models", verb, "--config", "occupation_coder/debug.yaml"),
        f"--trainer.default_root_dir={folder}",
        f"--data.train_files={tables / 'train.csv'}",
        "--data.columns={text: job, codes: [first, second]}",
        "--model.loss.linear.num_features=512",  # solved by each process for itself
        *("--trainer.max_epochs=9", f"--trainer.max_steps={STEPS}"),
        *("--trainer.limit_train_batches=1.0", "--trainer.limit_val_batches=1.0"),
        *("--trainer.limit_test_batches=1.0", "--trainer.limit_predict_batches=1.0"),
        *options,
    ]


def fit(folder, tables, *options):
    done = run(*arguments("fit", folder, tables, *options))
    assert done.returncode == 0, done.stdout
    return ledger_lines(folder)


def devices(number, strategy="ddp"):
    return [f"--trainer.devices={number}", f"--trainer.strategy={strategy}"] if number > 1 else []


def assert_same_run(left, right, tolerance):
    assert len(left) == len(right) == STEPS
    for a, b in zip(left, right, strict=True):
        assert (a["digest"], a["samples"], a["targets"]) == (
            b["digest"],
            b["samples"],
            b["targets"],
        )
        assert a["loss"] == pytest.approx(b["loss"], rel=tolerance)


@pytest.fixture(scope="module")
def one(tables, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "one"
    return folder, fit(folder, tables)


@pytest.mark.soak
def test_two_devices_train_as_one_does(one, tables, tmp_path):
    assert_same_run(one[1], fit(tmp_path / "two", tables, *devices(2)), 1e-5)


def evaluate(tables, folder, trained, number):
    """Return the test metrics and the bytes of the coded table of one number of devices."""
    best = f"--ckpt_path={trained / 'checkpoints' / 'best.ckpt'}"
    coded = folder / "coded.csv"
    files = [f"--data.predict_files={tables / 'mine.csv'}", f"--data.predict_output={coded}"]
    done = run(*arguments("test", folder, tables, best, *devices(number)))
    assert done.returncode == 0, done.stdout
    with open(folder / "metrics.csv", newline="") as file:
        *_, last = csv.DictReader(file)
    done = run(*arguments("predict", folder, tables, best, *files, *devices(number)))
    assert done.returncode == 0, done.stdout
    return {k: v for k, v in last.items() if k.startswith("test/")}, coded.read_bytes()


@pytest.mark.soak
def test_metrics_count_alike_and_predictions_are_identical_on_1_2_and_3_devices(
    one, tables, tmp_path
):
    results = []
    for number in (1, 2, 3):
        (tmp_path / str(number)).mkdir()
        results.append(evaluate(tables, tmp_path / str(number), one[0], number))
    metrics, coded = results[0]
    assert coded.count(b"\n") == 102
    for other_metrics, other_coded in results[1:]:
        assert other_coded == coded
        for name in ("test/num_records", "test/num_exact_match"):
            assert other_metrics[name] == metrics[name] != ""
        for name, value in metrics.items():
            near = pytest.approx(float(value), rel=1e-5, abs=1e-7, nan_ok=True)
            assert float(other_metrics[name]) == near


@pytest.fixture(scope="module")
def undisturbed(tables, tmp_path_factory):
    """Return a function: precision -> folder of a whole run on one device, made once."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def of(precision):
        if not (folder / precision).exists():
            fit(folder / precision, tables, f"--trainer.precision={precision}")
        return folder / precision

    return of


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [
        pytest.param("32-true", 1e-5, marks=pytest.mark.soak),
        pytest.param("64-true", 1e-10, marks=pytest.mark.soak),
    ],
)
def test_losses_agree_over_strategies_and_accumulation(
    tables, undisturbed, tmp_path, precision, tolerance
):
    exact = f"--trainer.precision={precision}"
    expected = ledger_lines(undisturbed(precision))
    for name, options in {
        "ddp": devices(2),
        "spawn": devices(2, "ddp_spawn"),
        "accumulated": ["--trainer.accumulate_grad_batches=4"],
    }.items():
        assert_same_run(expected, fit(tmp_path / name, tables, exact, *options), tolerance)


def kill_at(step, folder, tables, *options):
    """Run until the ledger shows a step, then SIGKILL every process of the run."""
    every = "--trainer.callbacks+=lit_models.training.LastCheckpoint"
    saving = [every, "--trainer.callbacks.every_n_steps=4"]
    process = subprocess.Popen(
        [sys.executable, *arguments("fit", folder, tables, *options), *saving],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    ledger = Path(folder) / "ledger.jsonl"
    deadline = time.monotonic() + 120
    while not (ledger.exists() and f'"step": {step},' in ledger.read_text()):
        assert process.poll() is None, "it ended before the step"
        assert time.monotonic() < deadline, "it never came to the step"
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("before", "after", "precision", "tolerance"),
    [
        pytest.param(1, 2, "32-true", 1e-5, marks=pytest.mark.soak),
        pytest.param(1, 2, "64-true", 1e-8, marks=pytest.mark.slow),
        pytest.param(2, 1, "64-true", 1e-8, marks=pytest.mark.soak),
    ],
)
def test_a_killed_run_resumed_on_other_devices_is_the_uninterrupted_run(
    tables, undisturbed, tmp_path, before, after, precision, tolerance
):
    exact = f"--trainer.precision={precision}"
    expected = ledger_lines(undisturbed(precision))
    folder = tmp_path / "cut"
    kill_at(14, folder, tables, exact, *devices(before))
    resumed = fit(folder, tables, exact, "--ckpt_path=auto", *devices(after))
    assert_same_run(expected, resumed, 1e-5)
    verdict = verify_run(folder)
    assert verdict.faults == []
    assert verdict.attempts == [before, after]
    if precision == "64-true":
        whole = read_checkpoint(undisturbed(precision) / "checkpoints" / "last.ckpt")
        whole = whole["state_dict"]
        cut = read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]
        for name, value in whole.items():
            torch.testing.assert_close(cut[name], value, rtol=tolerance, atol=1e-10)
    assert json.loads((folder / "topology.json").read_text())["world_size"] == after
