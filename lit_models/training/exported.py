"""The folder that `unisono export` writes: `model.safetensors` and `config.json`, plain data only.

Read back it is the dict that a checkpoint gives, so that whatever takes weights takes it too.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lit_models.training.files import sha256_of, sync

CONFIG, WEIGHTS = "config.json", "model.safetensors"
FORMAT = "unisono export 1"
KEYS = ("class_path", "init_args", "source", "tied", "extra", "sha256")
_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"


def is_exported(path: str | Path) -> bool:
    """Return whether a path is a folder with the config of an export."""
    return (Path(path) / CONFIG).is_file()


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
    foreign = [name for name in held if name not in (CONFIG, WEIGHTS)]
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


def write_exported(
    folder: Path, config: dict[str, Any], weights: dict[str, Tensor], overwrite: bool = False
) -> None:
    """Write the folder so that it is absent or whole at every moment.

    Args:
        folder: new or empty, or an export that may be replaced.
        config: what `config.json` holds; `tied` and `sha256` are added.
        weights: name -> tensor on the CPU; tensors that share memory are stored once.
        overwrite: replace an export that is there.

    Raises:
        ValueError: the folder must not be written.
        OSError: the storage refuses.
    """
    from safetensors import SafetensorError

    check_target(folder, overwrite)
    folder = folder.absolute()
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    replaced = folder.with_name(f".{folder.name}.replaced")
    shutil.rmtree(unfinished, ignore_errors=True)  # of an export that was killed
    unfinished.mkdir(parents=True)
    try:
        _write_files(unfinished, config, weights)
        if folder.exists():
            shutil.rmtree(replaced, ignore_errors=True)
            folder.replace(replaced)
        unfinished.replace(folder)
        sync(folder.parent)
    except SafetensorError as error:  # what the storage said is inside its text
        raise OSError(
            f"{folder} could not be written: {error}. Free space or name another folder with --to."
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not folder.exists() and replaced.exists():
            replaced.replace(folder)
        shutil.rmtree(replaced, ignore_errors=True)


def _write_files(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    stored, tied = without_ties(weights)
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    config = {"format": FORMAT, **config, "tied": tied, "sha256": sha256_of(folder / WEIGHTS)}
    text = json.dumps(config, indent=1, ensure_ascii=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")
    for name in (WEIGHTS, CONFIG):
        sync(folder / name)


def read_exported(folder: str | Path) -> dict[str, Any]:
    """Return an exported folder as the dict that a checkpoint gives, tied tensors restored.

    Raises:
        FileNotFoundError: one of its two files is missing.
        ValueError: a file is damaged, or the two do not belong together.
    """
    folder = Path(folder)
    config = _read_config(folder)
    weights = _read_weights(folder, config["sha256"])
    missing = [kept for kept in config["tied"].values() if kept not in weights]
    if missing:
        raise ValueError(f"{folder / CONFIG} names tied tensors that are absent: {missing[:3]}.")
    weights |= {name: weights[kept] for name, kept in config["tied"].items()}
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
    path = folder / CONFIG
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


def _read_weights(folder: Path, sha256: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(f"{folder} lacks {WEIGHTS}; export the checkpoint again.")
    if sha256_of(path) != sha256:  # the format itself has no checksum
        raise ValueError(
            f"{path} is damaged, or of another export than its {CONFIG}: their checksums differ. "
            "Copy the whole folder again, or export the checkpoint again."
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
