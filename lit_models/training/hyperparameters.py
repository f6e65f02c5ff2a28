"""Hyperparameters in files: written as plain JSON, read without running a stranger's code."""

import functools
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

PACKAGES = ("lit_models", "datamodules", "torch.optim")  # includes torch.optim.lr_scheduler
INSTANTIATOR = "lightning.pytorch.cli.instantiate_module"  # Lightning's own, by jsonargparse


def plain_values(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments as JSON types, with the key that lets Lightning rebuild them.

    Raises:
        ValueError: a value has no plain form, such as a lambda.
    """
    values = {name: _plain(name, value) for name, value in hparams.items()}
    return {"_instantiator": INSTANTIATOR, **values}


def _plain(name: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, PathLike):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(name, item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)  # the order of a set differs between interpreters
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(name, getattr(value, f.name)) for f in fields(value)}
    # jsonargparse wraps a class as partial(instantiator, ..., Class, **options).
    is_partial = isinstance(value, functools.partial)
    parts, options = ((value.func, *value.args), value.keywords) if is_partial else ((value,), {})
    if classes := [part for part in parts if inspect.isclass(part)]:
        init_args = {"init_args": _plain(name, options)} if is_partial else {}
        return {"class_path": _path_of(classes[-1]), **init_args}
    raise ValueError(
        f"{name} is {value!r}, which a checkpoint cannot keep as a plain value; pass a class, or "
        "functools.partial(Class, option=value), instead of a lambda or an object."
    )


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class StoredClasses:
    """The classes that a stranger's file may name: with `trust` any, else those of `PACKAGES` and,
    as `named`, of the user's own command line and configs. Check here before creating anything."""

    trust: bool = False
    named: Collection[str] = ()

    def check(self, source: str | Path, class_path: Any, values: Mapping[str, Any]) -> None:
        """Refuse values from which a parser would create anything but allowed classes; nothing is
        imported before it is allowed.

        Args:
            source: the file, for the message.
            class_path: class that takes the values, or its import path.
            values: argument -> plain value.

        Raises:
            ValueError: a name is not allowed.
        """
        if not self.trust:
            if not isinstance(class_path, type):
                class_path = self.of_module(source, class_path)
            self._check_arguments(source, "", [class_path], values, [Any])

    def check_spec(self, source: str | Path, key: str, spec: Any) -> None:
        """Raise ValueError for a key of a config file, such as `model`, from which a parser would
        create anything but an object of an allowed class."""
        if self.trust:
            return
        if not (isinstance(spec, dict) and "class_path" in spec):
            raise ValueError(f"{source}: {key} is no mapping with a class_path; copy it again.")
        self._check_value(source, key, spec, [Any])

    def of_module(self, source: str | Path, class_path: Any) -> Any:
        """Return the module class that a file names, `None` if it cannot be imported; ValueError if
        it is neither allowed nor already imported."""
        home, _, name = str(class_path).rpartition(".")
        kind = vars(sys.modules[home]).get(name) if home in sys.modules else None
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            return kind
        if self.trust:
            return _imported(str(class_path))
        return self._allowed(source, "class_path", class_path, [])

    def _check_arguments(
        self, source: str | Path, key: str, kinds: list[Any], values: Mapping[Any, Any], rest: Any
    ) -> None:
        """Check values by the argument types of these classes; other names have type `rest`."""
        types = _arguments(kinds)
        for name, value in values.items():
            at = f"{key}.{name}".removeprefix(".")
            self._check_value(source, at, value, types.get(str(name), rest))

    def _check_value(self, source: str | Path, key: str, value: Any, types: list[Any]) -> None:
        if isinstance(value, list | tuple):
            for item in value:
                self._check_value(source, key, item, types)
        elif isinstance(value, str):
            # If an argument's type is not plain, the parser reads text as a class, a function, the
            # name of a YAML file, or YAML itself.
            is_word = not value or (re.fullmatch(r"[\w-]+", value) and not Path(value).exists())
            if not is_word and not all(map(_is_plain, types)):
                self._allowed(source, key, value, types)
        elif isinstance(value, Mapping) and "class_path" in value:
            kind = self._allowed(source, f"{key}.class_path", value["class_path"], types)
            for group, options in value.items():
                if group in ("init_args", "dict_kwargs") and isinstance(options, Mapping):
                    self._check_arguments(source, f"{key}.{group}", [kind], options, [Any])
                elif group != "class_path":
                    self._check_value(source, f"{key}.{group}", options, [Any])
        elif isinstance(value, Mapping):
            self._check_arguments(source, key, types, value, types)

    def _allowed(self, source: str | Path, key: str, name: Any, types: list[Any]) -> Any:
        """Return the class of that name, imported only if it is allowed."""
        own = {_path_of(kind): kind for kind in types if isinstance(kind, type)}
        name = str(name)
        kind = own.get(name)
        if kind is None and name in self.named:
            return _imported(name)
        if kind is None and _is_within(name):
            kind = _imported(name)
            kind = kind if _is_within(getattr(kind, "__module__", None)) else None
        if not isinstance(kind, type):
            raise ValueError(
                f"{source}: {key} names {name!r}, which would be imported and run. A checkpoint, "
                f"an exported folder or a run folder may name classes of {', '.join(PACKAGES)} and "
                "of its arguments' own types, and no functions. If you trust who wrote it, add "
                "--trust_checkpoint (in Python: trust_checkpoint=True)."
            )
        return kind


UNTRUSTED = StoredClasses()


def _is_within(name: Any) -> bool:
    return f"{name}.".startswith(tuple(f"{package}." for package in PACKAGES))


def _imported(name: str) -> Any:
    home, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(home), last) if home else None
    except (ImportError, AttributeError):
        return None


def _is_plain(kind: Any) -> bool:
    """Return whether text for an argument of this type stays text or becomes a plain value."""
    if not isinstance(kind, type):
        return kind is Ellipsis  # as in tuple[int, ...]
    return issubclass(kind, str | int | float | PathLike | Enum | dict | list | tuple | set | None)


def _arguments(types: list[Any]) -> dict[str, list[Any]]:
    """Return argument name -> types, of the constructors of classes and their parents."""
    types_of: dict[str, list[Any]] = {}
    for kind in types:
        for parent in reversed(getattr(kind, "__mro__", ())):
            if parent is object or _is_plain(parent) or "__init__" not in vars(parent):
                continue
            try:
                hints = typing.get_type_hints(parent.__init__)
            except (NameError, TypeError):  # an annotation for the type checker only
                hints = {}
            for name, parameter in inspect.signature(parent.__init__).parameters.items():
                if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                    types_of[name] = list(_types_in(hints.get(name, Any)))
    return types_of


def _types_in(hint: Any) -> Iterator[Any]:
    """Yield the types in an annotation, also a callable's result; `Any` if an import may happen."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        yield str
    elif type in (origin, hint):
        yield Any
    else:
        if Callable in (origin, hint):
            yield Any
        elif origin is None:
            yield hint
        elif isinstance(origin, type) and issubclass(origin, Mapping):
            yield dict
        for part in typing.get_args(hint):
            if not isinstance(part, list):
                yield from _types_in(part)


def known_arguments(kind: Any, values: Mapping[str, Any]) -> tuple[Any, list[str], list[str]]:
    """Return the values that a class's constructor accepts, "name=value" of arguments that only
    another version had, and the names of those that are `None` although their type forbids it; also
    inside values of dataclasses and of our own classes."""
    gone: list[str] = []
    empty: list[str] = []
    return _known([kind], values, "", gone, empty), gone, empty


def _known(types: list[Any], value: Any, key: str, gone: list[str], empty: list[str]) -> Any:
    if not isinstance(value, Mapping):
        return value
    class_path = value.get("class_path")
    if class_path is not None:
        own = [_imported(class_path)] if _is_within(class_path) else []
        return {**value, "init_args": _known(own, value.get("init_args", {}), key, gone, empty)}
    names = {} if dict in types else _arguments(types)
    accepted = {}
    for name, item in value.items():
        at = f"{key}.{name}".removeprefix(".")
        if names and name not in names:
            gone += [] if item is None else [f"{at}={item}"]
        else:
            kinds = names.get(name, [Any])
            empty += [at] if item is None and kinds != [Any] and type(None) not in kinds else []
            accepted[name] = _known(kinds, item, at, gone, empty)
    return accepted
