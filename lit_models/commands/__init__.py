"""Commands besides fit, validate, test and predict: functions whose parameters are options."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin

from lit_models.config_files import did_you_mean, find_config, load_yaml, one_word_each, read_config
from lit_models.errors import UsageError, unknown_option, usage_errors

COMMANDS = {  # name -> module of its function, description
    "certify": ("certify.command", "prove that a configuration gives the same run on any devices"),
    "chain": ("commands.chain", "run stages one after the other, each on its own devices"),
    "check": ("commands.plan", "audit the data without training; exit status 1 on errors"),
    "doctor": ("commands.doctor", "check machine, job and process group before a run"),
    "evaluate": ("evaluate", "run tasks of lm-eval on a language model, on any devices"),
    "export": ("commands.export", "write a checkpoint as safetensors and JSON, for use elsewhere"),
    "plan": ("commands.plan", "show steps, rates and memory on several device counts"),
    "prepare": ("prepare.command", "turn texts into shards of tokens, on one machine or many"),
    "replay": ("commands.replay", "recompute one optimizer step of a run on one device"),
    "report": ("commands.report", "write an HTML page about a run, or two runs side by side"),
    "show": ("page", "browse and use runs and models on a page in the browser"),
    "submit": ("commands.submit", "write a job for SLURM or another cluster, and submit it"),
    "verify": ("commands.verify", "prove from the ledger which samples a run used"),
}
RUN_OPTIONS = "run_options"  # the parameter for all options that are not the command's own
LIKELY = 0.75  # cutoff: `model` and `nodes` are 0.6 alike, but unrelated
TRUTH = {"": True, "true": True, "false": False}


def check_rendezvous(environ: Mapping[str, str]) -> None:
    """Raises ValueError if MASTER_ADDR cannot be resolved: ranks would wait for rank 0."""
    if address := environ.get("MASTER_ADDR"):
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR={address} is no machine that can be found ({error.strerror}); give "
                "the name or the address of the node with rank 0, or unset it for one machine."
            ) from error


class CommandParser(argparse.ArgumentParser):
    """Parser that reports its errors as one-screen usage errors."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}. `{self.prog} --help` lists the options.")


def run_command(name: str, argv: list[str]) -> Any:
    """Runs one command with its options and returns its result: an exit status or `None`."""
    function = getattr(importlib.import_module(f"lit_models.{COMMANDS[name][0]}"), name)
    if any(word in ("-h", "--help") for word in argv):
        parser_of(function).print_help()
        return 0
    with usage_errors():
        arguments = arguments_of(argv, function)
    return function(**arguments)


def options_of(function: Callable[..., Any]) -> Iterator[tuple[Parameter, str]]:
    """Yields each option of a command with its help text: the parameters, or the fields of a
    parameter that is a dataclass."""
    _, _, arguments = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    meanings = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", arguments, re.MULTILINE))
    for name, p in inspect.signature(function, eval_str=True).parameters.items():
        if isinstance(p.annotation, type) and is_dataclass(p.annotation):
            for field, meaning in options_of(p.annotation):
                yield field.replace(kind=Parameter.KEYWORD_ONLY), meaning
        else:
            yield p, " ".join(meanings.get(name, "").split())


def parser_of(function: Callable[..., Any]) -> CommandParser:
    """Returns the parser of a command: types from its annotations, help from its docstring.

    Parameters that are not keyword-only are positional; a list there takes one or more words.
    Options of a mapping, such as `--change.NAME.devices=2`, are parsed elsewhere.
    """
    text, *_ = (inspect.getdoc(function) or "").partition("\n\nArgs:\n")
    parser = CommandParser(
        f"unisono {function.__name__}",
        description=text,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for p, meaning in options_of(function):
        name, is_required = p.name, p.default is Parameter.empty
        is_whole = get_origin(p.annotation) in (None, list)
        kind = p.annotation if is_whole else get_args(p.annotation)[0]
        meaning += "" if is_required or not p.default else f" (default: {p.default})"
        options: dict[str, Any] = {"help": meaning.replace("%", "%%")}
        has_place = p.kind is Parameter.POSITIONAL_OR_KEYWORD
        if kind is bool:
            options["action"] = "store_true"
        elif get_origin(kind) is list:
            options |= {"nargs": "+"} if has_place else {"action": "append"}
        one = get_args(kind)[0] if get_origin(kind) is list else kind
        if one is not bool:  # a shell leaves the ~ of --to=~/folder
            options["type"] = {dict: str, Path: lambda text: Path(text).expanduser()}.get(one, one)
        if name == RUN_OPTIONS:
            parser.epilog = f"Other options: {meaning}"
        elif has_place:
            options |= {} if is_required else {"nargs": "?", "default": p.default}
            parser.add_argument(name, **options)
        else:
            dashed = f"--{name.replace('_', '-')}"
            parser.add_argument(dashed, dest=name, required=is_required, **options)
    return parser


def arguments_of(argv: list[str], function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the given arguments of a command by name, with their annotated types.

    Args:
        argv: words as typed, names with dashes or underscores. For a command with a mapping, such
            as the stages of a chain, `--config` names a file of values.
        function: the command.

    Raises:
        ValueError: a value has the wrong type, an option is unknown or misspelt, a required one is
            missing, or there is a word too many.
        FileNotFoundError: a config does not exist.
    """
    own = {p.name: p for p, _ in options_of(function)}
    takes_run = own.pop(RUN_OPTIONS, None) is not None
    mappings = [name for name, p in own.items() if dict in (p.annotation, *get_args(p.annotation))]
    placed = [name for name, p in own.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
    flags = [name for name, p in own.items() if p.annotation is bool]
    values: dict[str, Any] = {}
    words: list[str] = []
    for word in one_word_each(argv) if mappings else argv:
        option, _, value = word.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        likely = [n for n in own if n.startswith(name)]
        likely += get_close_matches(name, own, cutoff=LIKELY)
        group, *inner = option.removeprefix("--").split(".")
        if not option.startswith("-"):
            words.append(word)
        elif name in flags:
            if value not in TRUTH:
                raise ValueError(f"{option} must be true or false, got {value}.")
            values[name] = TRUTH[value]
        elif group in mappings:
            node = values
            *groups, last = (group, *inner)
            for key in groups:
                node[key] = dict(node[key]) if isinstance(node.get(key), dict) else {}
                node = node[key]
            node[last] = load_yaml(value, option)
            if not isinstance(values[group], Mapping | None):
                raise ValueError(f"{option} must be a mapping, --{group}.NAME=VALUE, got {value}.")
        elif option == "--config" and mappings:
            for key, item in read_config(find_config(value)).items():
                if key not in own:
                    raise ValueError(
                        f"{value} has the key `{key}`; keys here are {', '.join(own)}. The config "
                        "of one run is for `unisono fit`."
                    )
                if key in mappings:
                    values[key] = item
                else:
                    items = item if isinstance(item, list) else [item]
                    words[:0] = [f"--{key}={one}" for one in items]
        elif name in own:
            words.append(option.replace("_", "-") + word.removeprefix(option))
        elif not takes_run:
            raise ValueError(unknown_option(name, [n for n in own if n not in placed], "--"))
        elif likely and "." not in option:
            near = did_you_mean([f"--{one.replace('_', '-')}" for one in dict.fromkeys(likely)])
            raise ValueError(f"there is no option `{option}`.{near}")
        else:
            words.append(word)
    namespace, rest = parser_of(function).parse_known_args(words)
    if rest and not takes_run:
        takes = f"`unisono {function.__name__}` takes {' '.join(placed).upper() or 'options alone'}"
        raise ValueError(f"{takes}, and no `{rest[0]}`. Options are written --name=value.")
    arguments = vars(namespace) | values | ({RUN_OPTIONS: rest} if takes_run else {})
    for name, p in inspect.signature(function, eval_str=True).parameters.items():
        if isinstance(kind := p.annotation, type) and is_dataclass(kind):
            names = [field.name for field in fields(kind) if field.name in arguments]
            arguments[name] = kind(**{field: arguments.pop(field) for field in names})
    return arguments
