"""The commands besides the Trainer's four: each file is one, its function of the same name runs."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


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

    try:
        argv = join_groups(expand_configs(argv))
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    function_name = name.replace("-", "_")
    module = importlib.import_module(f"lit_models.commands.{function_name}")
    function = getattr(module, function_name)
    return auto_cli(
        function,
        args=by_place(with_values(with_words(argv, function), function), function),
        prog=f"unisono {name}",
        parser_class=CommandParser,
        allow_abbrev=False,
    )


def with_values(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments with --json for --json=true, where it is an option that is true or
    false and no value follows."""
    flags = {f"--{n}" for n, p in signature(function).parameters.items() if p.annotation is bool}
    following = [*argv[1:], "--"] if argv else []
    return [
        f"{option}=true" if option in flags and after.startswith("-") else option
        for option, after in zip(argv, following, strict=True)
    ]


def by_place(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments with X for --ckpt=X and --ckpt X, where an option has no default: the
    parser takes such a value by its place alone. One option of this kind can be named; of two, the
    places would not tell which is which."""
    given = signature(function).parameters.values()
    placed = [p.name for p in given if p.default is Parameter.empty and p.kind in PLACED]
    if len(placed) != 1:
        return argv
    option = f"--{placed[0]}"
    if option in argv[:-1]:
        at = argv.index(option)
        return [argv[at + 1], *argv[:at], *argv[at + 2 :]]
    named = next((word for word in argv if word.startswith(f"{option}=")), None)
    if named is None:
        return argv
    return [named.partition("=")[2], *(word for word in argv if word != named)]


def with_words(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments with --other=B for B in `report A B`: after the required parameters, a
    bare word is the next one's that has a default and could be given without its name."""
    parameters = signature(function).parameters.values()
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    num_required = sum(p.default is p.empty for p in plain)
    optional = [p.name for p in plain if p.default is not p.empty] if num_required else []
    out: list[str] = []
    num_words, is_value = 0, False
    for argument in argv:
        is_word = not argument.startswith("-") and not is_value
        num_words += is_word
        extra = num_words - num_required if is_word else 0
        named = 0 < extra <= len(optional)
        out.append(f"--{optional[extra - 1]}={argument}" if named else argument)
        is_value = argument.startswith("--") and "=" not in argument
    return out
