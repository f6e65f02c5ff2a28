"""Exported folders: `model.safetensors` and `config.json`, plain data that needs no other file.

A family may write the files of another program instead; the config is then `unisono.json`. A folder
is read back as the dict that a checkpoint gives, so that it can be used wherever a checkpoint can.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from datamodules.core.store import replacing, sha256_of
from lit_models.training.hyperparameters import INSTANTIATOR, UNTRUSTED, StoredClasses

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OWN_CONFIG = "unisono.json"  # where config.json belongs to another program
FORMAT = "unisono export 1"
START_ONLY = ("init_from", "init_from_part")  # initial weights, which training has replaced


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
    config = {"format": FORMAT, **config, "tied": tied}
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
    if config.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not of `unisono export`: its format is {config.get('format')!r}, not "
            f'"{FORMAT}". Name a folder that this version of `unisono export` wrote.'
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
    is_module = isinstance(kind, type) and issubclass(kind, LightningModule)
    if not (is_module and hasattr(kind, "exported_layout")):  # ExactModule imports this file
        what = "cannot be imported" if kind is None else "is no ExactModule"
        raise ValueError(
            f"the class {class_path} {what}; give the import path of a LightningModule of this "
            "kind, such as lit_models.LitOccupationCoder, with its package on PYTHONPATH."
        )
    return kind
