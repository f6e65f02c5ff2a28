"""A run that is over is started again, a trainer trains twice, and callbacks of Lightning in a run
that goes on."""

import csv
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)

from datamodules.core.planned import LoaderOptions
from lit_models.training import Preemption
from lit_models.training.checkpoints import read_checkpoint
from lit_models.training.run import default_loggers
from tests.toy import CutAt, LitToy, PowerCut, ToyData, ledger_lines, toy_trainer
from tests.training.test_ends import Told

STEPS = 7  # of an epoch
REFUSED = {
    "Scheduler would put more samples in a step": GradientAccumulationScheduler({1: 2}),
    "StochasticWeightAveraging copies": StochasticWeightAveraging(0.1),
    "EMAWeightAveraging copies": EMAWeightAveraging(),
}


def epochs_of(folder: Path, *callbacks: Callback) -> int:
    """Train, or go on from the last checkpoint, and return the epochs in the ledger."""
    last = folder / "checkpoints" / "last.ckpt"
    trainer = toy_trainer(folder, callbacks=list(callbacks), max_epochs=9)
    trainer.fit(LitToy(), ToyData(), ckpt_path=last if last.exists() else None, weights_only=True)
    return len(ledger_lines(folder)) // STEPS


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # and no such callback
def test_a_run_that_early_stopping_has_ended_goes_on_with_more_patience_alone(tmp_path):
    def stopping(patience: int) -> EarlyStopping:
        return EarlyStopping("val/loss", min_delta=1e9, patience=patience)

    assert [epochs_of(tmp_path, stopping(n)) for n in (2, 2, 4, 4)] == [3, 3, 5, 5]
    assert epochs_of(tmp_path) == 9


def test_a_run_that_a_threshold_has_ended_has_no_epoch_more(tmp_path):
    def stopping() -> EarlyStopping:  # of losses 49, 32, 21, 13, …
        return EarlyStopping("val/loss", stopping_threshold=30.0)

    assert [epochs_of(tmp_path, stopping()) for _ in range(2)] == [3, 3]


@pytest.mark.filterwarnings("ignore:SIGTERM")
def test_a_stop_that_is_heard_of_in_a_validation_is_saved_with_all_steps(tmp_path):
    epochs_of(tmp_path, Preemption(), Told(2 * STEPS - 2))
    last = read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert 2 * STEPS <= last["global_step"] == len(ledger_lines(tmp_path)) < 3 * STEPS


@pytest.mark.parametrize("message", REFUSED)
def test_callbacks_that_would_train_something_else_are_refused(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        toy_trainer(tmp_path, callbacks=[REFUSED[message]]).fit(LitToy(), ToyData())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_trainer_trains_twice_from_a_checkpoint_alone(tmp_path, checkpoints):
    trainer = toy_trainer(tmp_path, callbacks=[], enable_checkpointing=checkpoints)
    trainer.fit(LitToy(), ToyData())
    trainer.fit_loop.max_epochs = 3
    with pytest.raises(RuntimeError, match=r"holds a run already: fit\(ckpt_path=…\)"):
        trainer.fit(LitToy(), ToyData())
    assert len(ledger_lines(tmp_path)) == 2 * STEPS


def rows_of(folder: Path, **data: Any) -> list[list[str]]:
    """Return step and names of the rows that a run writes with Lightning's monitor of rates."""
    logger, callbacks = default_loggers(str(folder))[:1], [LearningRateMonitor()]
    options = {"logger": logger, "callbacks": callbacks, "log_every_n_steps": 1}
    toy_trainer(folder, **options).fit(LitToy(), ToyData(**data))
    with open(folder / "metrics.csv", newline="") as file:
        return [[r["step"], *(n for n in r if r[n])] for r in csv.DictReader(file)]


def test_metrics_have_the_same_rows_with_accumulation(tmp_path):
    rows = rows_of(tmp_path / "one")
    assert sum("lr-AdamW/pg1" in row for row in rows) == 2 * STEPS
    assert rows_of(tmp_path / "parts", micro_batch_size=2) == rows


def test_an_error_ends_the_processes_that_load_data(tmp_path):
    data = ToyData()
    data.loader_options = LoaderOptions(num_workers=2)
    with pytest.raises(PowerCut) as error:  # which holds the frames of the training
        toy_trainer(tmp_path, callbacks=[CutAt(3)]).fit(LitToy(), data)
    assert error.value.__traceback__ is not None
    assert multiprocessing.active_children() == []
