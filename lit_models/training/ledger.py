"""Ledger of optimizer steps: samples used over all ranks, losses and gradient norms."""

import json
import math
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from datamodules.core.plan import count_targets
from datamodules.shards.order import of_sources, plan_hash, write_lengths
from lit_models.run_files import LEDGER, Row, chained, complete_lines, json_lines
from lit_models.training.metrics import LossSum, hash_ids
from lit_models.training.optim import gradients
from lit_models.training.progress import budgeted_steps, settle_progress, settle_stops
from lit_models.training.sharding import total_norm

DEFAULT_LOG_INTERVAL = 50  # Lightning's
_NUM_FLAGS = 3  # at the start of a vector
_LIMB_BITS, _NUM_LIMBS = 21, 3  # 63 bits of digest, split so that float64 sums stay exact
_LIMB_MASK, _DIGEST_MASK = (1 << _LIMB_BITS) - 1, (1 << 63) - 1


class StepRecord:
    """Sums, counts and sample ids of one rank's optimizer step, kept on the computing device.

    Nothing waits for a GPU. `Ledger` sums `vector` over ranks and reads the sum.
    """

    def __init__(self) -> None:
        self.term_names: tuple[str, ...] = ()  # of the loss
        self.grad_norm: Tensor | None = None  # [] of this step, once `gradient_norm` was called
        self._sums: Tensor | None = None  # [limbs + 2 + 2 terms] float64
        # of each micro-batch so far: sample ids, which of them are no fillers, and loss
        self._used: list[tuple[Tensor, Tensor, Tensor]] = []
        self._recent: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def add(self, ids: Tensor, weight: Tensor, terms: dict[str, LossSum], loss: Tensor) -> None:
        """Add one micro-batch: ids [B] int64, weights [B] with 0 for fillers, totals and counts on
        this rank, and its share [] of the step's loss."""
        self.term_names, used, loss = tuple(terms), weight > 0, loss.detach()
        self._used.append((ids, used, loss))
        digest = torch.where(used, hash_ids(ids), 0).sum()
        places = torch.arange(0, _LIMB_BITS * _NUM_LIMBS, _LIMB_BITS, device=digest.device)
        counts = torch.cat([(digest >> places) & _LIMB_MASK, used.sum(0, keepdim=True)])
        values = [loss, *(value.detach() for term in terms.values() for value in term)]
        sums = torch.cat([counts.double(), torch.stack([value.double() for value in values])])
        self._sums = sums if self._sums is None else self._sums + sums

    def gradient_norm(self, optimizer: Optimizer) -> Tensor | None:
        """Return the norm [] of the whole gradient before it is clipped, `None` without gradients;
        a step's first call is a collective where parameters are sharded."""
        if self.grad_norm is None and (grads := gradients(optimizer)):
            self.grad_norm = total_norm(grads)
        return self.grad_norm

    def suspects(self, step: int) -> tuple[list[int], list[int]]:
        """Return this rank's sample ids in one of the last two steps: those in micro-batches whose
        loss is not finite, and all of them."""
        wrong: list[int] = []
        all_ids: list[int] = []
        for ids, used, loss in self._recent.get(step, []):
            all_ids += ids[used].tolist()
            wrong += [] if torch.isfinite(loss) else ids[used].tolist()
        return wrong, all_ids

    def vector(self, stop: bool, save: bool, step: int = 0) -> Tensor:
        """Return the finished step's vector [8 + 2 terms] float64, to be summed over ranks, and
        start the next step: flags (not finite, stop, save), digest, samples, loss, terms."""
        if self._sums is None:
            raise RuntimeError(
                "an optimizer step ended, but training_step never called exact_mean; the loss "
                "of an ExactModule must go through it."
            )
        finite = torch.isfinite(self._sums).all()
        if self.grad_norm is not None:
            finite = finite & torch.isfinite(self.grad_norm.to(finite.device))
        # Filled on the device: to copy a list there, the host would wait for the whole step.
        wishes = [self._sums.new_full((), float(wish)) for wish in (stop, save)]
        flags = torch.stack([(~finite).double(), *wishes])
        vector, self._sums, self.grad_norm = torch.cat([flags, self._sums]), None, None
        self._recent = {k: v for k, v in self._recent.items() if k == step - 1}
        self._recent[step], self._used = self._used, []
        return vector


def host_copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the host; from a GPU it is pinned and the copy asynchronous."""
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return target.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


class HostCopy:
    """Numbers on their way to the host: `.tolist()` would wait for everything queued on a GPU.
    `work` is an asynchronous collective that may still be summing them."""

    def __init__(self, numbers: Tensor, work: dist.Work | None = None) -> None:
        self._numbers, self._wait = numbers, None if work is None else work.wait
        if numbers.is_cuda:
            if work is not None:
                work.wait()  # with NCCL the stream waits, not the host
            self._numbers, event = host_copy(numbers), torch.cuda.Event()
            event.record()
            self._wait = event.synchronize

    def read(self) -> Any:
        """Return the numbers as `tolist` does."""
        if self._wait is not None:
            self._wait()
        return self._numbers.tolist()


class Ledger(Callback):
    """Writes one line per optimizer step to `ledger.jsonl` in the run folder.

    Each step sums one small vector over ranks. It is read one step later, so that no step waits,
    and carries requests to stop or save. The hash of a line includes that of the line before.
    """

    wants_stop = False  # this rank asks all ranks to stop
    wants_save = False  # this rank asks all ranks to save
    latest: Row = {}  # the newest line, equal on all ranks
    save_now = False  # all ranks save at the end of this step
    is_stopping = False  # all ranks are stopping
    _must_stop = False  # a rank asked to stop: all ranks do so at the end of the next step
    attempt = 1  # number of this start of the run; known on rank 0
    phase: Literal["step", "validation", "epoch"] = "step"  # completed last: see `settle_progress`
    steps_done = 0
    # The newest step's vector, gradient norm, facts and term names.
    _pending: tuple[HostCopy, HostCopy | None, Row, tuple[str, ...]] | None = None
    _file: IO[str] | None = None
    _learning_rate = _clock = 0.0
    _hash = ""  # of the newest line; known on rank 0
    _validated: dict[str, Tensor] = {}  # metrics of the newest validation

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not hasattr(pl_module, "step_record"):
            raise ValueError(
                f"the callback Ledger needs an ExactModule, got {type(pl_module).__name__}: leave "
                "it out of this Trainer's callbacks, or train the module with `unisono fit`."
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the ledger, append a line for this attempt, and save the plan's inputs beside it."""
        self.steps_done, self._clock = trainer.global_step, time.perf_counter()
        self.wants_stop = self.is_stopping = self._must_stop = False  # from an earlier call
        trainer.callback_metrics.update(self._validated)  # else empty until the first validation
        for config in trainer.lr_scheduler_configs:  # Lightning counts frequency in micro-batches
            if config.interval == "step":
                config.frequency *= trainer.accumulate_grad_batches
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        self.attempt = 1 + max((line["attempt"] for line in self._open(trainer)), default=0)
        data, folder = trainer.datamodule, Path(trainer.default_root_dir)
        request, repeats = data.request("train"), trainer.overfit_batches > 0
        lengths = data.datasets["train"].lengths
        content = {"request": vars(request), "steps_per_epoch": data.steps_per_epoch}
        content |= {"repeats_first_epoch": repeats}
        (folder / "plan.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        write_lengths(folder / "plan_lengths.npy", lengths)
        row = {
            "attempt": self.attempt,
            "resumed_from_step": trainer.global_step,
            "plan_digest": request.digest(),
            "plan_hash": plan_hash(vars(request), repeats, lengths),
            "world_size": trainer.world_size,
            "num_replicas": data.num_replicas,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        self._append(row)

    def on_before_optimizer_step(self, _: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Record the gradient norm before clipping, and the learning rate of this step."""
        self._learning_rate = optimizer.param_groups[0]["lr"]
        pl_module.step_record.gradient_norm(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """After an optimizer step, read the previous step's vector and start to sum this one's."""
        if trainer.global_step == self.steps_done:
            return  # in the middle of an accumulation
        record: StepRecord = pl_module.step_record
        self.steps_done, self.phase = trainer.global_step, "step"
        before, self._clock = self._clock, time.perf_counter()
        facts = {
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "step_in_epoch": int(batch["step_index"]),
            "attempt": self.attempt,
            "learning_rate": self._learning_rate,
            "seconds": round(self._clock - before, 6),
            "world_size": trainer.world_size,
        }
        norm = None if record.grad_norm is None else HostCopy(record.grad_norm)
        vector = record.vector(self.wants_stop, self.wants_save, self.steps_done)
        if not tells_samples(trainer):
            vector[_NUM_FLAGS:] = 0
        self.wants_save = False
        self._finish(trainer)
        # All ranks know of the stop request and stop now, with a checkpoint but without validation:
        # the resumed run begins with that. After the last step there is no resumed run to do it.
        if self._must_stop and trainer.global_step != budgeted_steps(trainer):
            self.is_stopping = self.save_now = trainer.should_stop = True
            trainer.fit_loop.epoch_loop._skip_next_val = True
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            for config in trainer.lr_scheduler_configs:
                config.strict = False  # its metric may come from the skipped validation
        work = dist.all_reduce(vector, async_op=True) if is_distributed() else None
        self._pending = (HostCopy(vector, work), norm, facts, record.term_names)

    def on_save_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Write the ledger lines of all steps in a checkpoint before the checkpoint itself."""
        self._finish(trainer)
        steps = trainer.datamodule.steps_per_epoch if trainer.state.fn == "fit" else None
        place = {"attempt": self.attempt, "hash": self._hash, "phase": self.phase}
        checkpoint["ledger"] = {**place, "steps_per_epoch": steps}

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Restore the position in the run; warn if the number of steps per epoch has changed."""
        if trainer.state.fn != "fit":
            return
        if "phase" not in checkpoint["ledger"]:
            raise ValueError(
                f"{trainer.ckpt_path} is of an earlier version, which stored no ends of epochs: "
                "finish the run with that version, or begin a new one with --model.init_from."
            )
        self.phase = checkpoint["ledger"]["phase"]
        settle_progress(trainer, checkpoint)
        settle_stops(trainer, checkpoint)
        then, now = checkpoint["ledger"]["steps_per_epoch"], trainer.datamodule.steps_per_epoch
        if then not in (None, now):
            rank_zero_warn(
                f"an epoch has {now} optimizer steps, and had {then} when the checkpoint was "
                "written: from here on this is a different run. Restore "
                "trainer.limit_train_batches, unless that is intended."
            )

    def on_validation_start(self, trainer: Trainer, *_: Any) -> None:
        self._finish(trainer)

    on_train_end = on_validation_start

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            self.phase = "validation"
            self._validated = {n: v.detach().cpu() for n, v in trainer.callback_metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": self._validated}  # some callbacks read them at the end of an epoch

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validated = state_dict["metrics"]

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        """End the loop if the run is stopping: to other callbacks, such as EarlyStopping, this must
        not be the end of an epoch, and their metric may be missing."""
        if self.is_stopping:
            raise StopIteration
        self.phase = "epoch"
        # In an epoch that was resumed, Lightning would else skip schedules that follow a metric.
        trainer.fit_loop.on_iteration_done()

    def on_fit_end(self, trainer: Trainer, *_: Any) -> None:
        """Record that the run ended by itself; a stopped run has a line already."""
        if self.is_stopping or not trainer.is_global_zero or trainer.fast_dev_run:
            return
        if self._file is None:  # nothing was left to train, as after a kill at the very end
            lines = json_lines(Path(trainer.default_root_dir) / LEDGER)
            if not lines or lines[-1].get("event") == "ended":
                return
            self.attempt = self._open(trainer)[-1]["attempt"]
        self.note({"event": "ended", "after_step": trainer.global_step})

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Close without waiting for the pending vector: another rank may be gone."""
        self._pending = None
        if self._file is not None:
            self._file.close()
            self._file = None

    teardown = on_exception

    def _open(self, trainer: Trainer) -> list[Row]:
        """Open the ledger for appending, and return its lines."""
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / LEDGER
        lines = complete_lines(path)
        self._hash = str(lines[-1].get("hash")) if lines else ""
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in teardown
        return lines

    def _finish(self, trainer: Trainer) -> None:
        """Read the pending vector, at the same step on every rank, and write its line."""
        if self._pending is None:
            return
        vector, norm, facts, term_names = self._pending
        self._pending = None
        not_finite, stop, save, *values = vector.read()
        limbs, (samples, loss, *pairs) = values[:_NUM_LIMBS], values[_NUM_LIMBS:]
        # Limbs are sums over micro-batches and ranks, which may exceed 21 bits: join with carry.
        digest = sum(int(limb) << (_LIMB_BITS * i) for i, limb in enumerate(limbs)) & _DIGEST_MASK
        counts = dict(zip(term_names, pairs[1::2], strict=True))
        totals = dict(zip(term_names, pairs[::2], strict=True))
        self.latest = {
            **facts,
            "digest": f"{digest:016x}",
            "samples": int(samples),
            "targets": counts,
            "loss": loss,
            "terms": {name: totals[name] / max(1.0, count) for name, count in counts.items()},
            "is_finite": not_finite == 0,
            "grad_norm": None if norm is None else norm.read(),
        }
        self.save_now, self._must_stop = save > 0, self._must_stop or stop > 0
        if self._file is not None:
            data = trainer.datamodule
            epoch = 0 if trainer.overfit_batches > 0 else facts["epoch"]
            ids = data.plan("train", epoch).step_ids(facts["step_in_epoch"])
            dataset = data.datasets["train"]
            planned = count_targets(ids, dataset.target_counts)
            both = counts.keys() & planned.keys()
            agree = all(math.isclose(counts[name], planned[name], rel_tol=1e-6) for name in both)
            sources = of_sources(data.request("train"), dataset.lengths, ids)
            more = {} if agree else {"planned_targets": planned}
            self._append(self.latest | ({"sources": sources} if sources else {}) | more)
        interval, steps = trainer.log_every_n_steps, budgeted_steps(trainer)
        if interval == DEFAULT_LOG_INTERVAL and steps is not None:
            interval = max(1, min(interval, steps // 50))  # 50 points of a short run
        if trainer.is_global_zero and interval and facts["step"] % interval == 0:
            shown = {"loss": loss, "learning_rate": facts["learning_rate"]}
            shown |= {} if norm is None else {"grad_norm": self.latest["grad_norm"]}
            shown["samples_per_second"] = samples / max(facts["seconds"], 1e-9)
            shown |= self.latest["terms"]
            for logger in trainer.loggers:
                values = {f"train/{name}": value for name, value in shown.items()}
                logger.log_metrics(values, facts["step"])

    def note(self, event: Row) -> None:
        """Append a line for an event: plain values, with its name as `event`."""
        self._append({**event, "attempt": self.attempt})

    def _append(self, line: Row) -> None:
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


def of_all_ranks(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order; a collective."""
    if not is_distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agree(what: str, own: str, way_out: str) -> None:
    """Raise RuntimeError on all ranks if the text of any rank differs from rank 0's; a collective.

    Args:
        what: what the texts describe, for the message.
        own: text of this rank.
        way_out: advice for the message.
    """
    texts = of_all_ranks(own)
    other = next((rank for rank, text in enumerate(texts) if text != texts[0]), None)
    if other is not None:
        raise RuntimeError(
            f"the ranks have different {what}: rank 0 {texts[0]}; rank {other} {texts[other]}. All "
            f"nodes need the same files, and ~ and relative paths are each node's own; {way_out}."
        )


def tells_samples(trainer: Trainer) -> bool:
    """Return whether this rank reports its samples: one rank of each tensor group does."""
    return not getattr(trainer.strategy, "repeats_samples", False)
