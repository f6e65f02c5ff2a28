"""The commands besides the Trainer's four: each file is one, its function of the same name runs."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from lit_models.config_files import (
    did_you_mean,
    find_config,
    line_of,
    load_yaml,
    near_names,
    read_config,
)
from lit_models.errors import UsageError, bare_word, unknown_option

RUN_OPTIONS = "run_options"  # takes all options that are not the command's own
LIKELY = 0.75  # `model` is as near to `nodes` as 0.6, and another word
KINDS = {bool: "true or false", int: "a whole number", float: "a number", NoneType: "null"}
NUMBERS = {int: r"[-+]?\d+", float: r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"}
TRUTH = {"true": True, "false": False}


def command_files() -> dict[str, Path]:
    """Returns command name -> file; nothing is imported."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {f.stem.replace("_", "-"): f for f in files if not f.stem.startswith("_")}


def summaries() -> dict[str, str]:
    """Returns command name -> the first line of its file's docstring, as a phrase."""
    out = {}
    for name, path in command_files().items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        line = text.partition("\n")[0].rstrip(".")
        out[name] = line[:1].lower() + line[1:]
    return out


def run_command(name: str, argv: list[str]) -> Any:
    """Runs one command with its options and returns what it returns: an exit status or `None`."""
    function_name = name.replace("-", "_")
    module = importlib.import_module(f"lit_models.commands.{function_name}")
    function = getattr(module, function_name)
    if any(word.partition("=")[0] in ("-h", "--help") for word in argv):
        print(help_of(name, function))
        return 0
    try:
        arguments = arguments_of(argv, function)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    return function(**arguments)


def help_of(name: str, function: Callable[..., Any]) -> str:
    """Returns what `unisono NAME --help` prints: how it is written, its docstring, its defaults."""
    own = [p for n, p in _parameters(function).items() if n != RUN_OPTIONS]
    required = [p for p in own if not _is_free(p)]
    placed = [p for p in own if p.kind is Parameter.POSITIONAL_OR_KEYWORD and required]
    text = (inspect.getdoc(function) or "").partition("\n\nRaises:")[0]
    shown = [p for p in own if p in required or p in placed]
    lines = [f"usage: unisono {_usage(name, shown)} [--OPTION=VALUE …]", "", text]
    defaults = [p for p in own if _is_free(p)]
    lines += ["", "Defaults:"] if defaults else []
    for p in defaults:
        value = str(p.default).lower() if isinstance(p.default, bool) else p.default
        lines.append(f"  --{p.name.replace('_', '-')}={'null' if value is None else value}")
    return "\n".join(lines)


def arguments_of(argv: list[str], function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments of a command by their names, of the types that it annotates.

    A parameter without a default may be given by its place, and those after it. A list takes an
    item at each time that its option is given. `--config` gives the values of a command with a
    mapping, such as the stages of a chain.

    Args:
        argv: as typed; names have dashes or underscores.
        function: the command.

    Raises:
        ValueError: a value is not of its type, an option is none of the command's or nearly one,
            something required is missing, or a word has no place.
        FileNotFoundError: a config does not exist.
    """
    own = _parameters(function)
    takes_run = own.pop(RUN_OPTIONS, None) is not None
    mappings = [name for name, p in own.items() if dict in _types(p)]
    values: dict[str, Any] = {}
    words: list[str] = []
    rest: list[str] = []
    left = list(argv)
    while left:
        typed = [left.pop(0)]
        option, is_assigned, value = typed[0].partition("=")
        group, dot, inner = option.removeprefix("--").partition(".")
        group = group.replace("-", "_")
        name = f"{group}{dot}{inner}"
        if not option.startswith("-"):
            words.append(typed[0])
            continue
        is_flag = name in own and bool in _types(own[name])
        if not is_assigned and left and (left[0] in TRUTH if is_flag else left[0][:2] != "--"):
            typed.append(left.pop(0))
            is_assigned, value = "=", typed[1]
        if name in own:
            if not is_assigned and not is_flag:
                raise ValueError(f"{option} needs a value: {option}=VALUE.")
            given = _converted(option, value if is_assigned else "true", own[name], function)
            is_repeated = list[str] in _types(own[name]) and isinstance(given, str)
            values[name] = [*(values.get(name) or []), given] if is_repeated else given
        elif group in mappings:
            if not value:
                raise ValueError(f"{option} needs a value: {option}=VALUE.")
            node = values
            *groups, last = name.split(".")
            for key in groups:
                node[key] = dict(node[key]) if isinstance(node.get(key), dict) else {}
                node = node[key]
            node[last] = load_yaml(value, option)
        elif name == "config" and mappings:
            values |= _of_config(find_config(value), own, function)
        elif takes_run:
            likely = get_close_matches(name, own, cutoff=LIKELY)
            likely += [n for n in own if n.startswith(name) and n not in likely]
            if "." not in option and likely:
                near = did_you_mean([f"--{n.replace('_', '-')}" for n in likely])
                raise ValueError(f"there is no option `{option}`.{near}")
            rest += typed
        else:
            raise ValueError(unknown_option(name, list(own), "--"))
    _place(words, values, own, function)
    return values | ({RUN_OPTIONS: rest} if takes_run else {})


def _parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    return dict(inspect.signature(function, eval_str=True).parameters)


def _types(parameter: Parameter) -> tuple[Any, ...]:
    """Returns the types of a union, or the only one."""
    kind = parameter.annotation
    is_whole = get_origin(kind) in (None, list, dict, Literal)
    return (kind,) if is_whole else get_args(kind)


def _is_free(parameter: Parameter) -> bool:
    return parameter.default is not Parameter.empty


def _converted(option: str, text: str, own: Parameter, function: Callable[..., Any]) -> Any:
    """Returns the value of an option; raises ValueError where it is none of its types."""
    kinds, names, choices = _types(own), [], []
    if NoneType in kinds and text == "null":
        return None
    if dict in kinds or (list[str] in kinds and text.startswith("[")):
        return load_yaml(text, option)
    for kind in kinds:
        if kind is bool and text.lower() in TRUTH:
            return TRUTH[text.lower()]
        if kind in NUMBERS and re.fullmatch(NUMBERS[kind], text):
            return kind(text)
        if kind in (str, Path):
            return kind(text)
        if kind == list[str]:
            return text
        if get_origin(kind) is Literal:
            if text in get_args(kind):
                return text
            choices += [str(choice) for choice in get_args(kind)]
            names.append(f"one of {', '.join(choices)}")
        else:
            names.append(KINDS[kind])
    dashed, near = f"--{own.name.replace('_', '-')}", did_you_mean(near_names(text, choices))
    raise ValueError(
        f"{dashed} must be {' or '.join(names)}, got {text}.{near} `unisono {function.__name__} "
        "--help` says what it is."
    )


def _of_config(
    path: Path, own: Mapping[str, Parameter], function: Callable[..., Any]
) -> dict[str, Any]:
    values = {}
    for key, item in read_config(path).items():
        if key not in own:
            raise ValueError(f"{path}:{line_of(path, key)}: {unknown_option(key, list(own))}")
        if isinstance(item, str | int | float) and not isinstance(item, bool):
            values[key] = _converted(key, str(item), own[key], function)
        elif type(item) in {get_origin(kind) or kind for kind in _types(own[key])}:
            values[key] = item
        else:
            raise ValueError(f"{path}:{line_of(path, key)}: {key} cannot be {item}.")
    return values


def _place(
    words: list[str],
    values: dict[str, Any],
    own: Mapping[str, Parameter],
    function: Callable[..., Any],
) -> None:
    """Gives words the places of parameters that are not named, and misses none that is required."""
    required = [p for p in own.values() if not _is_free(p)]
    placed = [p for p in own.values() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    placed = placed if set(placed) & set(required) else []
    places = [p for p in placed if p.name not in values]
    for parameter, word in zip(places, words, strict=False):
        values[parameter.name] = _converted(parameter.name, word, parameter, function)
    lacking = [p.name for p in required if p.name not in values]
    extra = words[len(places) :]
    if lacking:
        fault = f"lacks {' and '.join(lacking)}"
    elif extra and not placed:
        raise ValueError(bare_word(extra[0]))
    elif extra:
        counts = range(sum(p in required for p in places), len(places) + 1)
        fault = f"takes {' or '.join(map(str, counts))} of these, got {len(words)} "
        fault += f"({' '.join(words)}): leave out {' '.join(extra)}"
    else:
        return
    shown = [p for p in own.values() if p in required or p in placed]
    meanings = ""
    for p in shown:
        line = re.search(rf"^ +{p.name}: (.+)", function.__doc__ or "", re.MULTILINE)
        meanings += f"\n  {p.name.upper()}: {line[1] if line else ''}"
    name = function.__name__
    raise ValueError(f"{name} {fault}. Write: unisono {_usage(name, shown)}{meanings}")


def _usage(name: str, own: list[Parameter]) -> str:
    """Returns how a command is written: `export CKPT --to=TO`."""
    forms = []
    for p in own:
        dashed = f"--{p.name.replace('_', '-')}={p.name.upper()}"
        form = dashed if p.kind is Parameter.KEYWORD_ONLY else p.name.upper()
        forms.append(f"[{form}]" if _is_free(p) else form)
    return " ".join([name, *forms])
