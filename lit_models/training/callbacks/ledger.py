"""Ledger of optimizer steps: the samples that each used, over all ranks, and what came of it."""

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from datamodules.core.plan import count_targets
from lit_models.training.exact import ExactModule
from lit_models.training.host_copy import HostCopy
from lit_models.training.json_lines import complete_lines
from lit_models.training.lineage import chained, plan_hash
from lit_models.training.optim import budgeted_steps
from lit_models.training.record import StepSummary, read_vector, without_samples

FILE_NAME = "ledger.jsonl"
DEFAULT_LOG_INTERVAL = 50  # Lightning's


class Ledger(Callback):
    """Writes one line per optimizer step to `ledger.jsonl` of the run folder.

    One small vector is summed over ranks per step and read one step late, so that no step waits
    for another rank. What all ranks must decide together (stop, save by the clock) travels in it.
    Each line carries a hash chained to the line before; a checkpoint keeps the newest one.
    """

    def __init__(self) -> None:
        self.wants_stop = False  # this rank asks all ranks to stop
        self.wants_save = False  # this rank asks all ranks to save
        self.latest: dict[str, Any] = {}  # the newest line, equal on all ranks
        self.save_now = False  # all ranks decided to save at the end of this step
        self.is_stopping = False  # all ranks decided to stop
        self._pending: tuple[HostCopy, dict[str, Any], tuple[str, ...]] | None = None
        self._file: IO[str] | None = None
        self.attempt = 1  # of this run folder; known on rank 0
        self.steps_done = 0
        self._learning_rate = 0.0
        self._clock = 0.0
        self._hash = ""  # of the newest line; known on rank 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the ledger; a resumed run adds a line that says from which step it goes on."""
        self.steps_done, self._clock = trainer.global_step, time.perf_counter()
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        lines = self._open(trainer)
        self.attempt = 1 + max((line["attempt"] for line in lines), default=0)
        self._append(
            {
                "attempt": self.attempt,
                "resumed_from_step": trainer.global_step,
                "plan_digest": trainer.datamodule.request("train").digest(),
                "plan_hash": _write_plan(Path(trainer.default_root_dir), trainer),
                "world_size": trainer.world_size,
                "num_replicas": trainer.datamodule.num_replicas,
                "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            }
        )

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note the gradient's norm before clipping, and the rate that this step uses."""
        self._learning_rate = optimizer.param_groups[0]["lr"]
        if isinstance(pl_module, ExactModule):
            pl_module.step_record.gradient_norm(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """At the end of an optimizer step: send its vector, read the one before."""
        if trainer.global_step == self.steps_done or not isinstance(pl_module, ExactModule):
            return
        self.steps_done = trainer.global_step
        record = pl_module.step_record
        facts, norm = self._facts(trainer, batch), record.grad_norm
        vector = record.vector(self.wants_stop, self.wants_save, self.steps_done)
        if not tells_samples(trainer):
            vector = without_samples(vector)
        self.wants_save = False
        self._finish(trainer)
        work = dist.all_reduce(vector, async_op=True) if is_distributed() else None
        self._pending = (HostCopy(vector, work, norm), facts, record.term_names)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """The lines of all steps in a checkpoint must be on disk before the checkpoint is."""
        self._finish(trainer)
        checkpoint["ledger"] = {"hash": self._hash}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A run that ends by itself says so; one that was told to stop has a line that says why."""
        if self.is_stopping or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if self._file is None:  # nothing was left to train, as after a kill at the very end
            if not (Path(trainer.default_root_dir) / FILE_NAME).exists():
                return
            lines = self._open(trainer)
            if not lines or lines[-1].get("event") == "ended":
                return
            self.attempt = lines[-1]["attempt"]
        self.note({"event": "ended", "after_step": trainer.global_step})

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close without waiting: another rank may be gone, and its part of the vector with it."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def _open(self, trainer: Trainer) -> list[dict[str, Any]]:
        """Open the ledger for more lines, and return those it has."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE_NAME
        lines = complete_lines(path)
        self._hash = str(lines[-1].get("hash")) if lines else ""
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in teardown
        return lines

    def _close(self) -> None:
        self._pending = None
        if self._file is not None:
            self._file.close()
            self._file = None

    def _facts(self, trainer: Trainer, batch: Any) -> dict[str, Any]:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "step_in_epoch": int(batch["step_index"]),
            "attempt": self.attempt,
            "learning_rate": self._learning_rate,
            "seconds": round(seconds, 6),
            "world_size": trainer.world_size,
        }

    def _finish(self, trainer: Trainer) -> None:
        """Read the pending vector; every rank does so at the same step."""
        if self._pending is None:
            return
        copy, facts, term_names = self._pending
        self._pending = None
        numbers, norm = copy.read()
        summary = read_vector(numbers, term_names)
        self.latest = _line(facts, summary, norm)
        self.save_now = summary.save
        if summary.stop:
            self._stop(trainer)
        if self._file is not None:
            self._append(self.latest | _denied(trainer, self.latest))
        if trainer.is_global_zero and facts["step"] % log_interval(trainer) == 0:
            _log(trainer, self.latest)

    def _stop(self, trainer: Trainer) -> None:
        """End the run at this step, with a checkpoint and without a validation before it."""
        self.is_stopping = self.save_now = trainer.should_stop = True
        trainer.fit_loop.epoch_loop._skip_next_val = True

    def note(self, event: dict[str, Any]) -> None:
        """Append what happened beside the steps.

        Args:
            event: plain values, with the name of what happened as `event`.
        """
        self._append({**event, "attempt": self.attempt})

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._hash = chained(line, self._hash)
            self._file.write(json.dumps({**line, "hash": self._hash}) + "\n")
            self._file.flush()


def ledger_of(trainer: Trainer) -> Ledger | None:
    """Return the ledger among a trainer's callbacks."""
    return next((c for c in trainer.callbacks if isinstance(c, Ledger)), None)


def is_distributed() -> bool:
    """Return whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def tells_samples(trainer: Trainer) -> bool:
    """Return whether this rank's samples count: of a tensor group, one rank tells of them."""
    return not getattr(trainer.strategy, "repeats_samples", False)


def _line(facts: dict[str, Any], summary: StepSummary, norm: float | None) -> dict[str, Any]:
    terms = {n: {"sum": total, "count": count} for n, (total, count) in summary.terms.items()}
    return {
        **facts,
        "digest": summary.digest,
        "samples": summary.num_samples,
        "targets": {name: term["count"] for name, term in terms.items()},
        "loss": summary.loss,
        "terms": {name: t["sum"] / max(1.0, t["count"]) for name, t in terms.items()},
        "grad_norm": norm,
        "is_finite": summary.is_finite,
    }


def log_interval(trainer: Trainer) -> int:
    """Return steps between two points of the loggers: at least 50 points a run, however short,
    where `trainer.log_every_n_steps` is left at Lightning's 50."""
    interval = trainer.log_every_n_steps
    if interval != DEFAULT_LOG_INTERVAL:
        return interval
    steps = budgeted_steps(trainer.lightning_module)
    return interval if steps is None else max(1, min(interval, steps // 50))


def _log(trainer: Trainer, line: dict[str, Any]) -> None:
    values = {
        "train/loss": line["loss"],
        "train/learning_rate": line["learning_rate"],
        "train/grad_norm": line["grad_norm"],
        "train/samples_per_second": line["samples"] / max(line["seconds"], 1e-9),
        **{f"train/{name}": value for name, value in line["terms"].items()},
    }
    for logger in trainer.loggers:
        logger.log_metrics({k: v for k, v in values.items() if v is not None}, line["step"])


def _denied(trainer: Trainer, line: dict[str, Any]) -> dict[str, Any]:
    """Return the targets that the plan gives a step, where its loss counted others."""
    data = trainer.datamodule
    epoch = 0 if trainer.overfit_batches > 0 else line["epoch"]
    ids = data.plan("train", epoch).step_ids(line["step_in_epoch"])
    planned = count_targets(ids, data.datasets["train"].target_counts)
    agree = all(
        math.isclose(line["targets"][name], count, rel_tol=1e-6)
        for name, count in planned.items()
        if name in line["targets"]
    )
    return {} if agree else {"planned_targets": planned}


def _write_plan(folder: Path, trainer: Trainer) -> str:
    """Keep what the plan is made from beside the ledger, and return its hash: `unisono verify`
    makes it anew."""
    data = trainer.datamodule
    request = data.request("train")
    content = {
        "request": vars(request),
        "digest": request.digest(),
        "steps_per_epoch": data.steps_per_epoch,
        "repeats_first_epoch": trainer.overfit_batches > 0,
    }
    (folder / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    lengths = np.asarray(data.datasets["train"].lengths)
    np.save(folder / "plan_lengths.npy", lengths)
    return plan_hash(vars(request), trainer.overfit_batches > 0, lengths)
