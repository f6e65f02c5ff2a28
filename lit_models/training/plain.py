"""Hyperparameters as plain JSON, so that a checkpoint holds no code and loads safely."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike
from typing import Any

_INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"  # Lightning's own, by jsonargparse


def plain_hyperparameters(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments as JSON types, with the key that lets Lightning rebuild them.

    Args:
        hparams: argument name -> value, from the command line or from a script.

    Raises:
        ValueError: a value that a file of plain values cannot name, such as a lambda.
    """
    values = {name: _plain(name, value) for name, value in hparams.items()}
    return {"_instantiator": _INSTANTIATOR, **values}


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(name, item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(name, getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, functools.partial):
        return _from_partial(name, value)
    if inspect.isclass(value):
        return {"class_path": _path_of(value)}
    raise ValueError(
        f"{name} is {value!r}, which a checkpoint cannot keep as a plain value; pass a class, or "
        "functools.partial(Class, option=value), instead of a lambda or an object."
    )


def _from_partial(name: str, value: functools.partial) -> dict[str, Any]:
    # jsonargparse wraps a class as partial(instantiator, ..., Class, **options).
    classes = [part for part in (value.func, *value.args) if inspect.isclass(part)]
    if not classes:
        raise ValueError(
            f"{name} is {value!r}; only functools.partial of a class can be kept in a checkpoint."
        )
    options = {key: _plain(name, item) for key, item in value.keywords.items()}
    return {"class_path": _path_of(classes[-1]), "init_args": options}


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
