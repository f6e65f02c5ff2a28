"""A model's folder in the Hugging Face layout: config.json, and safetensors in one file or more."""

import json
from pathlib import Path
from typing import Any

from torch import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth")


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the content of a folder's config.json.

    Raises:
        FileNotFoundError: there is no such folder, or no config.json in it.
        ValueError: the file is damaged or names no model type.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f'"{folder}" is no folder; models are read from local ones. Download it first, such '
            f"as with: hf download {folder} --local-dir models/{folder.name}"
        )
    content = _read_json(folder / CONFIG)
    if not isinstance(content.get("model_type"), str):
        raise ValueError(
            f"{folder / CONFIG} names no model_type, so it is no model of transformers; give a "
            "folder that save_pretrained or hf download made."
        )
    return content


def weight_files(folder: str | Path) -> list[Path]:
    """Return the safetensors files of a folder.

    Raises:
        FileNotFoundError: there are none, or one that the index names is missing.
        ValueError: the weights are pickled, or the index is damaged.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ValueError(
            f"{folder} holds its weights as {pickled[0]}, a pickle, which can run any code when it "
            "is read: only safetensors are. Take a revision with model.safetensors, or convert it "
            "where you trust it (from_pretrained, then save_pretrained, of transformers)."
        )
    raise FileNotFoundError(
        f"{folder} holds no {WEIGHTS} and no {INDEX}; copy or download the model's weights."
    )


def read_weights(folder: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, on the CPU, in the dtypes of the files.

    Raises:
        FileNotFoundError: as `weight_files`.
        ValueError: as `weight_files`, or a file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    for path in weight_files(folder):
        try:
            weights.update(load_file(path))
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}); copy or download it again.") from error
    return weights


def _indexed_files(folder: Path) -> list[Path]:
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(name, str) and Path(name).name == name for name in places.values()
    ):
        raise ValueError(
            f"{folder / INDEX} has no weight_map of file names beside it; download it again."
        )
    files = [folder / name for name in sorted(set(places.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {len(missing)} of {len(files)} files that its index names "
            f"({', '.join(missing[:3])}); copy or download them."
        )
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{path} is missing: {path.parent} is no model in the Hugging Face layout; give a "
            "folder that save_pretrained or hf download made."
        ) from error
    except ValueError as error:  # no JSON, or no UTF-8
        raise ValueError(f"{path} is damaged ({error}); copy or download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no object; copy or download it again.")
    return content
