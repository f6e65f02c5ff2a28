"""What a checkpoint keeps of the data that its model was trained on."""

import pickle
from pathlib import Path
from typing import Any

import torch


def checkpoint_recipe(path: Path, key: str, kind: str, family: str) -> dict[str, Any]:
    """Return the recipe of a checkpoint.

    Args:
        path: a checkpoint file.
        key: under which the family keeps it.
        kind: of the recipe, for messages, such as "occupation".
        family: name of the LightningModule, for messages.

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
            f"{keys}); give a checkpoint of {family}."
        )
    return checkpoint[key]
