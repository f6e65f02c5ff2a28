"""What a checkpoint says about its model, below what the command line says.

Lightning's own way is the other way round: since 2.5.5 the checkpoint silently wins.
"""

import json
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from pydoc import locate
from typing import Any

import yaml

from lit_models.training.checkpoints import is_sharded, read_checkpoint
from lit_models.training.export import is_exported
from lit_models.training.hyperparameters import UNTRUSTED, StoredClasses

START_ONLY = ("init_from", "init_from_part")  # weights that a checkpoint has replaced already
NO_WEIGHTS = ("optimizer", "lr_scheduler")


def model_values(ckpt_path: str | None, classes: StoredClasses) -> dict[str, Any]:
    """Returns the `model` key that a checkpoint was made with, or {} where it does not say.

    Args:
        ckpt_path: a file, or an exported folder; None and Lightning's words such as "last"
            give {}.
        classes: those that it may name.

    Raises:
        FileNotFoundError, ValueError: absent, damaged, or naming what is not allowed.
    """
    if ckpt_path is None or not (_is_checkpoint(ckpt_path) or is_exported(ckpt_path)):
        return {}
    content = read_checkpoint(ckpt_path, mmap=True, classes=classes)
    values = dict(content.get("hyper_parameters", {}))
    class_path = values.pop("_class_path", None)
    values.pop("_instantiator", None)
    if class_path is None:
        return {}
    classes.check(ckpt_path, class_path, values)
    kept = {k: v for k, v in values.items() if k not in START_ONLY}
    return {"class_path": class_path, "init_args": kept}


def _is_checkpoint(path: str) -> bool:
    return Path(path).is_file() or is_sharded(path)


def start_values(config: Any, classes: StoredClasses) -> dict[str, Any]:
    """Returns the `model` key with the networks of a checkpoint whose weights a run begins with.

    Args:
        config: the parsed `model` key; its init_from names the checkpoint, none gives {}.
        classes: those that it may name.

    Raises:
        FileNotFoundError, ValueError: absent, damaged, or naming what is not allowed.
    """
    given = (config or {}).get("init_args") or {}
    init_from, part = given.get("init_from"), given.get("init_from_part")
    check_start(init_from, part, classes)
    pretrained = given.get("pretrained")
    if isinstance(pretrained, str) and not Path(pretrained).expanduser().is_dir():
        raise FileNotFoundError(
            f"model.pretrained: {pretrained} is no folder; name that of a Hugging Face model on "
            "this machine with --model.pretrained=…, or null, to start from random weights."
        )
    model = model_values(init_from, classes)
    networks = {
        name: value
        for name, value in model.get("init_args", {}).items()
        if isinstance(value, dict) and "class_path" in value and name not in NO_WEIGHTS
    }
    kept = {name: value for name, value in networks.items() if part in (None, name)}
    return {**model, "init_args": kept} if kept else {}


def check_start(
    init_from: str | None, part: str | None, classes: StoredClasses = UNTRUSTED
) -> None:
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
        read_checkpoint(init_from, mmap=True, classes=classes)
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


def differences(
    model: dict[str, Any], config: Any, ckpt_path: str, is_evaluation: bool = False
) -> list[str]:
    """Returns a line for each value of the run that differs from the checkpoint's.

    Args:
        model: as model_values returns it.
        config: the parsed `model` key, a namespace with class_path and init_args.
        ckpt_path: for the message.
        is_evaluation: the options that the class names as `settled_options` are then the
            checkpoint's, whatever the run says.

    Raises:
        ValueError: the checkpoint is another class's, or an evaluation asks for another value of
            a settled option.
    """
    trained = model.get("class_path")
    if trained and config.class_path.rpartition(".")[2] != trained.rpartition(".")[2]:
        raise ValueError(
            f"{ckpt_path} is a checkpoint of {trained}, but --model is {config.class_path}. Take a "
            "checkpoint of that class, or leave --model out."
        )
    then, now = model.get("init_args", {}), config.init_args.as_dict()
    found = list(changes(then, now))
    settled = settled_options(config.class_path) if is_evaluation else {}
    refused = [change for change in found if change[0].split(".")[0] in settled]
    if refused:
        told = "; ".join(f"model.{name} {old} there and {new} here" for name, old, new in refused)
        raise ValueError(
            f"an evaluation computes what the weights of {ckpt_path} were trained for, and other "
            f"values have no effect: {told}. Leave them out to take the checkpoint's."
        )
    lines = [
        f"model.{name}: the checkpoint has {old}, this run uses {new}" for name, old, new in found
    ]
    # An export, or the checkpoint of a script, does not name them; it knows them all the same.
    for name, default in settled.items():
        if name not in then and name in now and not _are_same(now[name], default):
            lines.append(f"model.{name}: {now[name]} has no effect beside this checkpoint")
    return lines


def settled_options(class_path: str) -> dict[str, Any]:
    """Returns name -> default of the options that an evaluation takes from its checkpoint."""
    found: Any = locate(class_path)
    names = getattr(found, "settled_options", ())
    defaults: dict[str, Any] = {}
    for kind in reversed(getattr(found, "__mro__", ())):  # a class hands **options to its parent
        if names and "__init__" in vars(kind):
            parameters = signature(kind.__init__).parameters.values()
            defaults.update((parameter.name, parameter.default) for parameter in parameters)
    return {name: defaults[name] for name in names}


def changes(then: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields dotted name, old and new value of what differs, of the keys that both have; the step
    `init_args` is left out of names."""
    for key in then:
        old, new = then[key], now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            before = "" if key == "init_args" else f"{key}."
            for name, *values in changes(old, new):
                yield f"{before}{name}", *values
        elif key in now and not _are_same(old, new):
            yield key, old, new


def _are_same(one: Any, other: Any) -> bool:
    """Whether two values are equal; a tuple equals the list that it was saved as."""
    return _plain(one) == _plain(other)


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))
