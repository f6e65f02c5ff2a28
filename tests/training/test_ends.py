"""A run that is killed or stopped around a validation or the end of an epoch continues like an
undisturbed one: schedules, EarlyStopping, callbacks and rows of metrics included; finished runs
that are started again."""

import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from lit_models.run_files import read_checkpoint
from lit_models.training import LastCheckpoint, Ledger, Preemption, default_callbacks
from lit_models.training.checkpoints import newest_checkpoint
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


class StopBefore(Callback):
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
    "told to stop at an epoch's end": ({}, StopBefore(STEPS - 2)),
    "told to stop in the first epoch": ({}, StopBefore(1)),
    "told to stop before a validation": ({}, StopBefore(STEPS - 1)),
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
    assert run(tmp_path, StopBefore(1), max_epochs=6, min_epochs=3).global_step < STEPS


@pytest.mark.parametrize("length", [{"max_epochs": 1}, {"max_epochs": -1, "max_steps": STEPS}])
def test_a_run_that_is_told_to_stop_at_its_last_step_ends_by_itself(tmp_path, length):
    run(tmp_path, StopBefore(STEPS - 2), **length)
    assert [row for row, _ in facts(tmp_path)["rows"]] == [str(STEPS - 1)]


REFUSED: dict[str, dict[str, Any]] = {
    "Scheduler would put more samples": {"callbacks": [GradientAccumulationScheduler({1: 2})]},
    "StochasticWeightAveraging copies": {"callbacks": [StochasticWeightAveraging(0.1)]},
    "EMAWeightAveraging copies": {"callbacks": [EMAWeightAveraging()]},
    "val_check_interval is a time": {"val_check_interval": "00:00:10:00"},
    "interval is 8 optimizer steps, and an epoch has 7: lower it": {"val_check_interval": 8},
    "every_n_epoch is 0, and must be 1 or more": {"check_val_every_n_epoch": 0},
    "EarlyStopping follows val/loss, but this run has no validation": {
        **{"callbacks": [EarlyStopping("val/loss")], "limit_val_batches": 0}
    },
}


def epochs_of(folder: Path, *callbacks: Callback, module: Any = None) -> int:
    """Train, or resume from the last checkpoint; return the epochs in the ledger."""
    last = folder / "checkpoints" / "last.ckpt"
    trainer = toy_trainer(folder, callbacks=list(callbacks), max_epochs=9)
    resume = {"ckpt_path": last if last.exists() else None, "weights_only": True}
    trainer.fit(module or LitToy(), ToyData(), **resume)
    return len(ledger_lines(folder)) // STEPS


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # without the callback
def test_a_run_that_early_stopping_has_ended_goes_on_with_more_patience_alone(tmp_path):
    def stopping(patience: int) -> EarlyStopping:
        return EarlyStopping("val/loss", min_delta=1e9, patience=patience)

    assert [epochs_of(tmp_path, stopping(n)) for n in (2, 2, 4, 4)] == [3, 3, 5, 5]
    assert epochs_of(tmp_path) == 9


@pytest.mark.parametrize(("value", "epochs"), [(50.0, 1), (30.0, 3)])
def test_a_run_that_a_threshold_has_ended_has_no_epoch_more(tmp_path, value, epochs):
    for _ in range(2):  # losses are 49, 32, 21, 13, …
        assert epochs_of(tmp_path, EarlyStopping("val/loss", stopping_threshold=value)) == epochs


def test_a_stop_during_a_validation_is_saved_with_all_steps(tmp_path):
    callbacks = [Preemption(), StopBefore(2 * STEPS - 1)]
    trainer = toy_trainer(tmp_path, callbacks=callbacks, max_epochs=3)
    trainer.fit(LitToy(), ToyData())
    last = read_checkpoint(path := tmp_path / "checkpoints" / "last.ckpt")
    assert 2 * STEPS <= last["global_step"] == len(ledger_lines(tmp_path)) < 3 * STEPS
    trainer.fit(LitToy(), ToyData(), ckpt_path=path, weights_only=True)  # the same trainer
    assert len(ledger_lines(tmp_path)) == 3 * STEPS


@pytest.mark.parametrize("message", REFUSED)
def test_callbacks_and_intervals_that_would_change_the_run_are_refused(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path, **REFUSED[message]).fit(LitToy(), ToyData())
    assert not list(tmp_path.iterdir())


def test_a_ledger_of_a_plain_module_and_a_checkpoint_without_its_phase_are_refused(tmp_path):
    with pytest.raises(ValueError, match="got BoringModel: leave it out of this Trainer"):
        epochs_of(tmp_path, Ledger(), module=BoringModel())
    toy_trainer(tmp_path, max_epochs=1, callbacks=[]).fit(LitToy(), ToyData())
    content = read_checkpoint(last := tmp_path / "checkpoints" / "last.ckpt")
    torch.save(content | {"ledger": {"hash": ""}}, last)
    with pytest.raises(ValueError, match="of an earlier version, .* with --model.init_from"):
        epochs_of(tmp_path)


class LitStepwise(LitToy):
    """Its schedule steps every few steps of an epoch."""

    def __init__(self, schedule: Any, frequency: int) -> None:
        super().__init__()
        self.schedule, self.frequency = schedule, frequency

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        how = {"interval": "step", "frequency": self.frequency, "monitor": "val/loss"}
        how["scheduler"] = self.schedule(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": how}


@pytest.mark.parametrize("micro", [None, 4, 2])
def test_a_schedule_is_asked_after_optimizer_steps_with_accumulation_too(tmp_path, micro):
    module = LitStepwise(partial(ExponentialLR, gamma=0.7), 2)
    toy_trainer(tmp_path, max_epochs=1, callbacks=[]).fit(module, ToyData(micro_batch_size=micro))
    rates = [line["learning_rate"] for line in ledger_lines(tmp_path)]
    assert rates == pytest.approx([0.01 * 0.7**falls for falls in (0, 0, 1, 1, 2, 2, 3)])


@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned on metric")
def test_a_run_that_stops_before_its_metric_exists_saves_and_resumes(tmp_path):
    def module() -> LitStepwise:  # its rate falls with each validation but the first
        plateau = {"mode": "max", "factor": 0.7, "patience": 0, "threshold": 1e9}
        return LitStepwise(partial(ReduceLROnPlateau, **plateau), STEPS)

    epochs_of(tmp_path, Preemption(), StopBefore(STEPS - 2), module=module())
    assert len(ledger_lines(tmp_path)) == STEPS
    epochs_of(tmp_path, module=module())
    rates = [line["learning_rate"] for line in ledger_lines(tmp_path)[::STEPS]]
    assert rates == pytest.approx([0.01 * 0.7 ** max(0, epoch - 1) for epoch in range(9)])


def rows_of(folder: Path, **data: Any) -> list[list[str]]:
    """Return step and names of the rows that a run with Lightning's rate monitor writes."""
    logger, callbacks = default_loggers(str(folder))[:1], [LearningRateMonitor()]
    options = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 1}
    toy_trainer(folder, **options).fit(LitToy(), ToyData(**data))
    return [[r["step"], *(n for n in r if r[n])] for r in csv_rows(folder / "metrics.csv")]


@pytest.mark.parametrize("most", [{"max_steps": 9}, {"max_steps": 99}, {}])
def test_the_test_of_a_run_that_is_over_has_its_last_step(tmp_path, most):
    for folder in ("whole", "again"):
        last = tmp_path / "whole" / "checkpoints" / "last.ckpt"
        options = {"logger": default_loggers(str(tmp_path / folder))[:1], **most}
        trainer = toy_trainer(tmp_path / "whole", **options)
        resume = {"ckpt_path": last if last.exists() else None, "weights_only": True}
        trainer.fit(LitToy(), ToyData(), **resume)
        trainer.test(LitToy(), ToyData(), verbose=False)
    steps = [row["step"] for row in csv_rows(tmp_path / "again" / "metrics.csv")]
    assert steps == [str(trainer.global_step)]


def test_metrics_have_the_same_rows_with_accumulation(tmp_path):
    rows = rows_of(tmp_path / "one")
    assert sum("lr-AdamW/pg1" in row for row in rows) == 2 * STEPS
    assert rows_of(tmp_path / "parts", micro_batch_size=2) == rows


def test_an_error_ends_the_processes_that_load_data(tmp_path):
    cut, module = CutAt(3), LitToy()
    cut.on_after_backward, cut.on_train_batch_start = cut.on_validation_start, lambda *_: None
    with pytest.raises(PowerCut) as error:  # which holds the training's stack frames
        toy_trainer(tmp_path / "cut", callbacks=[cut]).fit(module, ToyData(num_workers=2))
    assert error.value.__traceback__ is not None
    assert multiprocessing.active_children() == []
    toy_trainer(tmp_path / "again", callbacks=[], max_steps=1).fit(module, ToyData())
    assert ledger_lines(tmp_path / "again")[0]["samples"] == 8  # nothing of the cut step
