"""Checkpoints that are complete or absent: files, folders of shards, the last, the best.

They are written under a temporary name, synced and renamed, and loaded as plain data, never as
code. A sharded checkpoint is a folder; a marker file that is written last makes it valid:

    last.ckpt/shard-00001-of-00002.safetensors   whole tensors, dealt to the ranks by their bytes
    last.ckpt/meta.pt   everything else, and size and sha256 of every shard file
"""

import copy
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning
import psutil
import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from datamodules.core.store import replacing, sync
from lit_models.run_files import (
    FORMAT,
    MARKER,
    STANDS_FOR,
    compared,
    damage,
    read_checkpoint,
    write_tensors,
)
from lit_models.training.ledger import HostCopy, host_copy, ledger_of
from lit_models.training.optim import AVERAGED
from lit_models.training.progress import budgeted_steps
from lit_models.training.rules import is_first_process

KEPT = {"last.ckpt": "previous.ckpt"}  # name of the old file once the new one is complete
LOGGERS = {"AppendingCSVLogger", "CSVLogger", "TensorBoardLogger"}  # these read no checkpoint
NOT_WRITTEN = (
    "the checkpoint {} could not be written: {}. The one before it is kept; free space or choose "
    "another trainer.default_root_dir."
)


class Saves(threading.local):
    """The save that a background thread writes while this one trains; each thread has its own."""

    folder: Path | None = None  # checkpoint folder of the run in training
    is_writer = False  # whether this thread is a background writer
    writing: Future[None] | None = None

    def may_wait(self, path: Path) -> bool:
        """Wait for the save under way, so that no two copies are held; return whether `path` may be
        written in the background, as nothing reads it before the run ends."""
        self.settle()
        return path.parent == self.folder and path.name in ("last.ckpt", "best.ckpt")

    def write(self, action: Callable[[], None], in_background: bool) -> None:
        """Run `action` in a thread, after queued GPU copies; return at once if `in_background`."""
        if self.is_writer:  # in a thread that a strategy's save has started
            return action()
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        copied = HostCopy(torch.zeros(1, device="cpu" if gpu is None else f"cuda:{gpu}"))

        def write() -> None:
            self.is_writer = True
            if gpu is not None:  # a new thread starts on GPU 0 and would take memory there
                torch.cuda.set_device(gpu)
            copied.read()
            action()

        self.writing = ThreadPoolExecutor(1, "checkpoint").submit(write)  # Python's exit waits
        self.settle(waits=not in_background)

    def settle(self, waits: bool = True) -> None:
        """Wait for the save under way unless `waits` is false; raise the error of a save, once."""
        if self.writing is not None and (waits or self.writing.done()):
            self.writing.exception()  # after an interrupt here, another call can wait again
            writing, self.writing = self.writing, None
            writing.result()


SAVES = Saves()


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name, syncs, renames. The zip format's checksums reveal damage."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save so that at any moment `path` is either the old file or the complete new one.

        Raises:
            OSError: the folder cannot be written or the disk is full; the old file is kept.
        """
        target = Path(path)
        content = on_host(checkpoint) if SAVES.may_wait(target) else checkpoint

        def write() -> None:
            try:
                with replacing(target, KEPT.get(target.name)) as new, open(new, "wb") as file:
                    torch.save(content, file)
            except (OSError, RuntimeError) as error:
                raise OSError(NOT_WRITTEN.format(target, _reason(error))) from error

        SAVES.write(write, in_background=content is not checkpoint)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint at rank 0's path, checked and, in a group, mapped; a collective."""
        SAVES.settle()
        has_group = dist.is_available() and dist.is_initialized()
        paths = [path]
        if has_group:
            dist.broadcast_object_list(paths)
        content = read_checkpoint(paths[0], mmap=has_group, every_byte=None)
        # Lightning expects the version that wrote the file, which an exported folder lacks.
        return {"pytorch-lightning_version": lightning.__version__, **content}


def on_host(checkpoint: dict[str, Any], is_small: bool = False) -> dict[str, Any]:
    """Return a host copy that later steps do not change, with shared tensors still shared; unless
    `is_small`, return the checkpoint itself if it exceeds half of the host's free memory."""
    tensors: list[Tensor] = []
    apply_to_collection(checkpoint, Tensor, tensors.append)
    if not is_small and sum(t.nbytes for t in tensors) > psutil.virtual_memory().available / 2:
        return checkpoint
    at = {id(t): (t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors if t.is_cuda}
    held = {at[id(t)]: t for t in tensors if t.is_cuda}  # one of tied tensors
    copies = {place: host_copy(tensor) for place, tensor in held.items()}
    return copy.deepcopy(checkpoint, {number: copies[place] for number, place in at.items()})


def _reason(error: Exception) -> str:
    """Return why a save failed."""
    hidden = error.__context__  # torch's error hides that of the storage
    return str(hidden if isinstance(hidden, OSError) else error)


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest undamaged checkpoint of a run, if any, by attempt and step, or by file time
    if it has no ledger. Only the first process compares checksums."""

    def age(path: Path) -> tuple[bool, bool, float, int, int]:
        attempt, step, is_whole = math.inf, 0, True  # a damaged one comes first, to be reported
        if damage(path, every_byte=False) is None:
            content = read_checkpoint(path, mmap=True, every_byte=False)
            ledger, is_whole = content.get("ledger", {}), "optimizer_states" in content
            attempt, step = ledger.get("attempt", 0), content["global_step"] if ledger else 0
        # The best one comes last: it lacks what follows its validation, such as EarlyStopping.
        return is_whole, path.name != "best.ckpt", attempt, step, path.stat().st_mtime_ns

    files = (run_folder / "checkpoints").glob("[!.]*.ckpt")
    for path in sorted(files, key=age, reverse=True):
        fault = damage(path, is_first_process())
        if fault is None:
            compared.add(path.absolute())
            return path
        rank_zero_warn(f"{path} is damaged ({fault}); the newest sound one is used.")
    return None


def checkpoint_to_use(run_folder: Path) -> Path | None:
    """Return a run's checkpoint for evaluation: the best one, else the newest."""
    best = run_folder / "checkpoints" / "best.ckpt"
    return best if damage(best, is_first_process()) is None else newest_checkpoint(run_folder)


def take_averaged(checkpoint: dict[str, Any]) -> None:
    """Replace the weights of a checkpoint by its averaged weights, if it has any."""
    own, averages = checkpoint["state_dict"], checkpoint.get(AVERAGED, {})
    # A tied weight has several names in the checkpoint, and its average has one.
    at = {own[name].data_ptr(): average for name, average in averages.items()}
    checkpoint["state_dict"] = {name: at.get(t.data_ptr(), t) for name, t in own.items()}


def load_part(module: LightningModule, path: str, part: str | None = None) -> None:
    """Copy weights from a checkpoint into a module: all of them, or one part.

    Args:
        module: an `ExactModule` with its network built; it gets what its `adapted_weights` returns.
        path: the checkpoint.
        part: name of a submodule, such as `encoder`.

    Raises:
        ValueError: names or shapes do not fit; the first differences are listed.
    """
    SAVES.settle()
    content = read_checkpoint(path, mmap=True, every_byte=None)
    take_averaged(content)
    weights, own = module.adapted_weights(content), module.state_dict()
    if part is not None:
        own = {k: v for k, v in own.items() if f".{part}." in f".{k}"}
        if not own:
            raise ValueError(f"init_from_part is {part!r}, but {type(module).__name__} has none.")
    taken = {name: weights[name] for name in own if name in weights}
    if wrong := misfits(own, taken):
        written_by = content.get("hyper_parameters", {}).get("_class_path")
        of_class = f" (of {written_by})" if written_by else ""
        raise ValueError(
            f"the weights of {path}{of_class} do not fit {type(module).__name__}: {wrong}. Use the "
            "model options of that checkpoint, or take one part with model.init_from_part: encoder."
        )
    if any(tensor.is_meta for tensor in own.values()):
        module.late_weights.append((n, t) for n, t in taken.items() if not t.is_meta)
    else:
        module.load_state_dict({**module.state_dict(), **taken})


def misfits(own: dict[str, Tensor], others: dict[str, Tensor]) -> str:
    """Return the first differences in names and shapes between two sets of weights, "" if none."""
    here, there = ({n: list(t.shape) for n, t in weights.items()} for weights in (own, others))
    names = [n for n in sorted(here.keys() | there.keys()) if here.get(n) != there.get(n)]
    wrong = [f"{n} {there.get(n, 'missing')} there, {here.get(n, 'missing')} here" for n in names]
    return "; ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")


def gathered(
    checkpoint: dict[str, Any], device: torch.device, num_writers: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a copy of a checkpoint with names in place of sharded tensors, and the whole tensors
    that this rank writes, by name, copied by `host_copy`; a collective.

    Args:
        num_writers: number of ranks, from 0 on, that share the tensors by their bytes.
    """
    sharded: dict[str, DTensor] = {}
    tied: dict[int, str] = {}
    of_weights = {id(tensor): name for name, tensor in checkpoint["state_dict"].items()}
    number = itertools.count()  # names tensors other than weights

    def named(tensor: DTensor) -> dict[str, str]:
        local, key = tensor.to_local(), of_weights.get(id(tensor), f"tensor {next(number)}")
        # Tied weights are one tensor under two names: rank 0, whose piece is never empty, names it.
        name = tied.setdefault(local.data_ptr(), key) if local.numel() else key
        sharded.setdefault(name, tensor)
        return {STANDS_FOR: name}

    rest = apply_to_collection(checkpoint, DTensor, named)
    names = [list(sharded)]
    dist.broadcast_object_list(names)  # rank 0's: it sees which tensors are tied
    sizes = {name: sharded[name].numel() * sharded[name].element_size() for name in names[0]}
    own: dict[str, Tensor] = {}
    total, before = max(1, sum(sizes.values())), 0
    for name, size in sizes.items():
        value = sharded[name].detach().to(device).full_tensor()
        if before * num_writers // total == dist.get_rank():
            own[name] = host_copy(value)
        before += size
    return on_host(rest, is_small=True), own


def write_folder(
    rest: dict[str, Any], tensors: dict[str, Tensor], target: Path, group: Any = None
) -> None:
    """Write a checkpoint as a folder, one file per rank with tensors of `gathered`; a collective of
    the default group or of `group`. The old folder stays until all ranks are done.

    Raises:
        OSError: on all ranks, if writing fails on any.
    """
    name = f"shard-{dist.get_rank() + 1:05d}-of-{dist.get_world_size():05d}.safetensors"

    def on_ranks(action: Callable[[], Any], first_alone: bool = False) -> list[Any]:
        result, failure = None, ""
        try:
            if not (first_alone and dist.get_rank()):
                result = action()
        except (OSError, RuntimeError, SafetensorError) as error:
            failure = _reason(error)
        # To rank 0 only: if all heard from all, a thousand ranks would send a million answers.
        answers = None if dist.get_rank() else [None] * dist.get_world_size()
        dist.gather_object((result, failure), answers, group=group)
        pairs: list[Any] = answers or [(result, failure)]
        failures = [f"on rank {rank}: {text}" for rank, (_, text) in enumerate(pairs) if text]
        outcome = [failures, pairs[0][0]]
        dist.broadcast_object_list(outcome, group=group)
        if outcome[0]:
            raise OSError(NOT_WRITTEN.format(target, "; ".join(outcome[0])))
        return [outcome[1], *(result for result, _ in pairs[1:])]

    def prepare() -> Path:
        unfinished = stack.enter_context(replacing(target, KEPT.get(target.name)))
        unfinished.mkdir()
        return unfinished

    def write() -> dict[str, dict[str, Any]]:
        if not tensors:
            return {}
        digest = write_tensors(tensors, folder / name)
        sync(folder / name)
        return {name: {"bytes": (folder / name).stat().st_size, "sha256": digest}}

    def finish() -> None:
        files = {name: facts for written in shards for name, facts in written.items()}
        torch.save({"format": FORMAT, "rest": rest, "files": files}, folder / MARKER)
        stack.close()  # renames the folder

    with ExitStack() as stack:
        folder = on_ranks(prepare, first_alone=True)[0]
        shards = on_ranks(write)
        on_ranks(finish, first_alone=True)


class LastCheckpoint(Callback):
    """Saves `checkpoints/last.ckpt` after optimizer steps; `previous.ckpt` is the one before.

    Lightning's ModelCheckpoint refuses to combine steps and minutes, and does not renew `last`
    while the monitored metric gets worse. Rank 0's clock counts; the ledger tells the others.

    Args:
        every_n_steps: optimizer steps between saves; `None` switches this off.
        every_n_minutes: minutes between saves; `None` switches this off.
        every_epoch: save at the end of each epoch too.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = 10.0,
        every_epoch: bool = True,
    ) -> None:
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.every_epoch = every_epoch
        self._first_step = self._seen_step = -1
        self._has_turn = False  # whether the newest step is due by `every_n_steps`

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self._first_step = self._seen_step = trainer.global_step
        self._saved_at = time.monotonic()
        if {type(logger).__name__ for logger in trainer.loggers} <= LOGGERS:
            SAVES.folder = Path(trainer.default_root_dir) / "checkpoints"

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self._seen_step:
            return  # in the middle of an accumulation
        self._seen_step = trainer.global_step
        SAVES.settle(waits=False)
        ledger = ledger_of(trainer)
        # The last step is saved after its validation, as a resumed run would have no step left.
        every, is_last = self.every_n_steps, self._seen_step == budgeted_steps(trainer)
        self._has_turn = every is not None and self._seen_step % every == 0
        if (self._has_turn and not is_last) or (ledger is not None and ledger.save_now):
            self._save(trainer)
        if ledger is not None:
            ledger.save_now = False
            minutes = (time.monotonic() - self._saved_at) / 60
            is_due = self.every_n_minutes is not None and minutes >= self.every_n_minutes
            ledger.wants_save = ledger.wants_save or (is_due and trainer.is_global_zero)

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if self.every_epoch and trainer.global_step > self._first_step:
            self._save(trainer)  # the epoch before, after callbacks and schedules have ended it

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        is_saved = getattr(ledger_of(trainer), "is_stopping", False)
        if (self.every_epoch or self._has_turn) and not is_saved:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        trainer.save_checkpoint(Path(trainer.default_root_dir, "checkpoints", "last.ckpt"), False)
        self._saved_at = time.monotonic()


class BestCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/best.ckpt` by the module's `monitor`, compared after each validation; for
    another metric use Lightning's `ModelCheckpoint`."""

    def __init__(self) -> None:
        super().__init__(
            filename="best",
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the metric from the module, and the folder from the run."""
        if self.monitor is None and hasattr(pl_module, "monitor_mode"):
            self.monitor, self.mode = pl_module.monitor, pl_module.monitor_mode
            self.kth_value = torch.tensor(torch.inf if self.mode == "min" else -torch.inf)
        self.dirpath = self.dirpath or str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)

    def on_load_checkpoint(self, trainer: Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        """Find the best checkpoint in a folder that was moved; forget its score if it is lost."""
        states, best = checkpoint["callbacks"], Path(str(self.dirpath), "best.ckpt")
        state = states.pop(self.state_key, None)
        if state and state["best_model_path"] and trainer.strategy.broadcast(best.exists()):
            paths = dict.fromkeys(("best_model_path", "kth_best_model_path"), str(best))
            state |= {**paths, "best_k_models": {str(best): state["best_model_score"]}}
            states[self.state_key] = {**state, "dirpath": self.dirpath}
