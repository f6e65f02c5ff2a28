"""The folder that `unisono export` writes: `model.safetensors` and `config.json`, plain data only.

A family may write the files of another program instead; what the config holds is then in
`unisono.json`. Read back it is the dict that a checkpoint gives, so that whatever takes weights
takes it too.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.core.store import sha256_of, sync
from lit_models.training.hyperparameters import UNTRUSTED, StoredClasses

CONFIG, WEIGHTS = "config.json", "model.safetensors"
OWN_CONFIG = "unisono.json"  # where config.json belongs to another program
FORMAT = "unisono export 1"
KEYS = ("class_path", "init_args", "source", "tied", "extra", "sha256")
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


@dataclass(frozen=True)
class Layout:
    """The files of another program's folder, which hold a module's weights in its form.

    Args:
        weights: name -> tensor, under that program's names.
        texts: file name -> content.
        values: keys of the export's config -> what they hold instead, such as "extra".
        replaced: arguments of the module's constructor that are not needed with these values.
        reader: how that program loads the folder; `{folder}` stands for it.
        weights_file: name of the file with the weights.
        is_whole: whether a module can be made of the folder alone.
    """

    weights: dict[str, Tensor]
    texts: dict[str, str]
    values: Mapping[str, Any] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()
    reader: str = ""
    weights_file: str = WEIGHTS
    is_whole: bool = True


def is_exported(path: str | Path) -> bool:
    """Return whether a path is a folder with the config of an export."""
    return any((Path(path) / name).is_file() for name in (CONFIG, OWN_CONFIG))


def check_target(folder: Path, overwrite: bool) -> None:
    """Raise where an export must not be written, before anything else is done.

    Raises:
        ValueError: the folder holds something, and is not to be replaced or is no export.
    """
    if folder.is_file():
        raise ValueError(f"--to {folder} is a file; name a folder.")
    held = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    if not held:
        return
    foreign = [name for name in held if name not in _own_files(folder)]
    if foreign:
        raise ValueError(
            f"--to {folder} holds other files ({', '.join(foreign[:3])}) and is never replaced; "
            "name a folder that is new or empty."
        )
    if not overwrite:
        raise ValueError(
            f"--to {folder} holds an export already; name another folder, or replace it with "
            "--overwrite=true."
        )


def _own_files(folder: Path) -> list[str]:
    """Return the names of files that an export wrote, or may have written before it was damaged."""
    path = folder / OWN_CONFIG
    if not path.is_file():
        return [WEIGHTS] if _is_foreign_config(folder / CONFIG) else [CONFIG, WEIGHTS]
    return [OWN_CONFIG, *_read_config(folder).get("files", [])]


def _is_foreign_config(path: Path) -> bool:
    """Return whether a config.json is sound and another program's: transformers names its own so.

    One that cannot be read may be of a damaged export, which is replaced.
    """
    try:
        config = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return not isinstance(config, dict) or "format" not in config


def write_exported(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, Tensor],
    overwrite: bool = False,
    layout: Layout | None = None,
) -> None:
    """Write the folder so that it is absent or whole at every moment.

    Args:
        folder: new or empty, or an export that may be replaced.
        config: what `config.json` holds; `tied` and `sha256` are added.
        weights: name -> tensor on the CPU; tensors that share memory are stored once.
        overwrite: replace an export that is there.
        layout: files of another program instead of config.json and these weights.

    Raises:
        ValueError: the folder must not be written.
        OSError: the storage refuses.
    """
    from safetensors import SafetensorError

    check_target(folder, overwrite)
    try:
        with _whole_or_absent(folder.absolute()) as unfinished:
            if layout is None:
                _write_files(unfinished, config, weights)
            else:
                _write_layout(unfinished, config, layout)
    except SafetensorError as error:  # what the storage said is inside its text
        raise OSError(
            f"{folder} could not be written: {error}. Free space or name another folder with --to."
        ) from error


@contextmanager
def _whole_or_absent(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; it takes the place of `folder` when all went well."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.replace(replaced)
        unfinished.replace(folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.exists() and replaced.exists():
            replaced.replace(folder)
        shutil.rmtree(replaced, ignore_errors=True)


def _write_files(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    tied = _write_weights(folder / WEIGHTS, weights)
    config = {"format": FORMAT, **config, "tied": tied, "sha256": sha256_of(folder / WEIGHTS)}
    _write_text(folder / CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def _write_layout(folder: Path, config: dict[str, Any], layout: Layout) -> None:
    tied = _write_weights(folder / layout.weights_file, layout.weights)
    for name, text in layout.texts.items():
        _write_text(folder / name, text)
    config = {
        "format": FORMAT,
        **config,
        "files": sorted([layout.weights_file, *layout.texts]),
        "weights_file": layout.weights_file,
        "is_whole": layout.is_whole,
        "tied": tied,
        "sha256": sha256_of(folder / layout.weights_file),
    }
    _write_text(folder / OWN_CONFIG, json.dumps(config, indent=1, ensure_ascii=False) + "\n")


def _write_weights(path: Path, weights: dict[str, Tensor]) -> dict[str, str]:
    """Write the tensors; return those that are left out as the double of another."""
    from safetensors.torch import save_file

    stored, tied = without_ties(weights)
    path.touch()
    mode = path.stat().st_mode  # of any file that the user makes; safetensors closes its own
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(mode)
    sync(path)
    return tied


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    sync(path)


def read_exported(folder: str | Path, classes: StoredClasses = UNTRUSTED) -> dict[str, Any]:
    """Return an exported folder as the dict that a checkpoint gives, tied tensors restored.

    Args:
        folder: as `unisono export` wrote it.
        classes: those that the folder may name.

    Raises:
        FileNotFoundError: one of its two files is missing.
        ValueError: a file is damaged, the two do not belong together, or a name is not allowed.
    """
    folder = Path(folder)
    config = _read_config(folder)
    weights = _read_weights(folder, config)
    missing = [kept for kept in config["tied"].values() if kept not in weights]
    if missing:
        raise ValueError(f"{folder / CONFIG} names tied tensors that are absent: {missing[:3]}.")
    weights |= {name: weights[kept] for name, kept in config["tied"].items()}
    if "weights_file" in config:
        from lit_models.training.export import class_of  # which imports this file

        restore = class_of(config["class_path"], folder, classes).restored_weights
        weights = restore(folder, weights, config["extra"])
    hyperparameters = {**config["init_args"], "_instantiator": _INSTANTIATOR}
    return {
        "state_dict": weights,
        "hyper_parameters": {**hyperparameters, "_class_path": config["class_path"]},
        "global_step": config["source"].get("global_step", 0),
        "epoch": config["source"].get("epoch", 0),
        **config["extra"],
    }


def without_ties(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what can be stored, and name -> stored name of each tensor that is another's double.

    safetensors refuses views and shared memory: contiguous copies are made of parts of a tensor.
    """
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in weights.items():
        tensor = tensor.detach()
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and key in seen:
            tied[name] = seen[key]
            continue
        seen[key] = name
        is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        stored[name] = tensor.contiguous().clone() if is_part else tensor.contiguous()
    # What still shares memory has another shape or order than the tensor it shares with.
    owners: set[int] = set()
    for name, tensor in stored.items():
        pointer = tensor.data_ptr()
        if tensor.numel() and pointer in owners:
            stored[name] = tensor.clone()
        owners.add(pointer)
    return stored, tied


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / OWN_CONFIG
    path = path if path.is_file() else folder / CONFIG
    if not path.is_file():
        what = "holds no config.json" if folder.is_dir() else "is no folder"
        raise FileNotFoundError(
            f"{folder} {what}; name a folder that `unisono export CKPT --to DIR` wrote."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); export the checkpoint again.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else None
        raise ValueError(
            f'{path} is not of `unisono export`: its format is {found!r}, not "{FORMAT}". Name a '
            "folder that this version of `unisono export` wrote."
        )
    lacking = [key for key in KEYS if key not in config]
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(lacking)}; export the checkpoint again.")
    return config


def _read_weights(folder: Path, config: dict[str, Any]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not config.get("is_whole", True):
        raise ValueError(
            f"{folder} holds an adapter alone, without the weights of its base; export the "
            "checkpoint without --adapter, or train on with the adapter (model.lora.adapter)."
        )
    path = folder / config.get("weights_file", WEIGHTS)
    if not path.is_file():
        raise FileNotFoundError(f"{folder} lacks {path.name}; export the checkpoint again.")
    if sha256_of(path) != config["sha256"]:  # the format itself has no checksum
        described = OWN_CONFIG if "weights_file" in config else CONFIG
        raise ValueError(
            f"{path} is damaged, or of another export than its {described}: their checksums "
            "differ. Copy the whole folder again, or export the checkpoint again."
        )
    try:
        return load_file(path, device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} cannot be read ({error}); export it again.") from error


def plain_names(weights: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights under the names of the bare module: no trace of who wrapped it.

    Raises:
        ValueError: two names become one, or an entry is no tensor.
    """
    inner = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
    plain: dict[str, Tensor] = {}
    is_wrapped = bool(weights) and all(name.startswith("module.") for name in weights)
    for name, value in weights.items():
        short = name.removeprefix("module.") if is_wrapped else name
        for wrapper in inner:
            short = short.replace(wrapper, "")
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"{name} is a {type(value).__name__}, not a tensor: safetensors cannot hold it. "
                "Keep it among the hyperparameters."
            )
        if short in plain:
            raise ValueError(f"two tensors of the checkpoint have the plain name {short}.")
        plain[short] = value
    return plain
