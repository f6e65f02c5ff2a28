"""A rank that is silent for too long ends; a slow phase may have a longer limit of its own."""

import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback

from lit_models.training.callbacks import FailureReport, LastCheckpoint, Ledger
from lit_models.training.faults import PHASE, Watch
from tests.toy import LitToy, ToyData, toy_trainer

LONG_S = 3600.0


class Watched:
    """A watch with an ordinary limit of 0.2 s; `statuses` are those it would have ended with."""

    def __init__(self, run: Path, **phases_s: float) -> None:
        self.statuses: list[int] = []
        self.watch = Watch(run, 3, 0.2, phases_s, self.statuses.append)

    def silent_in(self, place: dict[str, Any], seconds: float, until_ended: bool = False) -> bool:
        """Whether it ends a rank that is silent in a place; waits no longer than needed."""
        self.watch.beat = (time.monotonic(), place)
        end = time.monotonic() + seconds
        while time.monotonic() < end and not (until_ended and self.statuses):
            time.sleep(0.02)
        self.watch.beat = (time.monotonic(), {PHASE: "checkpoint"})
        return bool(self.statuses)


def test_a_named_phase_outlives_the_ordinary_limit_and_another_place_does_not(tmp_path, capfd):
    watched = Watched(tmp_path, checkpoint=LONG_S)
    stack = tmp_path / "stacks" / "rank-3.txt"
    assert not watched.silent_in({"step": 4, PHASE: "checkpoint"}, 0.6)
    assert not stack.exists()
    assert watched.silent_in({"step": 5, PHASE: "evaluation_end"}, 30, until_ended=True)
    assert 'last: {"step": 5, "phase": "evaluation_end"}' in stack.read_text()
    assert "silent_in" in stack.read_text()
    watched.watch.is_over.set()
    watched = Watched(tmp_path, checkpoint=LONG_S)
    assert watched.silent_in({"step": 6}, 30, until_ended=True)
    assert set(watched.statuses) == {1}
    watched.watch.is_over.set()
    said = "in {'step': 6}: it hangs, or waits for a rank that does; it ends."
    assert said in capfd.readouterr().err


def test_a_named_phase_ends_by_its_own_limit(tmp_path):
    watched = Watched(tmp_path, checkpoint=0.5)
    begin = time.monotonic()
    assert watched.silent_in({PHASE: "checkpoint"}, 30, until_ended=True)
    assert time.monotonic() - begin > 0.5
    watched.watch.is_over.set()


class Phases(Callback):
    """Sees what the watch knows at each moment; it comes after the report."""

    def __init__(self, report: FailureReport) -> None:
        self.report = report
        self.seen: list[tuple[str, str | None]] = []

    def _see(self, hook: str) -> None:
        watch = self.report._watch
        assert watch is not None
        assert watch.beat is not None
        self.seen.append((hook, watch.beat[1].get(PHASE)))

    def on_fit_start(self, trainer, pl_module):
        self.report._watch = Watch(Path(trainer.default_root_dir), 0, LONG_S)

    def on_train_batch_start(self, *_):
        self._see("batch")

    def on_train_batch_end(self, *_):
        self._see("batch")

    def on_validation_batch_start(self, *_):
        self._see("batch")

    def on_validation_epoch_end(self, *_):
        self._see("evaluation")

    def on_save_checkpoint(self, *_):
        self._see("save")


def test_checkpoints_and_the_end_of_an_evaluation_are_phases_until_the_next_batch(tmp_path):
    report = FailureReport()
    phases = Phases(report)
    callbacks = [Ledger(), report, phases, LastCheckpoint(every_n_steps=2)]
    toy_trainer(tmp_path, callbacks=callbacks, max_epochs=2, num_sanity_val_steps=0).fit(
        LitToy(), ToyData()
    )
    assert set(phases.seen) == {
        ("batch", None), ("evaluation", "evaluation_end"), ("save", "checkpoint"),
    }  # fmt: skip
    assert report._watch is None


def test_limits_that_would_be_none_are_refused(tmp_path):
    with pytest.raises(ValueError, match="timeout_s must be above 0, got 0"):
        FailureReport(timeout_s=0)
    strategy = SimpleNamespace(timeout=timedelta(seconds=600))
    facts = {"global_rank": 0, "is_global_zero": True, "default_root_dir": str(tmp_path)}
    facts |= {"training": True, "global_step": 0, "current_epoch": 0}
    trainer = SimpleNamespace(strategy=strategy, world_size=2, **facts)
    for timeout_s, seconds, message in (
        (60, 30, "gives checkpoint 30 s, less than the 60 s of what is not slow; raise it"),
        (60, 900, "ranks that wait for it end after the 600 s of trainer.strategy.timeout"),
    ):
        report = FailureReport(timeout_s, {"checkpoint": seconds})
        with pytest.raises(ValueError, match=message):
            report.setup(trainer, LitToy(), "fit")
    report = FailureReport(60, {"checkpoint": 600})
    report.setup(trainer, LitToy(), "fit")
    report.on_train_batch_start(trainer, LitToy(), {}, 0)
    assert (report._watch.timeout_s, report._watch.slow_phases_s) == (60, {"checkpoint": 600})
    report.teardown(trainer, LitToy(), "fit")
