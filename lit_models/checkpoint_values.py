"""What a checkpoint says about its model, below what the command line says.

Lightning's own way is the other way round: since 2.5.5 the checkpoint silently wins.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from lit_models.training.checkpoint import read_checkpoint
from lit_models.training.exported import is_exported
from lit_models.training.sharded_checkpoint import is_sharded

START_ONLY = ("init_from", "init_from_part")  # weights that a checkpoint has replaced already
NO_WEIGHTS = ("optimizer", "lr_scheduler")


def model_values(ckpt_path: str | None) -> dict[str, Any]:
    """Returns the `model` key that a checkpoint was made with, or {} where it does not say.

    Args:
        ckpt_path: a file, or an exported folder; None and Lightning's words such as "last"
            give {}.

    Raises:
        FileNotFoundError, ValueError: absent or damaged.
    """
    if ckpt_path is None or not (_is_checkpoint(ckpt_path) or is_exported(ckpt_path)):
        return {}
    values = dict(read_checkpoint(ckpt_path, mmap=True).get("hyper_parameters", {}))
    class_path = values.pop("_class_path", None)
    values.pop("_instantiator", None)
    if class_path is None:
        return {}
    kept = {k: v for k, v in values.items() if k not in START_ONLY}
    return {"class_path": class_path, "init_args": kept}


def _is_checkpoint(path: str) -> bool:
    return Path(path).is_file() or is_sharded(path)


def start_values(config: Any) -> dict[str, Any]:
    """Returns the `model` key with the networks of a checkpoint whose weights a run begins with.

    Args:
        config: the parsed `model` key; its init_from names the checkpoint, none gives {}.

    Raises:
        FileNotFoundError, ValueError: absent or damaged.
    """
    given = config.get("init_args") or {}
    init_from, part = given.get("init_from"), given.get("init_from_part")
    check_start(init_from, part)
    model = model_values(init_from)
    networks = {
        name: value
        for name, value in model.get("init_args", {}).items()
        if isinstance(value, dict) and "class_path" in value and name not in NO_WEIGHTS
    }
    kept = {name: value for name, value in networks.items() if part in (None, name)}
    return {**model, "init_args": kept} if kept else {}


def check_start(init_from: str | None, part: str | None) -> None:
    """Raises where a run cannot begin with these weights, before any table is read.

    Raises:
        FileNotFoundError: absent.
        ValueError: damaged, or a part without a checkpoint.
    """
    if init_from is None and part is not None:
        raise ValueError(
            f"model.init_from_part is {part}, but model.init_from names no checkpoint: the run "
            "would train from scratch. Give --model.init_from=BEST.ckpt, or set "
            "--model.init_from_part=null."
        )
    if init_from is None:
        return
    try:
        read_checkpoint(init_from, mmap=True)
    except (FileNotFoundError, ValueError) as error:
        raise type(error)(f"model.init_from: {error}") from error


def resumed_step(ckpt_path: str | None) -> int | None:
    """Returns the optimizer steps that a checkpoint holds, or None without one."""
    if ckpt_path is None or not _is_checkpoint(ckpt_path):
        return None
    return int(read_checkpoint(ckpt_path, mmap=True).get("global_step", 0))


def as_first_config(model: dict[str, Any]) -> list[str]:
    """Returns arguments that give the checkpoint's values where nothing else is said."""
    return ["--config", yaml.safe_dump({"model": model})] if model else []


def differences(model: dict[str, Any], config: Any, ckpt_path: str) -> list[str]:
    """Returns a line for each value of the run that differs from the checkpoint's.

    Args:
        model: as model_values returns it.
        config: the parsed `model` key, a namespace with class_path and init_args.
        ckpt_path: for the message.

    Raises:
        ValueError: the checkpoint is another class's.
    """
    if not model:
        return []
    if config.class_path.rpartition(".")[2] != model["class_path"].rpartition(".")[2]:
        raise ValueError(
            f"{ckpt_path} is a checkpoint of {model['class_path']}, but --model is "
            f"{config.class_path}. Take a checkpoint of that class, or leave --model out."
        )
    now = flat(config.init_args.as_dict())
    return [
        f"model.{name}: the checkpoint has {value}, this run uses {now[name]}"
        for name, value in flat(model["init_args"]).items()
        if name in now and comparable(now[name]) != comparable(value)
    ]


def comparable(value: Any) -> str:
    """Returns a text that is equal for equal values; a tuple equals the list it was saved as."""
    return json.dumps(value, default=str)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested dicts as one dict with dotted names, the step `init_args` left out."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}".lstrip(".")
        if isinstance(value, dict):
            out |= flat(value, name)
        else:
            out[name] = value
    return out
