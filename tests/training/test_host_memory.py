import platform
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lit_models.training.callbacks import default_callbacks, host_memory
from lit_models.training.callbacks.host_memory import give_freed_memory_back, keep_freed_memory
from tests.toy import LitToy, ToyData, toy_trainer

NUMBERS = 5_000_000  # 20 MB
PAGES = NUMBERS * 4 // resource.getpagesize()
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc alone")


def new_pages() -> int:
    """Return the pages that the kernel gives for a block that is freed at once."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.zeros(NUMBERS)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_freed_block_is_used_again_until_it_is_given_back():
    keep_freed_memory()
    try:
        # What lies between blocks decides how often the heap grows before one fits.
        assert min(new_pages() for _ in range(12)) < PAGES / 10
    finally:
        give_freed_memory_back()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called, in place of doing it."""
    names: list[str] = []
    for name in ("keep_freed_memory", "give_freed_memory_back"):
        monkeypatch.setattr(host_memory, name, lambda name=name: names.append(name))
    return names


def test_a_training_on_a_cpu_keeps_it_and_its_end_gives_it_back(tmp_path: Path, calls: list[str]):
    toy_trainer(tmp_path, max_steps=1).fit(LitToy(), ToyData())
    assert calls == ["keep_freed_memory", "give_freed_memory_back"]


class Probe(Callback):
    """Notes when a rehearsal would measure, then fails if it is told to."""

    def __init__(self, calls: list[str], error: str | None = None) -> None:
        self.calls, self.error = calls, error

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.calls.append("rehearsal")
        if self.error is not None:
            raise RuntimeError(self.error)


def test_a_rehearsal_measures_the_heap_that_the_run_has(tmp_path: Path, calls: list[str]):
    callbacks = [Probe(calls), *default_callbacks()]
    toy_trainer(tmp_path, max_steps=1, callbacks=callbacks).fit(LitToy(), ToyData())
    assert calls == ["keep_freed_memory", "rehearsal", "give_freed_memory_back"]


def test_a_run_that_fails_gives_it_back(tmp_path: Path, calls: list[str]):
    callbacks = [Probe(calls, "no room"), *default_callbacks()]
    with pytest.raises(RuntimeError, match="no room"):
        toy_trainer(tmp_path, max_steps=1, callbacks=callbacks).fit(LitToy(), ToyData())
    assert calls == ["keep_freed_memory", "rehearsal", "give_freed_memory_back"]


def test_on_a_gpu_the_host_is_left_alone(calls: list[str]):
    strategy = SimpleNamespace(root_device=torch.device("cuda"))
    trainer, callback = SimpleNamespace(strategy=strategy), host_memory.HostMemory()
    callback.setup(trainer, LitToy(), "fit")
    callback.teardown(trainer, LitToy(), "fit")
    assert not calls
