"""What a checkpoint keeps of its data, read without the model."""

import json
import pickle
from pathlib import Path
from typing import Any

import torch

# The writers of these folders are checkpoints.py and export.py of lit_models.training.
SHARDS_MARKER, SHARDS_REST = "meta.pt", "rest"  # file of all but the shards, and key of its values
EXPORT_CONFIGS, EXPORT_EXTRA = ("unisono.json", "config.json"), "extra"


def checkpoint_to_load(trainer: Any) -> str | None:
    """Return the checkpoint of a trainer's call (`ckpt_path`), `None` without one."""
    path = getattr(trainer, "ckpt_path", None)
    return None if path is None else str(path)


def read_recipe(path: Path, key: str, kind: str, module: str) -> dict[str, Any]:
    """Return the recipe that a checkpoint keeps under a key.

    Args:
        path: the checkpoint: a file, a folder of shards, or one that `unisono export` wrote.
        key: where a family keeps its recipe.
        kind: what that is called, for messages.
        module: class whose checkpoints have it, for messages.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is damaged, or of another family.
    """
    checkpoint = _small_part(path)
    if not isinstance(checkpoint, dict) or key not in checkpoint:
        keys = ", ".join(map(str, list(checkpoint)[:8])) if isinstance(checkpoint, dict) else "none"
        raise ValueError(
            f"checkpoint {path} is of another family: it keeps no {kind} recipe (its keys: "
            f"{keys}); give a checkpoint of {module}."
        )
    return checkpoint[key]


def _small_part(path: Path) -> Any:
    """Return a checkpoint's values but those of its weights, if it is stored in several files."""
    for name in EXPORT_CONFIGS:
        if (path / name).is_file():
            return _exported_values(path / name)
    is_sharded = (path / SHARDS_MARKER).is_file()
    if not path.is_file() and not is_sharded:
        what = "is a folder, and no checkpoint" if path.is_dir() else "does not exist"
        raise FileNotFoundError(f"checkpoint {path} {what}; check --ckpt_path.")
    try:
        file = path / SHARDS_MARKER if is_sharded else path
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint {path} is damaged or no checkpoint ({reason}); use another one of its "
            "folder."
        ) from error
    return content.get(SHARDS_REST) if is_sharded and isinstance(content, dict) else content


def _exported_values(path: Path) -> Any:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); export the checkpoint again.") from error
    return config.get(EXPORT_EXTRA) if isinstance(config, dict) else config
