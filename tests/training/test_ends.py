"""A run that is killed or stopped around a validation or the end of an epoch continues like an
undisturbed one: schedules, EarlyStopping, callbacks and rows of metrics included."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_models.training import LastCheckpoint, default_callbacks
from lit_models.training.checkpoints import newest_checkpoint, read_checkpoint
from lit_models.training.run import default_loggers
from tests.toy import CutAt, LitToy, PowerCut, ToyData, csv_rows, ledger_lines, toy_trainer

pytestmark = pytest.mark.filterwarnings("ignore:SIGTERM")
STEPS = 7  # in an epoch
NEVER_BETTER = {"monitor": "val/loss", "mode": "max", "min_delta": 1e9}


class LitPlateau(LitToy):
    """Its rate falls after each validation, since none improves on the first."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = ReduceLROnPlateau(optimizer, "max", 0.7, patience=0, threshold=1e9)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val/loss"}


class Counts(Callback):
    """Counts hook calls, and keeps the counts in checkpoints."""

    def __init__(self):
        self.counts = {"steps": 0, "validations": 0, "epochs": 0}

    def on_train_batch_end(self, *_):
        self.counts["steps"] += 1

    def on_validation_end(self, trainer, _):
        self.counts["validations"] += not trainer.sanity_checking

    def on_train_epoch_end(self, *_):
        self.counts["epochs"] += 1

    def state_dict(self):
        return dict(self.counts)

    def load_state_dict(self, state_dict):
        self.counts = dict(state_dict)


class Told(Callback):
    """Asks the run to stop before a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def run(folder, *more, every=None, **options):
    """Train or resume; return rates, counts, steps of validations, and rows by name."""
    resume, counts = newest_checkpoint(folder), Counts()
    callbacks = [c for c in default_callbacks() if not isinstance(c, LastCheckpoint)]
    callbacks += [LastCheckpoint(every), counts, EarlyStopping(**NEVER_BETTER, patience=2), *more]
    step = 0 if resume is None else read_checkpoint(resume)["global_step"]
    logger = default_loggers(str(folder), step)[:1]
    trainer = toy_trainer(folder, callbacks=callbacks, logger=logger, **options)
    trainer.fit(LitPlateau(), ToyData(), ckpt_path=resume, weights_only=True)
    return trainer


def facts(folder):
    last = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    logged = csv_rows(folder / "metrics.csv")
    rows = [(r["step"], float(r["val/loss"])) for r in logged if r["val/loss"]]
    rates = [line["learning_rate"] for line in ledger_lines(folder)]
    return {"rows": rows, "rates": rates, "weights": last["state_dict"], **last["callbacks"]}


LENGTHS = {"epochs": {"max_epochs": 6}, "steps": {"max_epochs": -1, "max_steps": 6 * STEPS}}
EVENTS = {
    # At the batch after the end of an epoch, whose checkpoint is the newest.
    "killed after an epoch": ({}, CutAt(STEPS + 1)),
    "killed in the validation of a saved step": ({"every": STEPS}, CutAt(STEPS)),
    "killed within an epoch": ({"every": 4}, CutAt(9)),
    # A signal takes effect two steps later, when the ledger's vector is read.
    "told to stop at an epoch's end": ({}, Told(STEPS - 2)),
    "told to stop in the first epoch": ({}, Told(1)),
    "told to stop before a validation": ({}, Told(STEPS - 1)),
}


@pytest.fixture(scope="module", params=LENGTHS.values(), ids=LENGTHS)
def whole(request, tmp_path_factory):
    """The length of an undisturbed run, and its results."""
    run(folder := tmp_path_factory.mktemp("whole"), **request.param)
    return request.param, facts(folder)


@pytest.mark.parametrize("event", EVENTS)
def test_a_resumed_run_ends_its_epochs_as_one_that_went_on(whole, tmp_path, event):
    (length, expected), (options, callback) = whole, EVENTS[event]
    try:
        assert run(tmp_path, callback, **options, **length).global_step < 3 * STEPS
    except PowerCut:
        assert isinstance(callback, CutAt)
    trainer = run(tmp_path, **options, **length)
    assert trainer.global_step == 3 * STEPS  # EarlyStopping stops it there
    found = facts(tmp_path)
    torch.testing.assert_close(found["weights"], expected["weights"])
    assert found["rows"] == [(step, pytest.approx(loss)) for step, loss in expected["rows"]]
    assert found["rates"] == pytest.approx(expected["rates"])
    assert len({*found["rates"]}) == 2
    assert found["Counts"] == expected["Counts"] == {"steps": 21, "validations": 3, "epochs": 3}


def test_a_run_that_is_told_to_stop_stops_before_its_least_epochs(tmp_path):
    assert run(tmp_path, Told(1), max_epochs=6, min_epochs=3).global_step < STEPS


@pytest.mark.parametrize("length", [{"max_epochs": 1}, {"max_epochs": -1, "max_steps": STEPS}])
def test_a_run_that_is_told_to_stop_at_its_last_step_ends_by_itself(tmp_path, length):
    run(tmp_path, Told(STEPS - 2), **length)
    assert [row for row, _ in facts(tmp_path)["rows"]] == [str(STEPS - 1)]
