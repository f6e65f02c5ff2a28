"""`unisono plan --rehearse`: each number of devices in a process of its own, and how it fails."""

import json
import os
import signal

import pytest

from lit_models.cli_errors import USAGE, UsageError
from lit_models.commands.plan import plan
from lit_models.forecasting import apart
from lit_models.forecasting.orders import Order
from tests.toy import LitToy

DATA = {
    "class_path": "tests.toy.ToyData",
    "init_args": {"num_samples": 80, "global_batch_size": 8},
}
TRAINER = {"accelerator": "cpu", "max_epochs": 1}
MEASURED = ("s per step", "efficiency", "min per epoch", "h in all")  # seconds are never the same


class LitRefusing(LitToy):
    """The toy that finds fault with its first batch."""

    def training_terms(self, batch):
        raise UsageError("these samples have no targets")


class LitKilled(LitToy):
    """The toy that the system ends where a device has all of a batch."""

    def training_terms(self, batch):
        if len(batch["values"]) == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_terms(batch)


def planned(devices, capfd, module="tests.toy.LitToy"):
    """Return the rows and the notes of a plan that rehearses; no ranks are started beside it."""
    options = {"devices": devices, "rehearse": True, "bandwidth_gib_s": 1.0, "json": True}
    assert plan({"class_path": module}, DATA, TRAINER, 1, **options) == 0
    return json.loads(capfd.readouterr().out)


def test_a_fault_of_the_run_is_shown_as_its_process_shows_it(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.raises(SystemExit) as ended:
        planned("2,1", capfd, f"{__name__}.LitRefusing")
    assert ended.value.code == USAGE
    assert "error: these samples have no targets" in capfd.readouterr().err.splitlines()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_rehearsal_that_is_killed_leaves_the_others(capfd):
    module = f"{__name__}.LitKilled"
    rows = planned("1,2", capfd, module)
    assert rows["GiB, ddp"] == [None, pytest.approx(0.4, abs=0.3)]
    assert [seconds is not None for seconds in rows["s per step"]] == [False, True]
    options = {"devices": "1", "rehearse": True, "bandwidth_gib_s": 1.0}
    assert plan({"class_path": module}, DATA, TRAINER, 1, **options) == 0
    shown = " ".join(capfd.readouterr().out.split())
    assert "devices=1, the rehearsal did not end: ranks ended with [-9]" in shown


@pytest.mark.slow
def test_a_prediction_does_not_depend_on_what_else_is_planned(capfd):
    alone, *others = (planned(devices, capfd) for devices in ("2", "2,4", "4,2"))
    for rows in others:
        column = rows["devices"].index(2)
        for name, (value,) in alone.items():
            if name.startswith("GiB, "):
                assert rows[name][column] == pytest.approx(value, rel=0.03), name
            elif not name.startswith(MEASURED):
                assert rows[name][column] == value, name


def test_what_a_process_answers_is_a_rehearsal_with_all_its_figures():
    order = Order({"class_path": "tests.toy.LitToy"}, DATA, TRAINER, 1, devices=2)
    found = apart.rehearsed(order)
    assert found.step_s > 0
    assert found.peak_bytes >= 0
    assert found.logit_bytes == 0 < found.kept_bytes
    assert 0.1 < found.program_bytes / 2**30 < 1  # torch alone is more
