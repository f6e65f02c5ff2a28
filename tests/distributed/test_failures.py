"""Runs that end in any way: all processes end soon and leave nothing, and after a failure one
screen names the rank and the cause."""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lit_models.run_files import damage
from tests.conftest import TOY
from tests.distributed.launch import (
    PATIENCE_S,
    ended,
    in_world,
    processes_of,
    run_clean,
    started,
    unisono_here,
)

pytestmark = pytest.mark.slow
BREAKS = """
  callbacks:
    class_path: tests.distributed.breaks.FailsAt
    init_args: {{step: 5, how: {}}}
"""
TWO_RANKS = """
  strategy:
    class_path: lit_models.training.strategies.ReplicatedStrategy
    init_args: {{timeout: "0:00:{:02}"}}
"""
DDP = ("--trainer.devices=2", "--trainer.strategy=ddp")
SPAWN = ("--trainer.devices=2", "--trainer.strategy=ddp_spawn")
MOST_LINES = 24


def training(folder: Path, how: str | None, *options: str, more: str = "") -> list[str]:
    """Return the command line of a toy training in which one rank fails after five steps."""
    (folder / "toy.yaml").write_text(TOY + (BREAKS.format(how) if how else "") + more)
    run = f"--trainer.default_root_dir={folder / 'run'}"
    return ["fit", "--config", str(folder / "toy.yaml"), run, *options]


def failed(
    arguments: list[str], meanwhile: Callable[[subprocess.Popen], None] | None = None
) -> str:
    """Return the output of a run that failed and left no process, port or memory."""
    done = run_clean("-m", "lit_models", *arguments, meanwhile=meanwhile)
    assert done.returncode == 1, done.stdout
    return done.stdout


def test_a_rank_that_raises_ends_all_and_one_message_names_the_samples(tmp_path: Path) -> None:
    output = failed(training(tmp_path, "raise", *DDP, "--data.num_workers=1"))
    report = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (report["rank"], report["verb"], report["epoch"]) == (1, "fit", 0)
    assert report["error"] == "LookupError: a word that no dictionary has"
    ids = ", ".join(map(str, report["sample_ids"]))
    place = f"rank 1, fit, epoch 0, step {report['step']}, samples {ids}."
    again = f"`unisono replay {tmp_path / 'run'} --step {report['step']}` rebuilds"
    shown = "".join(output.split())  # a long path is broken over two lines
    assert shown.count("".join(f"{place} {again}".split())) == 1, output
    assert "error on process 1 of node 0: LookupError: " in output
    assert "Connection" not in output  # an error of the other rank


def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    output = failed(training(tmp_path, "kill", *DDP))
    shown = output[output.index("error: ") :]
    first = "the connection to another rank is lost; rank 1 was ended by SIGKILL. What is saved"
    place = r"error: rank 0, fit, epoch 0, step \d: "
    assert re.match(f"{place}{first}", " ".join(shown.split())), output
    assert "Traceback" not in output
    assert len(shown.splitlines()) <= MOST_LINES


def test_a_rank_that_hangs_ends_and_leaves_its_stack(tmp_path: Path) -> None:
    hangs = training(tmp_path, "hang", "--trainer.devices=2", more=TWO_RANKS.format(6))
    in_world(2, unisono_here, *hangs, status=1)
    stacks = [(tmp_path / "run" / "stacks" / f"rank-{rank}.txt").read_text() for rank in (0, 1)]
    assert '"rank": 1, "verb": "fit", "epoch": 0, "step": 5' in stacks[1]
    assert "in hang_for_ever" in stacks[1]
    assert "in hang_for_ever" not in stacks[0]
    assert '"rank": 0' in stacks[0]


def test_a_frozen_rank_is_named_by_the_other_one(tmp_path: Path) -> None:
    more = TWO_RANKS.format(30)  # while the other rank starts
    output = failed(training(tmp_path, "stop", "--trainer.devices=2", more=more))
    shown = " ".join(output.split())
    lost = r"error: rank 0, fit, epoch 0, step \d: the connection to another rank is lost;"
    assert re.search(rf"{lost} rank 1 \(process \d+\) is stopped, as by SIGSTOP\.", shown), output
    assert "rank 0 made no progress" not in shown
    assert not (tmp_path / "run" / "failure.json").exists()  # no rank failed


def test_a_killed_loader_worker_is_named_as_the_cause(tmp_path: Path) -> None:
    output = failed(training(tmp_path, "lose a worker", "--data.num_workers=1"))
    shown = " ".join(output.split())
    assert re.search(r"error: RuntimeError: DataLoader worker \(pid \d+\) is killed", shown)
    place = "rank 0, fit, epoch 0, step 5: a process that loads data was killed, most often because"
    assert place in shown, output
    assert "fewer data.num_workers" in shown
    assert "free space" not in shown
    assert "the disk is full" not in shown
    report = json.loads((tmp_path / "run" / "failure.json").read_text())
    assert (report["rank"], report["step"]) == (0, 5)


def test_a_second_ctrl_c_ends_a_run_that_hangs(tmp_path: Path) -> None:
    ledger = tmp_path / "run" / "ledger.jsonl"

    def interrupt_twice(process: subprocess.Popen) -> None:
        end = time.monotonic() + PATIENCE_S
        while not ledger.exists() or ledger.read_text().count("\n") < 5:
            assert time.monotonic() < end, "the run did not start"
            time.sleep(0.1)
        for _ in range(2):
            time.sleep(1.5)
            os.killpg(process.pid, signal.SIGINT)

    arguments = training(tmp_path, "hang", *DDP, "--data.num_workers=1")
    done = run_clean("-m", "lit_models", *arguments, meanwhile=interrupt_twice)
    assert done.returncode != 0, done.stdout


def test_an_error_in_a_spawned_process_is_one_screen_too(tmp_path: Path) -> None:
    schedule = "--model.lr_scheduler=lit_models.training.optim.WarmupDecay"
    too_long = "--model.lr_scheduler.warmup=5000"  # only processes with the plan know this
    output = failed(training(tmp_path, None, *SPAWN, schedule, too_long))
    assert "warmup is 5000 steps, but the run has" in output
    assert "Traceback" not in output


def test_a_port_that_is_taken_ends_all_and_is_one_screen(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        process, mark = started(
            "-m", "lit_models", *training(tmp_path, None, *DDP), MASTER_PORT=str(port)
        )
        try:
            output, _ = process.communicate(timeout=PATIENCE_S)
            assert processes_of(mark) == []
        finally:
            ended(process, mark)
    assert process.returncode == 1
    assert output.count(f"port {port} is taken by another program") == 1, output
    assert "Traceback" not in output, output


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 kB, whose disk a run really fills."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_stops_the_run_and_keeps_a_sound_checkpoint(toy_config, small_disk):
    options = [f"--trainer.default_root_dir={small_disk / 'run'}", "--trainer.max_epochs=200"]
    output = in_world(1, unisono_here, "fit", "--config", "toy.yaml", *options, status=1)
    shown = " ".join(output.split())
    assert "Traceback" not in output
    assert "No space left on device" in shown
    assert "free some space" in shown or "free space" in shown
    kept = list((small_disk / "run" / "checkpoints").glob("*.ckpt"))
    assert kept
    assert all(damage(path) is None for path in kept)
