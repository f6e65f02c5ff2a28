"""`unisono plan --rehearse`: each number of devices in a process of its own, and how it fails."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from lit_models.commands.plan import plan
from lit_models.errors import RUN, USAGE, UsageError
from lit_models.forecasting import isolated, orders
from lit_models.forecasting.orders import Order
from tests.toy import LitToy
from tests.training.test_local_ranks import is_running, wait_until

DATA = {
    "class_path": "tests.toy.ToyData",
    "init_args": {"num_samples": 80, "global_batch_size": 8},
}
TRAINER = {"accelerator": "cpu", "max_epochs": 1}
TOY = ["--data=tests.toy.ToyData", "--data.num_samples=80", "--data.global_batch_size=8"]
TOY += ["--trainer.accelerator=cpu", "--trainer.max_epochs=1", "--seed_everything=1"]
MEASURED = ("s per step", "efficiency", "min per epoch", "h in all")  # seconds are never the same
WARNING = "some samples are short"
LEFT = []  # by LitLeaving, in the process
LEFT_BYTES = 200 * 2**20


class LitRefusing(LitToy):
    """The toy that finds fault with its first batch."""

    def training_terms(self, batch):
        raise UsageError("these samples have no targets")


class LitAborting(LitToy):
    """The toy of which a library finds something wrong."""

    def training_terms(self, batch):
        print("assertion failed: rows > 0", file=sys.stderr, flush=True)
        os.abort()


class LitStarving(LitToy):
    """The toy that lacks memory for large parts of a batch, and talks where it has enough."""

    def training_terms(self, batch):
        rows = len(batch["values"])
        if rows == 8:
            torch.empty(2**50, dtype=torch.uint8)  # the allocator itself refuses
        if rows == 4:
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does
        if not LEFT:
            LEFT.append(atexit.register(print, "the last line of all"))
            print(WARNING, file=sys.stderr)
            warnings.warn(WARNING, stacklevel=1)
        return super().training_terms(batch)


class LitLeaving(LitToy):
    """The toy that leaves memory in its process, anew for each number of devices."""

    def training_terms(self, batch):
        rows = len(batch["values"])
        if rows not in [known for known, _ in LEFT]:
            LEFT.append((rows, torch.ones(LEFT_BYTES, dtype=torch.uint8)))
        return super().training_terms(batch)


class LitWaiting(LitToy):
    """The toy whose first step does not end."""

    def training_terms(self, batch):
        Path(os.environ["TOY_PID"]).write_text(str(os.getpid()))
        time.sleep(120)


def planned(devices, capfd, module="tests.toy.LitToy", status=0):
    """Return the rows of a plan that rehearses, and what it said; no ranks are started beside."""
    options = {"devices": devices, "rehearse": True, "bandwidth_gib_s": 1.0, "json": True}
    assert plan([f"--model={module}", *TOY], **options) == status
    printed = capfd.readouterr()
    return json.loads(printed.out), printed.err


def test_a_fault_of_the_run_is_shown_as_its_process_shows_it(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SystemExit) as ended:
        planned("2,1", capfd, f"{__name__}.LitRefusing")
    assert ended.value.code == USAGE
    assert "error: these samples have no targets" in capfd.readouterr().err.splitlines()
    assert not list(tmp_path.iterdir())


def test_a_process_that_a_fault_ends_by_a_signal_ends_the_plan(capfd):
    with pytest.raises(SystemExit) as ended:
        planned("2,1", capfd, f"{__name__}.LitAborting")
    assert ended.value.code == 128 + signal.SIGABRT
    lines = capfd.readouterr().err.splitlines()
    assert "assertion failed: rows > 0" in lines
    assert lines[-1] == "error: rank 0 was ended by SIGABRT."


@pytest.mark.slow
def test_a_rehearsal_that_lacks_memory_leaves_the_others(capfd):
    module = f"{__name__}.LitStarving"
    rows, said = planned("1,2,4,8", capfd, module)
    assert rows["GiB, ddp"] == [None, None, *[pytest.approx(0.4, abs=0.3)] * 2]
    assert [seconds is not None for seconds in rows["s per step"]] == [False, False, True, True]
    refused, killed = (line for line in said.splitlines() if "did not end" in line)
    assert "devices=1, the rehearsal did not end: rank 0 ran out of memory: error: " in refused
    assert "allocate memory: you tried to allocate 1125899906842624 bytes" in refused
    assert "devices=2, the rehearsal did not end: rank 0 was ended by SIGKILL" in killed
    # what the two that ended warned of
    assert said.splitlines().count(WARNING) == 1 == said.count(f"UserWarning: {WARNING}")
    options = {"devices": "1", "rehearse": True, "bandwidth_gib_s": 1.0}
    assert plan([f"--model={module}", *TOY], **options) == RUN  # nothing is left
    shown = " ".join(capfd.readouterr().out.split())
    assert "devices=1, the rehearsal did not end: rank 0 ran out of memory" in shown
    assert "┃ devices" in shown


@pytest.mark.slow
def test_a_prediction_does_not_depend_on_what_else_is_planned(capfd):
    module = f"{__name__}.LitLeaving"
    alone, *others = (planned(devices, capfd, module)[0] for devices in ("2", "2,4", "4,2"))
    (total,) = alone["GiB, ddp"]
    assert total * 2**30 > LEFT_BYTES
    for rows in others:
        column = rows["devices"].index(2)
        for name, (value,) in alone.items():
            if name.startswith("GiB, "):
                # the heap of a toy is rounded to pages and arenas
                is_near = pytest.approx(value, rel=0.03, abs=4 / 1024)
                assert rows[name][column] == is_near, name
            elif not name.startswith(MEASURED):
                assert rows[name][column] == value, name


def test_what_a_process_answers_is_a_rehearsal_with_all_its_figures():
    order = Order({"class_path": "tests.toy.LitToy"}, DATA, TRAINER, 1, devices=2)
    found, _ = isolated.rehearsed(order)
    assert found.step_s > 0
    assert found.peak_bytes >= 0
    assert found.logit_bytes == 0 < found.kept_bytes
    assert 0.1 < found.program_bytes / 2**30 < 1  # torch alone is more


@pytest.mark.parametrize(
    ("error", "is_want"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the file says: not enough memory"), False),
    ],
)
def test_want_of_memory_is_told_from_other_faults(error, is_want):
    assert orders.is_want_of_memory(error) is is_want


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends children so")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_plan_leaves_no_process(number, tmp_path):
    pid, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    options = [f"--model.class_path={__name__}.LitWaiting", "--data.class_path=tests.toy.ToyData"]
    command = ["-m", "lit_models", "plan", *options, "--trainer.max_epochs=1"]
    own = {"TMPDIR": str(temporary), "TOY_PID": str(pid)}
    parent = subprocess.Popen(
        [sys.executable, *command, "--trainer.accelerator=cpu", "--devices=2", "--rehearse=true"],
        env=os.environ | own,
    )
    try:
        wait_until(lambda: pid.exists() and pid.read_text() != "", 120.0)
        rank = int(pid.read_text())
        assert is_running(rank)
        parent.send_signal(number)
        status = parent.wait(60)
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not is_running(rank), 10.0)
    if number == signal.SIGTERM:
        assert status == 128 + signal.SIGTERM
        assert not list(temporary.iterdir())
