"""What the loop leaves out of a step, and what it must not."""

import inspect
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler

from lit_models.training.callbacks import Throughput, default_callbacks
from lit_models.training.lean_loop import STEP_HOOKS, TRANSFER_HOOKS
from tests.toy import LitToy, ToyData, toy_trainer

STEPS = 3


class Names(PassThroughProfiler):
    """Counts what a trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def profile(self, action_name: str) -> AbstractContextManager[None]:
        self.counts[action_name] += 1
        return nullcontext()


def test_a_step_calls_only_the_hooks_that_a_callback_has(tmp_path: Path):
    names = Names()
    callbacks = [c for c in default_callbacks() if not isinstance(c, Throughput)]
    trainer = toy_trainer(tmp_path, max_steps=STEPS, callbacks=callbacks, profiler=names)
    trainer.fit(LitToy(), ToyData())
    expected = {
        f"[Callback]{callback.state_key}.{hook}"
        for callback in trainer.callbacks
        for hook in STEP_HOOKS
        if getattr(type(callback), hook) is not getattr(Callback, hook)
    }
    called = {n: c for n, c in names.counts.items() if n.endswith(STEP_HOOKS) and "[Callback]" in n}
    assert called == dict.fromkeys(expected, STEPS)
    assert len(expected) < len(STEP_HOOKS) * len(trainer.callbacks) / 3


def test_a_hook_that_was_given_to_a_callback_is_called(tmp_path: Path):
    seen: list[int] = []
    given = LambdaCallback(on_before_zero_grad=lambda trainer, *_: seen.append(trainer.global_step))
    trainer = toy_trainer(tmp_path, max_steps=STEPS, callbacks=[given])
    trainer.fit(LitToy(), ToyData())
    assert seen == [0, 1, 2]


def test_a_training_step_gets_the_arguments_that_it_takes(tmp_path: Path):
    parameters = inspect.signature(_TrainingEpochLoop._build_kwargs).parameters
    assert list(parameters) == ["self", "kwargs", "batch", "batch_idx"]
    seen: list[int | None] = []

    class Numbered(LitToy):
        def training_step(self, batch, batch_idx):
            seen.append(batch_idx)
            return super().training_step(batch, batch_idx)

    class Plain(LitToy):
        def training_step(self, batch):
            seen.append(None)
            return super().training_step(batch, 0)

    for number, module in enumerate((Numbered(), Plain())):
        toy_trainer(tmp_path / str(number), max_steps=STEPS).fit(module, ToyData())
    assert seen == [0, 1, 2, None, None, None]


def test_a_batch_goes_straight_to_the_step_unless_somebody_moves_it(tmp_path: Path):
    for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        assert callable(getattr(LightningModule, name))  # private: what is passed over
    asked: list[str] = []

    class Told(ToyData):
        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            asked.append("data")
            return super().transfer_batch_to_device(batch, device, dataloader_idx)

    class Preparing(LitToy):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            asked.append("module")
            return batch

    names, module = Names(), LitToy()
    callbacks = [c for c in default_callbacks() if not isinstance(c, Throughput)]
    first = toy_trainer(tmp_path / "0", max_steps=STEPS, callbacks=callbacks, profiler=names)
    first.fit(module, ToyData())
    assert not [name for name in names.counts if name.endswith(TRANSFER_HOOKS)]
    toy_trainer(tmp_path / "1", max_steps=STEPS).fit(module, Told())  # the same module again
    with pytest.warns(UserWarning, match="overridden `on_after_batch_transfer` in"):
        toy_trainer(tmp_path / "2", max_steps=STEPS).fit(Preparing(), ToyData())
    assert asked.count("data") == asked.count("module") >= STEPS  # of validation, too
