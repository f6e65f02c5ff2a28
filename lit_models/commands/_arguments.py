"""From the words that a user types after a command to those that its parser takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

from lit_models.config_files import expand_configs, join_groups, split_options

RUN_OPTIONS = "run_options"
NAMED = Parameter.KEYWORD_ONLY
HELP = ("-h", "--help")
PLACED = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


def arguments_of(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments of a command's parser; of a line that asks for help, that alone.

    Args:
        argv: as typed.
        function: the command.

    Raises:
        ValueError: a config is not readable, an option is nearly one of the command's, something
            required is missing, or a word has no place.
        FileNotFoundError: a config does not exist.
    """
    if any(word in HELP for word in argv):
        return ["--help"]
    argv = with_underscores(argv, function)
    expanded = expand_configs(argv)
    takes_run = RUN_OPTIONS in signature(function).parameters
    words = with_run(argv, function) if takes_run else join_groups(expanded)
    check_words(words, function)
    return by_place(with_values(with_words(words, function), function), function)


def with_underscores(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments with --time_limit for --time-limit, where it is the command's own."""
    own = {f"--{n.replace('_', '-')}": f"--{n}" for n in signature(function).parameters}
    split = [word.partition("=") for word in argv]
    return [own.get(option, option) + is_assigned + value for option, is_assigned, value in split]


def with_run(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments of a command with all that are not its own in one list.

    They stay as they were typed. An option of a list that is repeated is one list.

    Raises:
        ValueError: an option is none of the command's, and all but one of them.
    """
    parameters = signature(function).parameters
    names = [name for name in parameters if name != RUN_OPTIONS]
    own, rest = split_options(argv, names)
    out: list[str] = []
    lists: dict[str, list[str]] = {}
    for name, value in own:
        if value is not None and "list" in str(parameters[name].annotation):
            lists.setdefault(name, []).append(value)
        else:
            out.append(f"--{name}" if value is None else f"--{name}={value}")
    lists[RUN_OPTIONS] = rest
    return [*out, *(f"--{name}={json.dumps(values)}" for name, values in lists.items())]


def check_words(argv: list[str], function: Callable[..., Any]) -> None:
    """Refuses a command line that lacks something required, or has more words than places.

    Raises:
        ValueError: so it is; the message shows how to write it, and what each place is.
    """
    parameters = signature(function).parameters.values()
    required = [
        p for p in parameters if p.default is Parameter.empty and p.kind in (*PLACED, NAMED)
    ]
    named = {word.partition("=")[0].removeprefix("--") for word in argv if word.startswith("-")}
    if not required or named - set(signature(function).parameters):
        return  # help, or an unknown option, of which the parser says more
    places = [p for p in parameters if p.kind in PLACED and p.name not in named]
    words = [word for word, is_word in zip(argv, are_words(argv), strict=True) if is_word]
    lacking = [p for p in places[len(words) :] if p in required]
    lacking += [p for p in required if p.kind is NAMED and p.name not in named]
    if lacking:
        fault = f"lacks {' and '.join(p.name for p in lacking)}"
    elif len(words) > len(places):
        least = sum(p in required for p in places)
        range_ = " or ".join(str(n) for n in range(least, len(places) + 1))
        extra = " ".join(words[len(places) :])
        fault = f"takes {range_} of these, got {len(words)} ({' '.join(words)}): leave out {extra}"
    else:
        return
    shown = [p for p in parameters if p in required or p.kind in PLACED]
    forms = (f"--{p.name}={p.name.upper()}" if p.kind is NAMED else p.name.upper() for p in shown)
    how = " ".join(
        form if p in required else f"[{form}]" for p, form in zip(shown, forms, strict=True)
    )
    name = function.__name__
    meanings = "".join(f"\n  {p.name.upper()}: {_meaning(p.name, function)}" for p in shown)
    raise ValueError(f"{name} {fault}. Write: unisono {name} {how}{meanings}")


def _meaning(name: str, function: Callable[..., Any]) -> str:
    found = re.search(rf"^ +{name}: (.+)", function.__doc__ or "", re.MULTILINE)
    return found[1] if found else ""


def are_words(argv: list[str]) -> list[bool]:
    """Returns for each argument whether it is neither an option nor the value of one."""
    is_value = [before.startswith("--") and "=" not in before for before in ["", *argv]]
    return [
        not word.startswith("-") and not value for word, value in zip(argv, is_value, strict=False)
    ]


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


def with_words(argv: list[str], function: Callable[..., Any]) -> list[str]:
    """Returns the arguments with --other=B for B in `report A B`: after the required parameters, a
    bare word is the next one's that has a default and could be given without its name."""
    parameters = signature(function).parameters.values()
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    num_required = sum(p.default is p.empty for p in plain)
    optional = [p.name for p in plain if p.default is not p.empty] if num_required else []
    out: list[str] = []
    named = {argument.partition("=")[0] for argument in argv}
    num_words = sum(f"--{p.name}" in named for p in plain[:num_required])
    for argument, is_word in zip(argv, are_words(argv), strict=True):
        num_words += is_word
        extra = num_words - num_required if is_word else 0
        takes_name = 0 < extra <= len(optional)
        out.append(f"--{optional[extra - 1]}={argument}" if takes_name else argument)
    return out


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
