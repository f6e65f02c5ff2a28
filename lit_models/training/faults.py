"""Faults of a run: signals, numbers that are not finite, ranks that fail or hang."""

import contextlib
import faulthandler
import json
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from datamodules.core.store import replacing
from lit_models.training.ledger import StepRecord, ledger_of, of_all_ranks

USR1 = getattr(signal, "SIGUSR1", None)  # only on POSIX
REQUEUE_SIGNALS = (signal.SIGTERM, *([] if USR1 is None else [USR1]))
REPEATED_WITHIN_S = 1.0  # one Ctrl-C can arrive twice, from the terminal and from a launcher
SHOWN_IDS = 20
LOADER_KILLED = "DataLoader worker"  # torch raises this from whatever code runs at the time
FAILURE, STACKS = "failure.json", "stacks"
# Errors of gloo and nccl on the remaining ranks when another rank is gone.
LOST = (
    "Connection (closed by peer|reset by peer|refused)|Broken pipe|NCCL|"
    "(Timed out waiting|Application timeout|Socket Timeout|wait timeout)"
)
WAIT_FOR_CAUSE_S = 3.0


class Preemption(Callback):
    """Saves and stops all ranks at the same step after SIGTERM, SIGUSR1 or the first SIGINT.

    The signal sets a flag in the ledger's vector, which all ranks read together. Lightning's way, a
    broadcast in the signal handler, hangs if ranks are at different places. A second SIGINT ends
    the run at once, after a save under way. The reason in the ledger decides the exit status; a
    stopped process ignores SIGUSR1 to its end: job scripts repeat it, and it would replace that.
    """

    received: signal.Signals | None = None
    _received_at = 0.0
    _before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the signals over from Lightning, before the data is read."""
        if stage != "fit" or threading.current_thread() is not threading.main_thread():
            return
        self.received = None  # from an earlier call
        # Replace Lightning's way: it waits for a broadcast in its handler and in every micro-batch.
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._before = {s: signal.signal(s, self._note) for s in (*REQUEUE_SIGNALS, signal.SIGINT)}

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if self.received is not None and (ledger := ledger_of(trainer)) is not None:
            ledger.wants_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record in the ledger why the run stopped."""
        if (ledger := ledger_of(trainer)) is not None and ledger.is_stopping:
            reason = (self.received or signal.SIGTERM).name
            ledger.note({"event": "stopped", "reason": reason, "step": trainer.global_step})

    def _note(self, signum: int, frame: FrameType | None) -> None:
        is_repeated = time.monotonic() - self._received_at < REPEATED_WITHIN_S
        if signum == signal.SIGINT and self.received is signal.SIGINT and not is_repeated:
            self._restore_handlers()
            raise KeyboardInterrupt
        if self.received is None:
            rank_zero_info(  # a warning would name this file
                f"{signal.Signals(signum).name}: the run saves and stops after the next step"
                + ("; once more ends it at once" if signum == signal.SIGINT else "")
            )
        self.received, self._received_at = signal.Signals(signum), time.monotonic()

    def _restore_handlers(self, trainer: Trainer | None = None, *_: Any, **__: Any) -> None:
        is_stopping = trainer and getattr(ledger_of(trainer), "is_stopping", False)
        if self._before and (self.received or is_stopping) and USR1 is not None:
            self._before[USR1] = signal.SIG_IGN
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    on_exception = teardown = _restore_handlers


class NonFinite(Callback):
    """Skips the update of weights and moments if the gradient is not finite.

    Muon and optimizers with `fused: true` skip it on the device; for others the host reads a flag,
    which costs a wait per step on a GPU. A loss that is not finite makes the gradient not finite
    (`ExactModule.exact_mean`), so that all ranks notice it.

    Args:
        policy: `stop` ends the run with an error; `skip` goes on with the next step.
    """

    most_skipped = 10  # updates in one run; after that it stops in any case
    num_skipped = 0
    _handled: dict[str, Any] | None = None  # ledger line that has been acted on

    def __init__(self, policy: Literal["stop", "skip"] = "stop") -> None:
        self.policy = policy

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Prevent the update if the gradient is not finite."""
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        record: StepRecord | None = getattr(pl_module, "step_record", None)
        norm = None if record is None else record.gradient_norm(optimizer)
        if norm is None or has_scaler:  # float16's loss scaler skips by itself
            return
        knows = getattr(optimizer, "_step_supports_amp_scaling", hasattr(optimizer, "found_inf"))
        if norm.device.type != "cpu" and knows:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        elif not math.isfinite(float(norm)):
            # Optimizers skip parameters without a gradient: no decay, no momentum, no step count.
            optimizer.zero_grad(set_to_none=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Act on the newest line of the ledger, on all ranks at the same step."""
        ledger = ledger_of(trainer)
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if ledger is None or ledger.latest.get("is_finite", True) or has_scaler:
            return
        epoch, step = ledger.latest["epoch"], ledger.latest["step"]
        if ledger.latest is self._handled:
            return
        self._handled = ledger.latest
        ranks = of_all_ranks(pl_module.step_record.suspects(step))
        wrong, used = (sorted({i for rank in ranks for i in rank[k]}) for k in (0, 1))
        ids = wrong or used
        self.num_skipped += 1
        facts = {"step": step, "sample_ids": ids, "policy": self.policy}
        ledger.note({"event": "not_applied", **facts})
        names, run = shown(ids), shlex.quote(str(trainer.default_root_dir))
        what = f"step {step}: loss or gradient is not finite; its update was not applied"
        if self.policy == "stop" or self.num_skipped > self.most_skipped:
            error = FloatingPointError(
                f"{what}. Samples: {names}. Look at it with `unisono replay {run} --step {step}`; "
                "the callback lit_models.training.NonFinite with policy skip goes on "
                f"({self.num_skipped - 1} of {self.most_skipped} left out so far)."
            )
            # The step that is under way by now is not the one at fault.
            error.__dict__["place"] = {"epoch": epoch, "step": step, "sample_ids": ids}
            raise error
        rank_zero_warn(f"{what} ({self.policy}). Samples: {names}.")

    on_validation_start = on_train_end = on_train_batch_end


@dataclass
class Watch:
    """Watchdog thread that checks when the training thread last made progress."""

    run: Path
    rank: int
    timeout_s: float  # without progress; the stack is written a little earlier
    end: Callable[[int], Any] = os._exit  # ends the process, whatever its threads do
    # Time (`time.monotonic()`) and place of the last progress; `None` before training began.
    beat: tuple[float, dict[str, Any]] | None = None
    is_over: threading.Event = field(default_factory=threading.Event)  # ends the thread

    def __post_init__(self) -> None:
        threading.Thread(target=self._look, daemon=True, name="watch").start()

    def _look(self) -> None:
        while not self.is_over.wait(min(5.0, self.timeout_s / 20)):
            if self.beat is None:
                continue
            since, place = self.beat
            waited = time.monotonic() - since
            if waited > 0.8 * self.timeout_s:
                folder = self.run / STACKS
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / f"rank-{self.rank}.txt", "w", encoding="utf-8") as file:
                    file.write(f"no progress for {waited:.0f} s; last: {json.dumps(place)}\n")
                    file.flush()
                    faulthandler.dump_traceback(file, all_threads=True)
            # Ranks that wait for this one have timed out by now; it must not be left running.
            if waited > 1.2 * self.timeout_s:
                text = f"rank {self.rank} made no progress for {waited:.0f} s in {place}: it hangs"
                text += ", or waits for a rank that does; it ends."
                print(text, file=sys.stderr, flush=True)
                self.end(1)


class FailureReport(Callback):
    """Reports rank, step and samples of the first failure, and ends ranks that hang.

    The failing rank writes `failure.json`, in an evaluation `failure-VERB.json`, and adds a note to
    its error; other ranks do not report that they lost the connection to it. With several processes
    and one of this project's strategies, a rank that makes no progress for
    `trainer.strategy.timeout` writes its stack to `stacks/rank-N.txt` and ends. Preparing data, the
    time before the first batch and merging predictions have no limit.
    """

    _place: dict[str, Any] = {}
    _batch: Any = None
    _watch: Watch | None = None
    _timeout_s: float | None = None  # in this call; `None` if no rank waits for another

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._place, self._batch = {"rank": trainer.global_rank, "verb": stage}, None
        name = FAILURE if stage == "fit" else "failure-" + stage + ".json"  # stage is an enum
        self._report, self._timeout_s = Path(trainer.default_root_dir) / name, None
        if stage != "fit":
            self._forget(trainer)
        if trainer.world_size > 1:
            # Lightning's own strategies, which scripts may use, do not expose their timeout.
            timeout = getattr(trainer.strategy, "timeout", None)
            self._timeout_s = timeout and timeout.total_seconds()
            if trainer.strategy.root_device.type == "cuda":  # for nccl's flight recorder
                folder = Path(trainer.default_root_dir).absolute() / STACKS / "nccl"
                folder.mkdir(parents=True, exist_ok=True)
                os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/rank_")

    def _forget(self, trainer: Trainer, *_: Any) -> None:
        """Delete the report that an earlier attempt left in the folder."""
        if trainer.is_global_zero:
            self._report.unlink(missing_ok=True)

    on_fit_start = _forget  # a script's folder is locked only now

    def on_train_batch_start(self, trainer: Trainer, _: Any, batch: Any, *others: Any) -> None:
        is_training = trainer.training  # read once: the property compares strings
        verb = "fit" if is_training else trainer.state.stage.value
        step = trainer.global_step + is_training
        self._place |= {"verb": verb, "epoch": trainer.current_epoch, "step": step}
        self._batch = batch
        if self._watch is None and self._timeout_s:
            self._watch = Watch(self._report.parent, trainer.global_rank, self._timeout_s)
        self._beat()

    on_validation_batch_start = on_test_batch_start = on_train_batch_start
    on_predict_batch_start = on_train_batch_start

    def _beat(self, *_: Any) -> None:
        if self._watch is not None:
            self._watch.beat = (time.monotonic(), dict(self._place))

    on_train_batch_end = on_validation_epoch_end = on_test_epoch_end = on_save_checkpoint = _beat

    def _end_watch(self, *_: Any, **__: Any) -> None:
        if self._watch is not None:
            self._watch.is_over.set()
            self._watch = None

    # Rank 0 may take any time to merge predictions, and no rank waits for it.
    on_train_end = on_predict_end = _end_watch

    def teardown(self, *_: Any, **__: Any) -> None:
        """Forget the batch: a failure before a test's first batch is not one of training."""
        self._end_watch()
        self._batch = None

    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        """Report what failed where, on the rank that failed first."""
        self._end_watch()
        ended_children = getattr(trainer.strategy, "ended_children", lambda: "")  # only ours
        ended = ended_children() or "it was killed, or it hangs"
        if not isinstance(exception, Exception):
            return
        run = Path(trainer.default_root_dir)
        exception.__dict__.setdefault("run_folder", str(run))  # for its traceback
        # Such an error only says that another rank is gone; that rank may have written why.
        is_lost = isinstance(exception, RuntimeError) and bool(re.search(LOST, str(exception)))
        exception.__dict__["is_lost"] = is_lost
        lost = f"the connection to another rank is lost; {ended}."
        if self._batch is None:  # then no rank has written a report
            if is_lost:
                exception.add_note(f"before the first batch {lost} Its output says why.")
            return
        end = time.monotonic() + WAIT_FOR_CAUSE_S
        while is_lost and not self._report.exists() and time.monotonic() < end:
            time.sleep(0.1)
        if is_lost and self._report.exists():
            exception.__dict__["is_echo"] = True
            return
        ids: list[int] = []  # without fillers
        try:
            if isinstance(self._batch, dict) and "sample_id" in self._batch:
                ids = self._batch["sample_id"][self._batch["weight"] > 0].tolist()
        except RuntimeError as silence:  # a GPU that has failed cannot be read any more
            self._place["samples_unknown"] = str(silence)
        report = {**self._place, "sample_ids": ids, **getattr(exception, "place", {})}
        report["error"] = f"{type(exception).__name__}: {exception}"
        where = "rank {rank}, {verb}, epoch {epoch}, step {step}".format_map(report)
        if is_lost:
            stacks = f" Stacks are in {run / STACKS}." if (run / STACKS).is_dir() else ""
            note = f"{where}: {lost}{stacks} What is saved is whole: --ckpt_path auto goes on."
        elif LOADER_KILLED in str(exception):
            note = (
                f"{where}: a process that loads data was killed, most often because the memory of "
                "this machine was used up. What is saved is whole: --ckpt_path auto goes on; fewer "
                "data.num_workers take less memory."
            )
        else:
            note = f"{where}, samples {shown(ids) or 'unknown'}."
            if report["verb"] == "fit":
                replay = f"unisono replay {shlex.quote(str(run))} --step {report['step']}"
                note += f" `{replay}` rebuilds this step on one device."
        if not hasattr(exception, "place"):  # else its message says it already
            exception.add_note(note)
        if not is_lost:
            # The first report stays.
            with contextlib.suppress(FileExistsError), replacing(self._report, is_new=True) as new:
                new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def shown(ids: list[int]) -> str:
    """Return the first sample ids of a list as text."""
    return ", ".join(map(str, ids[:SHOWN_IDS])) + " …" * (len(ids) > SHOWN_IDS)
