"""The commands besides the Trainer's four: each file is one, its function of the same name runs."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

RUN_OPTIONS = "run_options"


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
    """Runs one command with its options and returns what it returns: an exit status or None."""
    from jsonargparse import ArgumentParser, auto_cli

    from lit_models.cli_errors import OneScreenErrors, UsageError
    from lit_models.config_files import expand_configs, join_groups

    class CommandParser(OneScreenErrors, ArgumentParser):
        pass

    function_name = name.replace("-", "_")
    module = importlib.import_module(f"lit_models.commands.{function_name}")
    function = getattr(module, function_name)
    try:
        expanded = expand_configs(argv)
        argv = with_run(argv, function) if takes_run(function) else join_groups(expanded)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    return auto_cli(
        function,
        args=with_values(argv, function),
        prog=f"unisono {name}",
        parser_class=CommandParser,
        allow_abbrev=False,
    )


def with_values(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments with --json for --json=true, where it is an option that is true or
    false and no value follows."""
    kinds = (bool, bool | None)
    flags = {f"--{n}" for n, p in signature(function).parameters.items() if p.annotation in kinds}
    following = [*argv[1:], "--"] if argv else []
    return [
        f"{option}=true" if option in flags and after.startswith("-") else option
        for option, after in zip(argv, following, strict=True)
    ]


def takes_run(function: Callable[..., Any]) -> bool:
    """Returns whether a command hands the options that are not its own on to a run."""
    return RUN_OPTIONS in signature(function).parameters


def with_run(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments of a command with all that are not its own in one list.

    They stay as they were typed. An option of a list that is repeated is one list.

    Raises:
        ValueError: an option is none of the command's, and all but one of them.
    """
    from lit_models.config_files import split_options

    parameters = signature(function).parameters
    names = [name for name in parameters if name != RUN_OPTIONS]
    own, rest = split_options(argv, [*names, "help"])
    out: list[str] = []
    lists: dict[str, list[str]] = {}
    for name, value in own:
        if value is not None and "list" in str(parameters[name].annotation):
            lists.setdefault(name, []).append(value)
        else:
            out.append(f"--{name}" if value is None else f"--{name}={value}")
    lists[RUN_OPTIONS] = rest
    return [*out, *(f"--{name}={json.dumps(values)}" for name, values in lists.items())]
