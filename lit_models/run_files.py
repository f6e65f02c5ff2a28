"""Files that a run leaves, read without Lightning: its ledger, checkpoints, exported folders.

An exported folder holds `model.safetensors` and `config.json`, plain data that needs no other file.
A family may write the files of another program instead; the config is then `unisono.json`. A folder
is read back as the dict that a checkpoint gives, so that it can be used wherever a checkpoint can.
"""

import hashlib
import json
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from datamodules.core.store import replacing, sha256_of
from lit_models import read_other
from lit_models.training.hyperparameters import INSTANTIATOR, UNTRUSTED, StoredClasses

LEDGER = "ledger.jsonl"
Row = dict[str, Any]  # a line of the ledger
# Of a sharded checkpoint: its last file, its format, the key in place of a tensor.
MARKER, FORMAT, STANDS_FOR = "meta.pt", "unisono shards 3", "_sharded_tensor"
CONFIG, WEIGHTS = "config.json", "model.safetensors"  # of an exported folder
OWN_CONFIG = "unisono.json"  # where config.json belongs to another program
EXPORT_FORMAT = "unisono export 1"
START_ONLY = ("init_from", "init_from_part")  # initial weights, which training has replaced
compared: set[Path] = set()  # checkpoints that this process has chosen as undamaged


def chained(line: Row, before: str) -> str:
    """Return the hash of a ledger line, 16 hex digits: of the hash `before`, which is that of the
    line before or "" for the first line, and of the line without its own `hash`."""
    text = json.dumps({name: value for name, value in line.items() if name != "hash"})
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()[:16]


def json_lines(path: Path) -> list[Row]:
    """Return the JSON lines of a file, [] if it does not exist; skip a last line cut off by a kill.

    Raises:
        ValueError: a complete line is not a JSON object.
    """
    whole, *_ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
    rows = []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            rows.append({**json.loads(line)})
        except (ValueError, TypeError, RecursionError) as error:
            raise damaged_file(path, error, number) from error
    return rows


def damaged_file(path: Path, reason: object, line: int | None = None) -> ValueError:
    """Return the error for a damaged file of a run folder, or for one damaged line in it."""
    place = path if line is None else f"{path}, line {line}"
    return ValueError(
        f"{place} is damaged ({str(reason)[:60]}); only the run writes it: copy it again from "
        "where it was whole, or choose another run folder."
    )


def complete_lines(path: Path) -> list[Row]:
    """Like `json_lines`, but also truncate the file after its last complete line."""
    rows = json_lines(path)
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
    return rows


def stop_reason(run: Path) -> str | None:
    """Return the signal on which the newest attempt of a run saved and stopped, else `None`."""
    rows = json_lines(run / LEDGER)
    return rows[-1]["reason"] if rows and rows[-1].get("event") == "stopped" else None


def damage(path: Path, every_byte: bool = True) -> str | None:
    """Return what is wrong with a checkpoint, a file or a folder of shards, `None` if undamaged;
    without `every_byte` the checksums of tensors are not compared."""
    if path.is_dir():
        if not (path / MARKER).is_file():
            return f"it is a folder without {MARKER} or {CONFIG}: not finished, or no checkpoint"
        if fault := damage(path / MARKER):
            return f"of its {MARKER}: {fault}"
        try:
            meta = plain_data(path / MARKER)
        except ValueError as error:  # written by another program
            return str(error)
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            return f"its {MARKER} is not of this format, {FORMAT!r}"
        for name, expected in meta["files"].items():
            shard = path / name
            if not shard.is_file():
                return f"its shard {name} is missing"
            if shard.stat().st_size != expected["bytes"]:
                return f"its shard {name} is cut short or of another save"
            if every_byte and sha256_of(shard) != expected["sha256"]:
                return f"the checksum of its shard {name} is wrong"
        return None
    if not path.is_file():
        return "it is not a file" if path.exists() else "it does not exist"
    if path.stat().st_size == 0:
        return "it is empty"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip() if every_byte else None
            for name in [] if every_byte else archive.namelist():
                if name.endswith("/data.pkl"):  # the index of its tensors
                    archive.read(name)
    except zipfile.BadZipFile:
        return "it is cut short or no checkpoint"
    return f"the checksum of its record {broken} is wrong" if broken else None


def read_checkpoint(
    path: str | Path,
    mmap: bool = False,
    classes: StoredClasses = UNTRUSTED,
    every_byte: bool | None = True,
) -> dict[str, Any]:
    """Return a checkpoint's content on the CPU.

    Args:
        path: any Lightning checkpoint of plain values, a folder of shards, or a folder that
            `unisono export` wrote.
        mmap: map tensors in memory, so that their bytes are read only when used.
        classes: classes that an exported folder may name.
        every_byte: compare checksums, which reads everything; `None`: on rank 0, if not done yet.

    Raises:
        FileNotFoundError: the checkpoint does not exist.
        ValueError: it is damaged, or holds more than plain data.
    """
    path = Path(path).expanduser()
    if (other := read_other(path)) is not None:
        return other
    if any((path / name).is_file() for name in (CONFIG, OWN_CONFIG)):
        return read_exported(path, classes)
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    has_shards = folder == path and any((*path.glob("*.pt"), *path.glob("*.safetensors")))
    if not path.exists() or (folder.is_dir() and not has_shards):  # a run, or runs
        home = folder if folder.is_dir() else path.parent
        near = sorted(p.name for p in home.glob("*.ckpt"))
        there = "A run keeps its own in runs/NAME/checkpoints."
        there = f"The folder {home} holds {', '.join(near[:5])}." if near else there
        raise FileNotFoundError(f"there is no checkpoint {path}. {there}")
    if every_byte is None:
        has_group = dist.is_available() and dist.is_initialized()
        every_byte = path.absolute() not in compared and not (has_group and dist.get_rank())
        compared.discard(path.absolute())  # next time it may be a different file
    if fault := damage(path, every_byte):
        raise ValueError(
            f"the checkpoint {path} is damaged: {fault}. Use another one of its folder, or "
            "--ckpt_path auto, which takes the newest sound one."
        )
    content = plain_data(path / MARKER if path.is_dir() else path, mmap)
    if path.is_dir():
        tensors: dict[str, Tensor] = {}
        for name in content["files"]:
            mapped = load_file(path / name)
            tensors |= mapped if mmap else {key: value.clone() for key, value in mapped.items()}
        content = put_together(content["rest"], tensors)
    if not isinstance(content, dict) or not isinstance(content.get("state_dict"), dict):
        raise ValueError(
            f"{path} holds no state_dict; it is no module's checkpoint. Use one of `unisono fit`."
        )
    return content


def plain_data(path: Path, mmap: bool = False) -> Any:
    """Return the content of a file; ValueError if it is damaged or holds code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError) as error:
        named = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        reason = f"it names {named[1]}" if named else str(error).splitlines()[0]
        raise ValueError(
            f"{path} cannot be read as a checkpoint of plain data: {reason}. Only plain data is "
            "loaded, never code; use a checkpoint that `unisono fit` wrote."
        ) from error


def put_together(rest: Any, tensors: dict[str, Tensor]) -> Any:
    """Return the checkpoint made of the two parts that `gathered` returns."""
    if not isinstance(rest, dict):
        return apply_to_collection(rest, dict, put_together, tensors)
    if rest.keys() == {STANDS_FOR}:
        return tensors[rest[STANDS_FOR]]
    return {name: put_together(value, tensors) for name, value in rest.items()}


@dataclass(frozen=True)
class Layout:
    """Files of an exported folder: those of another program, or the weights only."""

    weights: dict[str, Tensor]  # name -> tensor, under that program's names
    # File name -> content of that program's text files; empty in unisono's own layout.
    texts: dict[str, str] = field(default_factory=dict)
    # Values that replace those of the export's config, such as "extra".
    values: Mapping[str, Any] = field(default_factory=dict)
    # Constructor arguments of the module that these values make unnecessary.
    replaced: tuple[str, ...] = ()
    reader: str = ""  # Python that loads `{folder}` in that program
    weights_file: str = WEIGHTS  # name of the file with the weights
    is_whole: bool = True  # whether a module can be created from the folder alone


def paths_in(value: Any) -> set[str]:
    """Return the hyperparameters that name files on this machine, which an export does not hold."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return set().union(*(paths_in(item) for item in value))
    # "/" alone is some option's value, such as a separator, not the root folder.
    is_path = isinstance(value, str) and "/" in value.strip("/") and os.path.exists(value)
    return {value} if is_path else set()


def write_exported(folder: Path, config: dict[str, Any], layout: Layout) -> None:
    """Write the folder so that it is absent or complete at every moment.

    safetensors refuses views and shared memory: both are copied. A tied tensor is stored once, and
    the config lists its other names: name -> name of the stored tensor.

    Args:
        folder: new or empty.
        config: content of the export's config; what `layout` says is added.

    Raises:
        OSError: the storage refuses.
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    owners: set[int] = set()
    for name, tensor in layout.weights.items():
        tensor, pointer = tensor.detach(), tensor.data_ptr()
        key = (pointer, tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        whole = tensor.contiguous()
        stored[name] = whole.clone() if is_part or pointer in owners else whole
        owners.add(pointer)
    config = {"format": EXPORT_FORMAT, **config, "tied": tied}
    if layout.texts:
        config |= {"weights_file": layout.weights_file, "is_whole": layout.is_whole}
    try:
        with replacing(folder) as unfinished:
            unfinished.mkdir()
            config["sha256"] = write_tensors(stored, unfinished / layout.weights_file)
            name = OWN_CONFIG if layout.texts else CONFIG
            own = {name: json.dumps(config, indent=1, ensure_ascii=False) + "\n"}
            for name, text in {**layout.texts, **own}.items():
                (unfinished / name).write_text(text, encoding="utf-8")
    except SafetensorError as error:  # its text includes the storage's error
        raise OSError(
            f"{folder} could not be written: {error}. Free space or name another folder with --to."
        ) from error


def write_tensors(tensors: dict[str, Tensor], path: Path) -> str:
    """Write a safetensors file with the user's default permissions; return its sha256."""
    path.touch()
    mode = path.stat().st_mode  # safetensors' own permissions exclude the user's group
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)
    return sha256_of(path)


def read_exported(folder: str | Path, classes: StoredClasses = UNTRUSTED) -> dict[str, Any]:
    """Return an exported folder as the dict that a checkpoint gives, with tied tensors restored.

    Raises:
        FileNotFoundError: one of its two files is missing.
        ValueError: a file is damaged, the two do not belong together, or a name is not allowed.
    """
    folder = Path(folder)
    path = folder / OWN_CONFIG
    path = path if path.is_file() else folder / CONFIG
    try:
        config = {**json.loads(path.read_text(encoding="utf-8"))}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); export the checkpoint again.") from error
    if config.get("format") != EXPORT_FORMAT:
        raise ValueError(
            f"{path} is not of `unisono export`: its format is {config.get('format')!r}, not "
            f'"{EXPORT_FORMAT}". Name a folder that this version of `unisono export` wrote.'
        )
    if not config.get("is_whole", True):
        raise ValueError(
            f"{folder} holds an adapter alone, without the weights of its base; export the "
            "checkpoint without --adapter."
        )
    weights_path = folder / config.get("weights_file", WEIGHTS)
    if not weights_path.is_file():
        raise FileNotFoundError(f"{folder} lacks {weights_path.name}; export the checkpoint again.")
    if sha256_of(weights_path) != config["sha256"]:  # the format itself has no checksum
        raise ValueError(
            f"{weights_path} is damaged, or of another export than its {path.name}: their "
            "checksums differ. Copy the whole folder again, or export the checkpoint again."
        )
    weights = load_file(weights_path, device="cpu")
    weights |= {name: weights[kept] for name, kept in config["tied"].items()}
    if path.name == OWN_CONFIG:
        restore = class_of(config["class_path"], folder, classes).restored_weights
        weights = restore(weights, config["extra"])
    return {
        "state_dict": weights,
        "hyper_parameters": {
            **config["init_args"],
            "_instantiator": INSTANTIATOR,
            "_class_path": config["class_path"],
        },
        "global_step": config["source"].get("global_step", 0),
        "epoch": config["source"].get("epoch", 0),
        **config["extra"],
    }


def class_of(class_path: str, source: str | Path, classes: StoredClasses) -> Any:
    """Return the module class that a file names by its import path.

    Raises:
        ValueError: it cannot be imported, is no `ExactModule`, or is not allowed by `classes`.
    """
    kind = classes.of_module(source, class_path)
    is_module = isinstance(kind, type) and issubclass(kind, nn.Module)
    if not (is_module and hasattr(kind, "exported_layout")):  # ExactModule imports this file
        what = "cannot be imported" if kind is None else "is no ExactModule"
        raise ValueError(
            f"the class {class_path} {what}; give the import path of a LightningModule of this "
            "kind, such as lit_models.LitOccupationCoder, with its package on PYTHONPATH."
        )
    return kind
