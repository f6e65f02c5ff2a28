"""Throughput: how fast a run learns, where its time goes, and how busy the hardware is."""

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lit_models.training.ledger import ledger_of, tells_samples
from lit_models.training.throughput.clock import EVALUATION, clock_for
from lit_models.training.throughput.intervals import Intervals
from lit_models.training.throughput.journal import Journal
from lit_models.training.throughput.lines import Capacity, capacity_of
from lit_models.training.throughput.own_end import note_own_end
from lit_models.training.throughput.profiler import PhaseProfiler

WAIT_WITHIN = ("fsdp",)  # strategies that wait for other ranks in every phase


class Throughput(Callback):
    """Writes a line per log interval to `throughput.jsonl` of the run folder and to the loggers.

    No step waits for a device or another rank: a GPU is timed by events, read when long complete,
    and ranks tell each other once per interval, read a step later. Columns: throughput/README.md.

    Args:
        measures_ceiling: measure at the start what a matrix product reaches on the device, to
            compare the run with; takes up to a second. `auto` does so on a GPU.
    """

    def __init__(self, measures_ceiling: bool | Literal["auto"] = "auto") -> None:
        self.measures_ceiling = measures_ceiling
        self._capacity = Capacity()
        self._profiler: PhaseProfiler | None = None  # while it trains
        self._journal: Journal | None = None  # on rank 0
        self._seen_step, self._notes_own_end = 0, False  # the wait for others: a phase of ddp's

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ask what the device can do, while its memory is free."""
        asked, device = self.measures_ceiling, trainer.strategy.root_device
        measures = device.type == "cuda" if asked == "auto" else asked
        if stage == "fit" and trainer.is_global_zero and not trainer.fast_dev_run:
            self._capacity = capacity_of(device, str(trainer.precision), measures)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        if trainer.fast_dev_run:
            return
        strategy = trainer.strategy
        counts = self._capacity.counters(pl_module)  # nothing is known but on rank 0
        self._profiler = PhaseProfiler(clock_for(strategy.root_device), trainer.profiler, counts)
        waits_within = getattr(strategy, "strategy_name", "") in WAIT_WITHIN
        is_ddp = isinstance(strategy, DDPStrategy) and not waits_within
        self._notes_own_end = is_ddp and trainer.world_size > 1
        self._intervals = Intervals(self._profiler, strategy.root_device, not waits_within)
        self._seen_step = trainer.global_step
        if trainer.is_global_zero:  # the ledger has begun: it comes before
            attempt = getattr(ledger_of(trainer), "attempt", 1)
            self._journal = Journal(trainer, self._capacity, attempt)
        self._profiler.install(trainer)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        if self._notes_own_end and self._profiler is not None:
            note_own_end(loss, self._profiler.clock)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profiler is None:
            return
        if isinstance(batch, dict) and "load" in batch and tells_samples(trainer):
            self._intervals.current.add(batch["load"])
        step = trainer.global_step
        if step == self._seen_step:
            return  # in the middle of an accumulation
        self._seen_step = step
        if self._profiler.counts:
            self._capacity.take_count(self._profiler, self._intervals.current.positions)
        known = self._intervals.end_step(step, is_last=step % trainer.log_every_n_steps == 0)
        if known is not None and self._journal is not None:
            self._journal.write(trainer, known)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._profiler.clock.enter(EVALUATION)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._profiler is not None:
            self._profiler.clock.leave()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what is left; a collective."""
        if self._profiler is not None:
            for interval in self._intervals.end():
                if self._journal is not None:
                    self._journal.write(trainer, interval)
            self._stop(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say where the time went, after the last line of the progress."""
        if self._journal is not None and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.print(self._journal.words())

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Stop without asking the other ranks, which may be gone."""
        self._stop(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._profiler.remove(trainer)
            self._profiler = None
        if self._journal is not None:
            self._journal.close()
