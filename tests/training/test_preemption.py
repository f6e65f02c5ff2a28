"""Signals that come again while a run ends: its exit status stays its own."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Callback

from lit_models.cli import FORWARDED, forward_signals
from lit_models.training.callbacks import Ledger, Preemption
from lit_models.training.ledger import ledger_of
from tests.toy import LitToy, ToyData, toy_trainer

USR1 = signal.SIGUSR1
pytestmark = pytest.mark.filterwarnings("ignore:SIGUSR1. the run saves and stops")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What this process does with signals is restored: one that is ignored is so in all it
    starts."""
    before = {signum: signal.signal(signum, signal.SIG_DFL) for signum in FORWARDED}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


class InStep(Callback):
    """Does something in the third step."""

    def __init__(self, action: Any) -> None:
        self.action = action

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            self.action(trainer)


def warn(_: Any) -> None:
    signal.raise_signal(USR1)


def stop_as_another_rank(trainer: Any) -> None:
    ledger_of(trainer).wants_stop = True  # the vector does not say whose wish it is


def fail_after_warning(_: Any) -> None:
    signal.raise_signal(USR1)
    raise RuntimeError("a broken step")


@pytest.mark.parametrize("action", [warn, stop_as_another_rank])
def test_a_run_that_stops_ignores_the_warnings_that_follow(tmp_path: Path, action: Any) -> None:
    trainer = toy_trainer(tmp_path, callbacks=[Ledger(), Preemption(), InStep(action)])
    trainer.fit(LitToy(), ToyData())
    assert 3 <= trainer.global_step <= 5
    assert signal.getsignal(USR1) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_failure_after_the_warning_keeps_its_status(tmp_path: Path) -> None:
    callbacks = [Ledger(), Preemption(), InStep(fail_after_warning)]
    with pytest.raises(RuntimeError, match="a broken step"):
        toy_trainer(tmp_path, callbacks=callbacks).fit(LitToy(), ToyData())
    assert signal.getsignal(USR1) is signal.SIG_IGN


def test_a_run_that_heard_nothing_gives_back_what_was_there(tmp_path: Path) -> None:
    seen: list[int] = []
    before = lambda signum, _: seen.append(signum)  # noqa: E731 - compared below
    signal.signal(USR1, before)
    trainer = toy_trainer(tmp_path, max_epochs=1, callbacks=[Ledger(), Preemption()])
    trainer.fit(LitToy(), ToyData())
    assert signal.getsignal(USR1) is before
    assert seen == []


def test_a_warning_that_was_handed_on_to_ranks_ends_nobody_once_they_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[tuple[int, int]] = []
    children = [SimpleNamespace(pid=7, daemon=False)]
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    passed_on = forward_signals()
    assert passed_on == set()
    signal.raise_signal(USR1)
    children.clear()
    signal.raise_signal(USR1)
    assert (sent, passed_on) == ([(7, USR1)], {USR1})
    signal.raise_signal(signal.SIGTERM)
    assert sent == [(7, USR1), (os.getpid(), signal.SIGTERM)]


def test_a_warning_before_there_is_a_run_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    forward_signals()
    signal.raise_signal(USR1)
    assert sent == [(os.getpid(), USR1)]
    assert signal.getsignal(USR1) is signal.SIG_DFL
