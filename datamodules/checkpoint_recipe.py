"""What a checkpoint keeps of its data, read without the model."""

import pickle
from pathlib import Path
from typing import Any

import torch


def checkpoint_to_load(trainer: Any) -> str | None:
    """Return the checkpoint that a trainer was told of before its run (`trainer.ckpt_path`), none
    without one; Lightning leaves that of an earlier call in the same place."""
    connector = getattr(trainer, "_checkpoint_connector", None)
    if connector is not None and not connector._user_managed:
        return None
    return getattr(trainer, "ckpt_path", None)


def read_recipe(path: Path, key: str, kind: str, module: str) -> dict[str, Any]:
    """Return the recipe that a checkpoint keeps under a key.

    Args:
        path: the checkpoint.
        key: where a family keeps its recipe.
        kind: what that is called, for messages.
        module: class whose checkpoints have it, for messages.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: it is damaged, or of another family.
    """
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist; check --ckpt_path.")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"checkpoint {path} is damaged or no checkpoint ({reason}); use another one of its "
            "folder."
        ) from error
    if not isinstance(checkpoint, dict) or key not in checkpoint:
        keys = ", ".join(map(str, list(checkpoint)[:8])) if isinstance(checkpoint, dict) else "none"
        raise ValueError(
            f"checkpoint {path} is of another family: it keeps no {kind} recipe (its keys: "
            f"{keys}); give a checkpoint of {module}."
        )
    return checkpoint[key]
