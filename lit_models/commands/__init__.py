"""The commands besides the Trainer's four: each file is one, its function of the same name runs."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any


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

    from lit_models.commands._arguments import arguments_of
    from lit_models.config_files import refuse_in_parsers
    from lit_models.errors import OneScreenErrors, UsageError

    class CommandParser(OneScreenErrors, ArgumentParser):
        takes_dashes = True

    function_name = name.replace("-", "_")
    module = importlib.import_module(f"lit_models.commands.{function_name}")
    function = getattr(module, function_name)
    try:
        arguments = arguments_of(argv, function)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    refuse_in_parsers()
    return auto_cli(
        function,
        args=arguments,
        prog=f"unisono {name}",
        parser_class=CommandParser,
        allow_abbrev=False,
    )
