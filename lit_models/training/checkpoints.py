"""Checkpoints that are whole or absent: files, folders of shards, the last, the best.

Written aside, synced, renamed; loaded as plain data, never as code. A folder holds the shards of
all ranks, and a marker that is written last makes it a checkpoint:

    last.ckpt/shard-00001-model-00001-of-00001.safetensors   rank 0's pieces, as
        torch.distributed.checkpoint writes and reads them (HuggingFaceStorageWriter)
    last.ckpt/meta.pt   all else, the shapes, and size and sha256 of every shard file

The index of torch.distributed.checkpoint's own format is a pickle, which is code; that of
safetensors is JSON in each file. Ranks leave each other receipts in the folder.
"""

import copy
import json
import os
import pickle
import re
import shutil
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from datamodules.core.store import put_in_place, remove, sha256_of, sync
from lit_models.training.export import is_exported, read_exported
from lit_models.training.hyperparameters import AVERAGED as AVERAGED
from lit_models.training.hyperparameters import UNTRUSTED, StoredClasses

MARKER = "meta.pt"
FORMAT = "unisono shards 2"
FRESH = "next.ckpt"  # becomes last.ckpt when it is whole
_STANDS_FOR = "_sharded_tensor"
LATE_S, LATE_FACTOR = 20.0, 10.0  # a rank may be later than rank 0, and slower by a factor
Adapt = Callable[[dict[str, Any]], dict[str, Tensor]]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name, syncs, renames. The zip format's own checksums tell damage."""

    @staticmethod
    def install(trainer: Trainer) -> None:
        """Let a trainer save through this class, unless the user chose another one."""
        if type(trainer.strategy.checkpoint_io) is TorchCheckpointIO:
            trainer.strategy.checkpoint_io = AtomicCheckpointIO()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Save, so that `path` is the old file or the whole new one at every moment.

        Args:
            checkpoint: content; of `cut` where it is one rank's part.
            path: of the file, or of the folder that the parts make up.
            storage_options: the `Part` that is saved, `None` for a whole file.

        Raises:
            OSError: the folder cannot be written or the disk is full; the old file is kept.
        """
        target = Path(path)
        try:
            if isinstance(storage_options, Part):
                write_part(checkpoint, target, storage_options)
            else:
                _write_file(checkpoint, target)
        except (OSError, RuntimeError) as error:
            if str(error).startswith("DataLoader worker"):  # torch's signal handler came between
                raise
            hidden = error.__context__  # torch's own error hides what the storage said
            reason = hidden if isinstance(hidden, OSError) else error
            raise OSError(
                f"the checkpoint {target} could not be written: {reason}. The one before it is "
                "kept; free space or choose another trainer.default_root_dir."
            ) from error

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the content of a sound checkpoint; plain data only, code is never run."""
        # Lightning looks up by which of its versions a file was written; an export was by none.
        return {"pytorch-lightning_version": lightning.__version__, **read_checkpoint(path)}


def _write_file(checkpoint: dict[str, Any], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(target)
    remove(unfinished)  # of a save that was killed: a file, or a folder under another strategy
    try:
        _save(checkpoint, unfinished)
        put_in_place(unfinished, target)
    except (OSError, RuntimeError):
        unfinished.unlink(missing_ok=True)
        raise


def _save(content: dict[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())


def _unfinished(target: Path) -> Path:
    return target.with_name(f".{target.name}.unfinished")


def damage(path: Path, every_byte: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, file or folder of shards, `None` if it is sound;
    without `every_byte` no checksums are compared."""
    if path.is_dir():
        return _folder_damage(path, every_byte)
    if not path.is_file():
        return "it is not a file" if path.exists() else "it does not exist"
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip() if every_byte else None
    except zipfile.BadZipFile:
        return "it is cut short or no checkpoint"
    return f"the checksum of its record {broken} is wrong" if broken else None


def _folder_damage(folder: Path, every_byte: bool) -> str | None:
    if not is_sharded(folder):
        return f"it is a folder without {MARKER}: a save that was not finished, or no checkpoint"
    if fault := damage(folder / MARKER):
        return f"of its {MARKER}: {fault}"
    try:
        meta = _load(folder / MARKER)
    except ValueError as error:  # another program's
        return str(error)
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        return f"its {MARKER} is not of this format, {FORMAT!r}"
    for name, expected in meta["files"].items():
        path = folder / name
        if not path.is_file():
            return f"its shard {name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"its shard {name} is cut short or of another save"
        if every_byte and sha256_of(path) != expected["sha256"]:
            return f"the checksum of its shard {name} is wrong"
    return None


def read_checkpoint(
    path: str | Path, mmap: bool = False, classes: StoredClasses = UNTRUSTED
) -> dict[str, Any]:
    """Return a checkpoint's content on the CPU.

    Args:
        path: any Lightning checkpoint of plain values, a folder of shards, or a folder that
            `unisono export` wrote.
        mmap: map the tensors instead of reading them; those of shards have no values then.
        classes: those that an exported folder may name.

    Raises:
        FileNotFoundError: no such file.
        ValueError: damaged, or it holds more than plain data.
    """
    path = Path(path)
    if is_exported(path):
        return read_exported(path, classes)
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.ckpt"))
        there = f"That folder holds {', '.join(near[:5])}." if near else ""
        there = there or "A run keeps its own in runs/NAME/checkpoints."
        raise FileNotFoundError(f"there is no checkpoint {path}. {there}")
    if fault := damage(path, every_byte=not mmap):
        raise ValueError(
            f"the checkpoint {path} is damaged: {fault}. Use another one of its folder, or "
            "--ckpt_path auto, which takes the newest sound one."
        )
    content = _load(path / MARKER if path.is_dir() else path, mmap)
    if path.is_dir():
        content = _assemble(path, content, is_empty=mmap)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(
            f"{path} holds no state_dict; it is no checkpoint of a module. Use one that "
            "`unisono fit` wrote."
        )
    return content


def _load(path: Path, mmap: bool = False) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError) as error:
        named = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        reason = f"it names {named[1]}" if named else str(error).splitlines()[0]
        raise ValueError(
            f"{path} cannot be read as a checkpoint of plain data: {reason}. Only plain data is "
            "loaded, never code; use a checkpoint that `unisono fit` wrote."
        ) from error


def newest_checkpoint(run_folder: Path) -> Path | None:
    """Return the newest sound checkpoint of a run, if any; a warning names damaged ones."""

    def written_at(path: Path) -> int:
        return (path / MARKER if is_sharded(path) else path).stat().st_mtime_ns

    files = [p for p in (run_folder / "checkpoints").glob("*.ckpt") if not p.name.startswith(".")]
    for path in sorted(files, key=written_at, reverse=True):
        fault = damage(path)
        if fault is None:
            return path
        rank_zero_warn(f"{path} is damaged ({fault}); the one before it is used.")
    return None


def checkpoint_to_use(run_folder: Path) -> Path | None:
    """Return a run's checkpoint for evaluation: the best one, else the newest."""
    best = run_folder / "checkpoints" / "best.ckpt"
    return best if damage(best) is None else newest_checkpoint(run_folder)


def take_averaged(checkpoint: dict[str, Any]) -> None:
    """Put the averaged weights of a checkpoint, if it has any, in the place of the last ones."""
    checkpoint["state_dict"] = {**checkpoint["state_dict"], **checkpoint.get(AVERAGED, {})}


def load_part(
    module: LightningModule, path: str, part: str | None = None, adapt: Adapt | None = None
) -> None:
    """Copy weights from a checkpoint into a module: all of them, or one part.

    Args:
        module: with its network built.
        path: of the checkpoint.
        part: name of a submodule, such as `encoder`.
        adapt: makes the weights that fit this module from the checkpoint's content.

    Raises:
        ValueError: names or shapes do not fit; the first differences are listed.
    """
    content = read_checkpoint(path)
    take_averaged(content)
    weights = content["state_dict"] if adapt is None else adapt(content)
    own = module.state_dict()
    if part is not None:
        weights = {k: v for k, v in weights.items() if f".{part}." in f".{k}"}
        own = {k: v for k, v in own.items() if f".{part}." in f".{k}"}
        if not own:
            raise ValueError(f"init_from_part is {part!r}, but {type(module).__name__} has none.")
    wrong = [
        f"{name}: {'absent' if name not in weights else tuple(weights[name].shape)} "
        f"instead of {tuple(value.shape)}"
        for name, value in own.items()
        if name not in weights or weights[name].shape != value.shape
    ]
    if wrong:
        written_by = content.get("hyper_parameters", {}).get("_class_path")
        of_class = f" (of {written_by})" if written_by else ""
        raise ValueError(
            f"the weights of {path}{of_class} do not fit {type(module).__name__}: "
            f"{'; '.join(wrong[:3])}"
            f"{' …' if len(wrong) > 3 else ''}. Use the model options of that checkpoint, or take "
            "one part with model.init_from_part: encoder."
        )
    module.load_state_dict({**module.state_dict(), **{name: weights[name] for name in own}})


class Part(NamedTuple):
    """The rank whose part a CheckpointIO writes, and their number; its `storage_options`."""

    rank: int
    num_ranks: int


def is_sharded(path: str | Path) -> bool:
    """Return whether a path is a folder with the marker of a checkpoint."""
    return (Path(path) / MARKER).is_file()


def cut(checkpoint: dict[str, Any], is_first: bool) -> dict[str, Any]:
    """Return this rank's part of a checkpoint whose tensors are sharded; rank 0, `is_first`, keeps
    all that is not sharded. No communication."""
    part: dict[str, Any] = {"pieces": {}, "tensors": {}}
    rest = _cut(checkpoint, "", part, {})
    return {**part, "rest": rest} if is_first else part


def _cut(content: Any, key: str, part: dict[str, Any], known: dict[int, str]) -> Any:
    if isinstance(content, DTensor):
        local = content.detach().to_local()
        # Tied weights are one tensor under two names: rank 0, whose piece is never empty, names it.
        name = known.setdefault(local.data_ptr(), key) if local.numel() else key
        if name not in part["tensors"]:
            part["tensors"][name] = {"shape": list(content.shape), "dtype": content.dtype}
        if local.numel() and _is_first_copy(content):
            (item,) = create_default_local_save_plan({name: content}, True).items
            assert item.tensor_data is not None
            part["pieces"][name] = {"tensor": local, "offset": list(item.tensor_data.chunk.offsets)}
        return {_STANDS_FOR: name}
    if isinstance(content, dict):
        twin = copy.copy(content)
        for name, value in content.items():
            twin[name] = _cut(value, f"{key}.{name}" if key else str(name), part, known)
        return twin
    if type(content) in (list, tuple):
        return type(content)(_cut(v, f"{key}.{i}", part, known) for i, v in enumerate(content))
    return content


def _is_first_copy(tensor: DTensor) -> bool:
    """Return whether no other group of hybrid sharding or of tensor parallelism writes this piece:
    the copies of a tensor lie on meshes side by side, one of which has rank 0."""
    mesh = tensor.device_mesh
    if int(mesh.mesh.min()) != 0:
        return False
    where = mesh.get_coordinate() or []
    return all(
        c == 0 or not p.is_replicate() for c, p in zip(where, tensor.placements, strict=True)
    )


def prepare(target: Path) -> None:
    """Make the empty folder that all ranks write to; rank 0 does so before any of them begins."""
    unfinished = _unfinished(target)
    remove(unfinished)  # of a save that was killed: a folder, or a file under another strategy
    unfinished.mkdir(parents=True)


def write_part(content: dict[str, Any], target: Path, part: Part) -> None:
    """Write one rank's part; on rank 0 return when the whole folder is in the target's place.

    Args:
        content: of `cut`.
        target: what is there stays until all ranks are done, and takes no harm from an error.
        part: whose it is.

    Raises:
        OSError: the storage refused, here or on another rank, or a rank did not write.
    """
    folder = _unfinished(target)
    began = time.monotonic()
    receipt: dict[str, Any] = {"error": "the save was interrupted"}
    try:
        receipt = _write_shard(content["pieces"], folder, part.rank)
    except (OSError, RuntimeError) as error:
        receipt = {"error": str(error)}
        raise
    finally:
        if part.rank:
            path = _receipt(folder, part.rank)
            path.with_suffix(".written").write_text(json.dumps(receipt), encoding="utf-8")
            path.with_suffix(".written").replace(path)
    if part.rank:
        return
    try:
        limit_s = LATE_S + LATE_FACTOR * (time.monotonic() - began)
        for rank in range(1, part.num_ranks):
            receipt |= _receipt_of(folder, rank, limit_s)
        meta = {"format": FORMAT, "rest": content["rest"], "tensors": content["tensors"]}
        _save({**meta, "files": receipt}, folder / MARKER)
        sync(folder)
        put_in_place(folder, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class _Pieces(dcp.DefaultSavePlanner):
    """Hands tensors to a writer by their names: what is cut already needs no plan."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self.tensors[write_item.index.fqn]


def _write_shard(pieces: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    """Write a rank's pieces; return its file with size and sha256, nothing where it has none."""
    items, tensors = [], {}
    for name, piece in pieces.items():
        offset, value = torch.Size(piece["offset"]), piece["tensor"].cpu().contiguous()
        # A view of padded memory would be written with the padding.
        is_view = value.untyped_storage().nbytes() != value.numel() * value.element_size()
        tensors[name] = value = value.clone() if is_view else value
        chunk = ChunkStorageMetadata(offset, value.shape)
        data = TensorWriteData(chunk, TensorProperties(dtype=value.dtype), value.shape)
        items.append(WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data))
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    plans = [dcp.SavePlan([])] * rank + [dcp.SavePlan(items)]  # files are named by the place
    results = writer.write_data(writer.prepare_global_plan(plans)[-1], _Pieces(tensors)).wait()
    names = {result.storage_data.relative_path for result in results}
    return {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}
        for name in names
    }


def _receipt(folder: Path, rank: int) -> Path:
    return folder / f"receipt-{rank:05d}.json"


def _receipt_of(folder: Path, rank: int, limit_s: float) -> dict[str, Any]:
    """Return what another rank says of its shard file, and take the note away."""
    path, end = _receipt(folder, rank), time.monotonic() + limit_s
    while not path.exists():
        if time.monotonic() > end:
            raise OSError(
                f"rank {rank} did not write its shard within {limit_s:.0f} s. Do all nodes see "
                "the same folder?"
            )
        time.sleep(0.005)
    receipt = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    if "error" in receipt:
        raise OSError(f"on rank {rank}: {receipt['error']}")
    return receipt


def _assemble(folder: Path, meta: dict[str, Any], is_empty: bool) -> dict[str, Any]:
    """Return the checkpoint that a marker describes, whole, on the CPU; where it `is_empty`, with
    tensors on the meta device, and the shards unread."""
    device = "meta" if is_empty else "cpu"
    tensors = {
        key: torch.empty(facts["shape"], dtype=facts["dtype"], device=device)
        for key, facts in meta["tensors"].items()
    }
    if tensors and not is_empty:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # meant so
            reader = dcp.HuggingFaceStorageReader(str(folder))
            _check_shards(folder, meta, reader.read_metadata().state_dict_metadata)
            dcp.load(tensors, storage_reader=reader, no_dist=True)  # type: ignore[arg-type]
    return _joined(meta["rest"], tensors)


def _check_shards(folder: Path, meta: dict[str, Any], chunks: dict[str, Any]) -> None:
    """Refuse shards that do not make up the tensors of a marker: what none holds has no value."""
    if others := {p.name for p in folder.glob("*.safetensors")} - set(meta["files"]):
        raise ValueError(
            f"{folder} holds {', '.join(sorted(others))}, which its marker does not name; remove "
            "what does not belong there."
        )
    for key, facts in meta["tensors"].items():
        there = sum(chunk.sizes.numel() for chunk in chunks[key].chunks) if key in chunks else 0
        if there != torch.Size(facts["shape"]).numel():
            raise ValueError(
                f"{folder} is damaged: its shards do not make up {key}; use another checkpoint."
            )


def _joined(content: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(content, dict):
        if content.keys() == {_STANDS_FOR}:
            return tensors[content[_STANDS_FOR]]
        for name, value in content.items():
            content[name] = _joined(value, tensors)
        return content
    if type(content) in (list, tuple):
        return type(content)(_joined(value, tensors) for value in content)
    return content


class LastCheckpoint(Callback):
    """Saves `checkpoints/last.ckpt` at ends of optimizer steps; `previous.ckpt` is the one before.

    Lightning's ModelCheckpoint refuses steps and minutes together and lets `last` grow old when
    the monitored metric worsens. The clock is rank 0's, and all ranks learn of it by the ledger.

    Args:
        every_n_steps: optimizer steps between saves; `None` for no such rule.
        every_n_minutes: minutes between saves; `None` for no such rule.
        every_epoch: save at the end of each epoch too.

    Raises:
        ValueError: an interval that is not positive.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_n_minutes: float | None = 10.0,
        every_epoch: bool = True,
    ) -> None:
        for name, value in (("every_n_steps", every_n_steps), ("every_n_minutes", every_n_minutes)):
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}; leave it out for none.")
        self.every_n_steps = every_n_steps
        self.every_n_minutes = every_n_minutes
        self.every_epoch = every_epoch
        self._seen_step = self._saved_step = -1
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen_step, self._saved_at = trainer.global_step, time.monotonic()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._seen_step:
            return  # in the middle of an accumulation
        self._seen_step = trainer.global_step
        ledger = _ledger_of(trainer)
        by_steps = self.every_n_steps and trainer.global_step % self.every_n_steps == 0
        if by_steps or (ledger is not None and ledger.save_now):
            self._save(trainer)
        if ledger is not None:
            ledger.save_now = False
            minutes = (time.monotonic() - self._saved_at) / 60
            is_due = self.every_n_minutes is not None and minutes >= self.every_n_minutes
            ledger.wants_save = ledger.wants_save or (is_due and trainer.is_global_zero)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ledger = _ledger_of(trainer)
        is_left = ledger is not None and ledger.is_stopping and self._saved_step != self._seen_step
        if self.every_epoch or is_left:
            self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        if trainer.fast_dev_run:
            return
        folder = Path(trainer.default_root_dir) / "checkpoints"
        # The old ones give way when the new one is whole: a full disk takes none of them.
        trainer.save_checkpoint(folder / FRESH, weights_only=False)
        if trainer.is_global_zero:
            last = folder / "last.ckpt"
            if last.exists():
                put_in_place(last, folder / "previous.ckpt")
            put_in_place(folder / FRESH, last)
        self._saved_at, self._saved_step = time.monotonic(), trainer.global_step


def _ledger_of(trainer: Trainer) -> Any | None:
    """Return the callback by which ranks agree on saves; `Ledger` builds on this file."""
    return next((c for c in trainer.callbacks if hasattr(c, "wants_save")), None)


class BestCheckpoint(ModelCheckpoint):
    """Keeps `checkpoints/best.ckpt`, judged after each validation.

    Args:
        monitor: logged metric; `None` takes the module's own.
        mode: whether less or more is better; `None` takes the module's own.
    """

    def __init__(self, monitor: str | None = None, mode: str | None = None) -> None:
        super().__init__(
            monitor=monitor,
            mode=mode or "min",
            filename="best",
            auto_insert_metric_name=False,
            save_on_train_epoch_end=False,
            enable_version_counter=False,
        )
        self._given_mode = mode

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the metric from the module, and the folder from the run."""
        if self.monitor is None and hasattr(pl_module, "monitor_mode"):
            self.monitor = pl_module.monitor
            if self._given_mode is None:
                self.mode = pl_module.monitor_mode
                self.kth_value = self.kth_value.new_tensor(
                    float("inf") if self.mode == "min" else float("-inf")
                )
        if self.dirpath is None:
            self.dirpath = str(Path(trainer.default_root_dir) / "checkpoints")
        super().setup(trainer, pl_module, stage)
