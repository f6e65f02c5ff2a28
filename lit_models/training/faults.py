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
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from datamodules.core.store import replacing
from lit_models.training.ledger import ledger_of, of_all_ranks, record_of

USR1 = getattr(signal, "SIGUSR1", None)  # POSIX alone has it
REQUEUE_SIGNALS = (signal.SIGTERM, *([] if USR1 is None else [USR1]))
REPEATED_WITHIN_S = 1.0  # one Ctrl-C can arrive twice, from the terminal and from a launcher
SHOWN_IDS = 20
LOADER_KILLED = "DataLoader worker"  # torch raises it wherever the training is by then
FAILURE, STACKS = "failure.json", "stacks"
# What gloo and nccl say on the ranks that are left when another one is gone.
LOST = (
    "Connection (closed by peer|reset by peer|refused)|Broken pipe|NCCL|"
    "(Timed out waiting|Application timeout|Socket Timeout|wait timeout)"
)
WAIT_FOR_CAUSE_S = 3.0


class Preemption(Callback):
    """SIGTERM, SIGUSR1 and the first SIGINT set a flag that travels in the ledger's vector.

    All ranks read it at the same step, save and stop: Lightning's broadcast inside a handler hangs
    as soon as ranks are at different places. A second SIGINT ends at once, after a save under way.
    The exit status comes from the reason in the ledger. A stopped run ignores SIGUSR1 to the end of
    its process: a job's script repeats it, and its default would take the place of that status.
    """

    received: signal.Signals | None = None
    _received_at = 0.0
    _before: dict[signal.Signals, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the signals over from Lightning, before the data is read."""
        if stage != "fit" or threading.current_thread() is not threading.main_thread():
            return
        self.received = None  # in an earlier call
        # Lightning's own: a broadcast and a wait in every micro-batch, and inside its handler.
        trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
        self._before = {s: signal.signal(s, self._note) for s in (*REQUEUE_SIGNALS, signal.SIGINT)}

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if self.received is not None and (ledger := ledger_of(trainer)) is not None:
            ledger.wants_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write down why the run stopped."""
        if (ledger := ledger_of(trainer)) is not None and ledger.is_stopping:
            reason = (self.received or signal.SIGTERM).name
            ledger.note({"event": "stopped", "reason": reason, "step": trainer.global_step})

    def _note(self, signum: int, frame: FrameType | None) -> None:
        is_repeated = time.monotonic() - self._received_at < REPEATED_WITHIN_S
        if signum == signal.SIGINT and self.received is signal.SIGINT and not is_repeated:
            self._give_back()
            raise KeyboardInterrupt
        if self.received is None:
            rank_zero_warn(
                f"{signal.Signals(signum).name}: the run saves and stops after the next step"
                + ("; once more ends it at once" if signum == signal.SIGINT else "")
            )
        self.received, self._received_at = signal.Signals(signum), time.monotonic()

    def _give_back(self, trainer: Trainer | None = None, *_: Any, **__: Any) -> None:
        is_told = trainer and getattr(ledger_of(trainer), "is_stopping", False)
        if self._before and (self.received or is_told) and USR1 is not None:
            self._before[USR1] = signal.SIG_IGN
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    on_exception = teardown = _give_back


class NonFinite(Callback):
    """Leaves weights and moments as they are where the gradient is not finite.

    Muon and optimizers that are `fused: true` skip the update on the device; for others the flag
    is read, which on a GPU costs a wait per step. A loss that is not finite makes its gradient so
    too (`ExactModule.exact_mean`): all ranks see the same.

    Args:
        policy: `stop` ends the run with an error; `skip` goes on with the next step.
    """

    most_skipped = 10  # in one run, before it stops after all
    num_skipped = 0
    _handled: dict[str, Any] | None = None  # line of the ledger

    def __init__(self, policy: Literal["stop", "skip"] = "stop") -> None:
        self.policy = policy

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Keep an update with a gradient that is not finite from being applied."""
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        record = record_of(pl_module)
        norm = None if record is None else record.gradient_norm(optimizer)
        if norm is None or has_scaler:  # a scaler of float16 skips by itself
            return
        knows = getattr(optimizer, "_step_supports_amp_scaling", hasattr(optimizer, "found_inf"))
        if norm.device.type != "cpu" and knows:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        elif not math.isfinite(float(norm)):
            # Optimizers pass over parameters without a gradient: no decay, no momentum, no count.
            optimizer.zero_grad(set_to_none=True)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Act on the newest line of the ledger, on all ranks at the same step."""
        ledger = ledger_of(trainer)
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if ledger is None or ledger.latest.get("is_finite", True) or has_scaler:
            return
        epoch, step = ledger.latest["epoch"], ledger.latest["step"]
        if ledger.latest is self._handled:
            return
        self._handled = ledger.latest
        ranks = of_all_ranks(record_of(pl_module).suspects(step))  # type: ignore[union-attr]
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
            # By now another step is under way.
            error.__dict__["place"] = {"epoch": epoch, "step": step, "sample_ids": ids}
            raise error
        rank_zero_warn(f"{what} ({self.policy}). Samples: {names}.")

    on_validation_start = on_train_end = on_train_batch_end


@dataclass
class Watch:
    """A thread that looks at the newest sign of life of the training thread."""

    run: Path
    rank: int
    timeout_s: float  # of silence; a little before it the stack is written
    end: Callable[[int], Any] = os._exit  # leaves the process, whatever its threads do
    # When and where training was last seen, by `time.monotonic()`; `None` before it began.
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
            # Those who wait for this rank have ended by now; it must not stay behind alone.
            if waited > 1.2 * self.timeout_s:
                text = f"rank {self.rank} made no progress for {waited:.0f} s in {place}: it hangs"
                text += ", or waits for a rank that does; it ends."
                print(text, file=sys.stderr, flush=True)
                self.end(1)


class FailureReport(Callback):
    """Names rank, step and samples of the first failure, and ends ranks that hang.

    A rank that fails writes `failure.json`, in an evaluation `failure-VERB.json`, and adds a note
    to its error; the others, which lose the connection, keep silent about theirs. With several
    processes a rank that makes no progress for `trainer.strategy.timeout` of a strategy of this
    project writes its stack to `stacks/rank-N.txt` and ends. Preparing data, the time before the
    first batch and the merge of predictions have no limit.
    """

    _place: dict[str, Any] = {}
    _batch: Any = None
    _watch: Watch | None = None
    _timeout_s: float | None = None  # of this call; `None` where nobody waits for it

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._place, self._batch = {"rank": trainer.global_rank, "verb": stage}, None
        name = FAILURE if stage == "fit" else "failure-" + stage + ".json"  # an enum
        self._report, self._timeout_s = Path(trainer.default_root_dir) / name, None
        if stage != "fit":
            self._forget(trainer)
        if trainer.world_size > 1:
            # Lightning's own strategies, of a script, keep theirs to themselves.
            timeout = getattr(trainer.strategy, "timeout", None)
            self._timeout_s = timeout and timeout.total_seconds()
            if trainer.strategy.root_device.type == "cuda":  # where nccl's recorder writes
                folder = Path(trainer.default_root_dir).absolute() / STACKS / "nccl"
                folder.mkdir(parents=True, exist_ok=True)
                os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder}/rank_")

    def _forget(self, trainer: Trainer, *_: Any) -> None:
        """Take away what an earlier attempt left in the folder."""
        if trainer.is_global_zero:
            self._report.unlink(missing_ok=True)

    on_fit_start = _forget  # that of a script is locked only now

    def on_train_batch_start(self, trainer: Trainer, _: Any, batch: Any, *others: Any) -> None:
        is_training = trainer.training  # looked up once: it compares texts
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

    # Merging predictions may take rank 0 any time, and no rank waits for it.
    on_train_end = on_predict_end = _end_watch

    def teardown(self, *_: Any, **__: Any) -> None:
        """Know no batch any more: a failure before the first one of a test is of no training."""
        self._end_watch()
        self._batch = None

    def on_exception(self, trainer: Trainer, _: Any, exception: BaseException) -> None:
        """Say what failed where, on the rank that failed first."""
        self._end_watch()
        ended_children = getattr(trainer.strategy, "ended_children", lambda: "")  # of ours
        ended = ended_children() or "it was killed, or it hangs"
        if not isinstance(exception, Exception):
            return
        run = Path(trainer.default_root_dir)
        exception.__dict__.setdefault("run_folder", str(run))  # for its traceback
        # It only says that another rank is gone, which may have written why.
        is_lost = isinstance(exception, RuntimeError) and bool(re.search(LOST, str(exception)))
        exception.__dict__["is_lost"] = is_lost
        lost = f"the connection to another rank is lost; {ended}."
        if self._batch is None:  # nor has any rank written a report
            if is_lost:
                exception.add_note(f"before the first batch {lost} One that failed says why.")
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
        except RuntimeError as silence:  # of a GPU that failed: it answers nothing any more
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
        if not hasattr(exception, "place"):  # else it says so itself
            exception.add_note(note)
        if not is_lost:
            # The first report stays.
            with contextlib.suppress(FileExistsError), replacing(self._report, is_new=True) as new:
                new.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def shown(ids: list[int]) -> str:
    """Return the first of some sample ids as a text."""
    return ", ".join(map(str, ids[:SHOWN_IDS])) + " …" * (len(ids) > SHOWN_IDS)
