"""What tells the clock of the phases: Lightning names every part of a step to its profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lit_models.training.throughput.clock import (
    BACKWARD,
    CHECKPOINT,
    DATA,
    FORWARD,
    LOGGING,
    OPTIMIZER,
    OTHER,
    PhaseClock,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lit_models.training.throughput.flops import FlopCount

FETCH = "train_dataloader_next"
_NOTHING: AbstractContextManager[Any] = nullcontext()
# (beginning, end) of the names that Lightning 2.6 gives to what it calls; a test pins them.
_PHASE_OF = {
    ("[Strategy]", ".training_step"): FORWARD,
    ("[Strategy]", ".backward"): BACKWARD,
    ("[LightningModule]", ".optimizer_step"): OPTIMIZER,
    ("[LightningModule]", ".optimizer_zero_grad"): OPTIMIZER,
    ("save_checkpoint", ""): CHECKPOINT,
    ("[Callback]LastCheckpoint", ""): CHECKPOINT,
    ("run_training_epoch", ""): OTHER,
}


class _Part:
    """A part of a step that is one phase."""

    def __init__(self, clock: PhaseClock, phase: int) -> None:
        self.clock, self.phase = clock, phase

    def __enter__(self) -> None:
        self.clock.enter(self.phase)

    def __exit__(self, *_: object) -> None:
        self.clock.leave()


class _Counted(_Part):
    """A part whose arithmetic is counted."""

    def __init__(self, clock: PhaseClock, phase: int, count: FlopCount) -> None:
        super().__init__(clock, phase)
        self.count = count

    def __enter__(self) -> None:
        super().__enter__()
        self.count.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.count.__exit__(*error)
        super().__exit__(*error)


class _Move(_Part):
    """A batch goes to its device: that is the last of its data. What hooks do then is other."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.clock.switch(OTHER)


class _Batch(_Part):
    """A whole batch: logging is after it, until the next one is asked for."""

    def __enter__(self) -> None:
        self.clock.switch(OTHER)

    def __exit__(self, *_: object) -> None:
        self.clock.switch(LOGGING)


class _Parts(dict[str, AbstractContextManager[Any]]):
    """Name -> part, made when the name is first asked for."""

    def __init__(self, make: Callable[[str], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, name: str) -> AbstractContextManager[Any]:
        part = self[name] = self.make(name)
        return part


class PhaseProfiler(Profiler):
    """Turns a clock as a training goes on; a profiler that the user chose goes on beside it.

    Attributes:
        cut_due: an interval shall end where the next batch is asked for.
        taken: the interval that ended so.

    Args:
        clock: of the run.
        chosen: the trainer's profiler.
        counts: phase -> what counts its arithmetic, until `stop_counting`.
    """

    def __init__(
        self, clock: PhaseClock, chosen: Profiler, counts: dict[int, FlopCount] | None = None
    ) -> None:
        super().__init__()
        self.clock, self.chosen, self.counts = clock, chosen, counts or {}
        self.cut_due = False
        self.taken: Any = None
        self._parts = _Parts(self._part)
        if isinstance(chosen, PassThroughProfiler):
            # Nothing but a look into a dictionary: it is asked for eighty times in a step.
            self.profile = self._parts.__getitem__  # type: ignore[assignment, method-assign]

    def install(self, trainer: Trainer) -> None:
        """Let a trainer use it."""
        trainer.profiler = self

    def remove(self, trainer: Trainer) -> None:
        """Give a trainer its own back."""
        trainer.profiler = self.chosen

    def stop_counting(self) -> None:
        self.counts = {}
        self._parts.clear()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """Return what is entered for a part of a step, beside the chosen profiler's own."""
        return self._both(action_name, self._parts[action_name])

    def start(self, action_name: str) -> None:
        """A batch is asked for: what follows is data, until it lies on its device."""
        if action_name.endswith(FETCH):
            if self.cut_due:
                self.cut_due, self.taken = False, self.clock.cut()
            self.clock.switch(DATA)
        self.chosen.start(action_name)

    def stop(self, action_name: str) -> None:
        self.chosen.stop(action_name)

    def _part(self, name: str) -> AbstractContextManager[Any]:
        if name == "run_training_batch":
            return _Batch(self.clock, OTHER)
        if name.startswith("[Strategy]") and name.endswith(".batch_to_device"):
            return _Move(self.clock, OTHER)
        for (beginning, end), phase in _PHASE_OF.items():
            if name.startswith(beginning) and name.endswith(end):
                if phase in self.counts:
                    return _Counted(self.clock, phase, self.counts[phase])
                return _Part(self.clock, phase)
        return _NOTHING

    @contextmanager
    def _both(self, name: str, part: AbstractContextManager[Any]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.chosen.profile(name))
            stack.enter_context(part)
            yield
