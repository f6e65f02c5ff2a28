"""Checkpoints that are whole or absent: written aside, checked, renamed; loaded as plain data."""

import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lit_models.training.exported import is_exported, read_exported
from lit_models.training.hyperparameters import UNTRUSTED, StoredClasses
from lit_models.training.optim import AVERAGED as AVERAGED
from lit_models.training.sharded_checkpoint import (
    MARKER,
    Part,
    assemble,
    is_sharded,
    put_in_place,
    remove,
    shard_damage,
    write_part,
)

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
            checkpoint: what is saved; of `cut` where it is one rank's part.
            path: of the file, or of the folder that the parts make up.
            storage_options: the `Part` that is saved, none for a whole file.

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
            refused = error.__context__  # torch's own error hides what the storage said
            reason = refused if isinstance(refused, OSError) else error
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
    unfinished = target.with_name(f".{target.name}.unfinished")
    remove(unfinished)  # of a save that was killed: a file, or a folder under another strategy
    try:
        with open(unfinished, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        put_in_place(unfinished, target)
    except (OSError, RuntimeError):
        unfinished.unlink(missing_ok=True)
        raise


def damage(path: Path, every_byte: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, none if it is sound.

    Args:
        path: a file, or a folder of shards.
        every_byte: compare all checksums; without, only what a file cut short lacks is looked for.
    """
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
    fault = damage(folder / MARKER)
    if fault:
        return f"of its {MARKER}: {fault}"
    try:
        return shard_damage(folder, _load(folder / MARKER), every_byte)
    except ValueError as error:  # another program's
        return str(error)


def read_checkpoint(
    path: str | Path, mmap: bool = False, classes: StoredClasses = UNTRUSTED
) -> dict[str, Any]:
    """Return a checkpoint's content on the CPU.

    Args:
        path: file or folder of shards written by this project, or any Lightning checkpoint of
            plain values, or a folder that `unisono export` wrote.
        mmap: map the tensors instead of reading them, to look at the small parts of a large file;
            those of a folder have no values then.
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
    fault = damage(path, every_byte=not mmap)
    if fault:
        raise ValueError(
            f"the checkpoint {path} is damaged: {fault}. Use another one of its folder, or "
            "--ckpt_path auto, which takes the newest sound one."
        )
    content = _load(path / MARKER if path.is_dir() else path, mmap)
    if path.is_dir():
        content = assemble(path, content, is_empty=mmap)
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
    """Return the newest sound checkpoint of a run, none if it has none.

    Damaged files are named in a warning and passed over.
    """
    from lightning.pytorch.utilities import rank_zero_warn

    files = [p for p in (run_folder / "checkpoints").glob("*.ckpt") if not p.name.startswith(".")]
    for path in sorted(files, key=_written_at, reverse=True):
        fault = damage(path)
        if fault is None:
            return path
        rank_zero_warn(f"{path} is damaged ({fault}); the one before it is used.")
    return None


def _written_at(path: Path) -> int:
    marker = path / MARKER if is_sharded(path) else path
    return marker.stat().st_mtime_ns


def checkpoint_to_use(run_folder: Path) -> Path | None:
    """Return what an evaluation takes from a run: its best checkpoint, else its newest."""
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
        path: checkpoint of this project.
        part: name of a submodule, such as `encoder`; every one of its parameters must be there.
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
        raise ValueError(
            f"the weights of {path}{_of_class(content)} do not fit {type(module).__name__}: "
            f"{'; '.join(wrong[:3])}"
            f"{' …' if len(wrong) > 3 else ''}. Use the model options of that checkpoint, or take "
            "one part with model.init_from_part: encoder."
        )
    module.load_state_dict({**module.state_dict(), **{name: weights[name] for name in own}})


def _of_class(content: dict[str, Any]) -> str:
    """Return who wrote a checkpoint, " (of CLASS)", or "" where it does not say."""
    name = content.get("hyper_parameters", {}).get("_class_path")
    return f" (of {name})" if name else ""
