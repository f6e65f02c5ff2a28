"""One rank fails, is killed or hangs: all end soon, and one of them says where."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.conftest import TOY
from tests.distributed.launch import run

SCRIPT = ["-m", "tests.distributed.toy_run"]
TWO = ["--devices", "2", "--strategy", "ddp"]
pytestmark = pytest.mark.slow


def test_a_rank_that_raises_ends_all_and_one_message_names_the_samples(tmp_path):
    done = run(*SCRIPT, str(tmp_path), *TWO, "--fail_at", "9", "--fail_how", "raise")
    assert done.returncode != 0
    report = json.loads((tmp_path / "failure.json").read_text())
    assert (report["rank"], report["verb"], report["epoch"]) == (1, "fit", 1)
    assert report["error"] == "LookupError: a word that no dictionary has"
    ids = ", ".join(map(str, report["sample_ids"]))
    place = f"rank 1, fit, epoch 1, step {report['step']}, samples {ids}."
    again = f"`unisono replay {tmp_path} --step {report['step']}` rebuilds"
    shown = "".join(done.stdout.split())  # a long path is broken over two lines
    assert shown.count("".join(f"{place} {again}".split())) == 1, done.stdout
    assert "Connection" not in done.stdout  # what the other rank heard


def test_a_killed_rank_ends_the_others(tmp_path):
    begin = time.monotonic()
    done = run(*SCRIPT, str(tmp_path), *TWO, "--kill_at", "9")
    assert done.returncode != 0
    assert time.monotonic() - begin < 60  # most of it is the start of two processes
    shown = " ".join(done.stdout[done.stdout.index("error: ") :].split())
    first = "the connection to another rank is lost; rank 1 was ended by SIGKILL. What is saved"
    assert re.match(f"error: rank 0, fit, epoch 1, step 10: {first}", shown), done.stdout
    assert "Traceback" not in done.stdout
    assert len(done.stdout[done.stdout.index("error: ") :].splitlines()) <= 24


def test_a_rank_that_hangs_ends_and_leaves_its_stack(tmp_path):
    hanging = ["--fail_at", "9", "--fail_how", "hang", "--timeout_s", "15"]
    done = run(*SCRIPT, str(tmp_path), *TWO, *hanging, timeout_s=90)
    assert done.returncode != 0
    stacks = [(tmp_path / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert '"rank": 1, "verb": "fit", "epoch": 1, "step": 9' in stacks[1]
    assert "in hang_for_ever" in stacks[1]
    assert "in hang_for_ever" not in stacks[0]
    assert '"rank": 0' in stacks[0]


BREAKS = """
  default_root_dir: {folder}
  callbacks:
    class_path: tests.distributed.toy_run.FailsAt
    init_args: {{step: 5, how: {how}}}
"""
TWO_RANKS = """
  devices: 2
  strategy:
    class_path: lit_models.training.strategies.ReplicatedStrategy
    init_args: {timeout: "0:00:15"}
"""


def failed(tmp_path: Path, how: str, more: str, *options: str) -> str:
    """Return the output of a `unisono fit` in which something really breaks."""
    config = tmp_path / "toy.yaml"
    config.write_text(
        TOY.replace("  devices: 1\n", "") + BREAKS.format(folder=tmp_path / "run", how=how) + more
    )
    done = run("-m", "lit_models", "fit", "--config", str(config), *options, timeout_s=120)
    assert done.returncode == 1, done.stdout
    return " ".join(done.stdout.split())


def test_of_a_frozen_rank_the_other_one_says_that_it_is_frozen(tmp_path: Path) -> None:
    output = failed(tmp_path, "stop", TWO_RANKS)
    lost = r"error: rank 0, fit, epoch 0, step \d: the connection to another rank is lost;"
    assert re.search(rf"{lost} rank 1 \(process \d+\) is stopped, as by SIGSTOP\.", output), output
    assert "rank 0 made no progress" not in output
    assert not (tmp_path / "run" / "failure.json").exists()  # nobody failed


def test_a_loader_worker_that_is_killed_is_told_as_that(tmp_path: Path) -> None:
    output = failed(tmp_path, "lose a worker", "  devices: 1\n", "--data.num_workers=1")
    assert re.search(r"error: RuntimeError: DataLoader worker \(pid \d+\) is killed", output)
    place = "rank 0, fit, epoch 0, step 5: a process that loads data was killed, most often because"
    assert place in output, output
    assert "fewer data.num_workers" in output
    assert "free space" not in output
    assert "the disk is full" not in output
    report = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (report["rank"], report["step"]) == (0, 5)
