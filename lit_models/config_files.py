"""Finds config files, the shipped ones too, and reads what a command line says before it is parsed.

Torch-free: `unisono --help` and every usage error come from here in well under a second.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_models.training.rules import START_METHODS, STRATEGY_CLASSES, check_strategy

REFUSED_KEYS = {
    "config": "the outer file would silently replace whole groups of the inner one",
    "defaults": "there is no such mechanism",
    "include": "there is no such mechanism",
}
LOCAL_RANK = ("--local-rank", "--local_rank")  # of launchers that set the variable, too
MIGRATION = Path(__file__).with_name("migration.md")  # read for hints, too
LIKELY = 0.75  # `model` is as near to `nodes` as 0.6, and another word
GROUPS = ("model", "data", "trainer", "init_args")  # keys whose value is a mapping
STRATEGY = "--trainer.strategy"
MOST_VALUES = 100_000  # in a YAML text, each alias counted with all that it stands for


class RefusedYaml(yaml.MarkedYAMLError):
    """Readable YAML that cannot be meant."""


class StrictLoader(yaml.SafeLoader):
    """Reads plain values; refuses a key that stands twice and aliases that multiply."""

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            _num_values(node, {})
        return node


def _num_values(node: yaml.Node, known: dict[int, int]) -> int:
    """Returns how many values a node holds, aliases counted with all that they stand for.

    Args:
        node: of a YAML text.
        known: id of a node -> its number, so that each is looked at once.

    Raises:
        RefusedYaml: too many, a value that holds itself, or a key that stands twice in a mapping.
    """
    if id(node) in known:
        if known[id(node)] == 0:
            raise RefusedYaml(problem="a value holds itself", problem_mark=node.start_mark)
        return known[id(node)]
    known[id(node)] = 0
    inner = node.value if isinstance(node, yaml.CollectionNode) else []
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in lines and key.value != "<<":
                    first = f"first in line {lines[key.value]}"
                    problem = f"the key `{key.value}` stands twice, {first}"
                    raise RefusedYaml(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        inner = [value for _, value in node.value]
    known[id(node)] = 1 + sum(_num_values(value, known) for value in inner)
    if known[id(node)] > MOST_VALUES:
        problem = f"more than {MOST_VALUES:,} values, each alias counted with all it stands for"
        raise RefusedYaml(problem=problem, problem_mark=node.start_mark)
    return known[id(node)]


def load_yaml(text: str, place: str) -> Any:
    """Returns the plain value of a YAML text.

    Args:
        text: one document.
        place: a file or an option, for messages.

    Raises:
        ValueError: not YAML, a key that stands twice in one mapping, or more or deeper values than
            any config has.
    """
    try:
        return yaml.load(text, StrictLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise unreadable(error, place) from error


def unreadable(error: Exception, place: str) -> ValueError:
    """Returns the error that tells what is wrong with a YAML text."""
    mark = getattr(error, "problem_mark", None)
    line = f"{mark.line + 1}" if mark else ""
    where = ":".join(filter(None, [place or "line", line]))
    problem = getattr(error, "problem", None) or error
    if isinstance(error, RecursionError):
        problem = "its brackets are nested too deep"
    kind = "refused" if isinstance(error, RefusedYaml) else "not readable YAML"
    return ValueError(
        f"{where}: this is {kind}: {problem}. Check the brackets, keys, quotes and "
        "indentation there."
    )


@functools.cache
def refuse_in_parsers() -> None:
    """Lets jsonargparse refuse what `StrictLoader` refuses, in files that files include too."""
    from jsonargparse import get_loader, set_loader

    load = get_loader("yaml")

    def load_checked(text: str, path: str = "") -> Any:
        try:
            yaml.compose(text, StrictLoader)
        except (RefusedYaml, RecursionError) as error:
            raise unreadable(error, str(path)) from error
        return load(text)

    set_loader("yaml", load_checked, exceptions=(yaml.YAMLError,))


def config_folders() -> list[Path]:
    """Returns the folders of the shipped configs: the checkout's or the installed package's."""
    package = Path(__file__).resolve().parent
    return [p for p in (package.parent / "configs", package / "configs") if p.is_dir()]


def shipped_configs() -> list[str]:
    """Returns the shipped configs as `--config` takes them, such as occupation_coder/demo.yaml."""
    found = {p.relative_to(folder).as_posix() for folder in config_folders()
             for p in folder.glob("*/*.yaml")}  # fmt: skip
    return sorted(found)


def find_config(name: str) -> Path:
    """Returns the file that `--config name` means: one in the working folder, else a shipped one.

    Raises:
        FileNotFoundError: there is neither; the message lists near names.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    short = name.removeprefix("./").removeprefix("configs/")
    for folder in config_folders():
        if (folder / short).is_file():
            return folder / short
    shipped = shipped_configs()
    around = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = near_names(name, [*around, *shipped]) or near_names(short, shipped)
    same_name = [s for s in shipped if Path(s).stem == path.stem]
    near += [s for s in same_name if s not in near]
    what = "is a folder" if path.is_dir() else "does not exist"
    raise FileNotFoundError(
        f"--config {name}: this file {what}.{did_you_mean(near)}\n"
        f"Give a path from the working folder ({Path.cwd()}) or one of the shipped configs:\n  "
        + "\n  ".join(shipped[:10])
    )


def short_name(path: Path) -> str:
    """Returns a config's name as the user would type it."""
    for folder in config_folders():
        if path.is_relative_to(folder):
            return path.relative_to(folder).as_posix()
    return str(path)


def near_names(wrong: str, candidates: Iterable[str], most: int = 3) -> list[str]:
    """Returns up to `most` of the candidates that look like the wrong name, nearest first."""
    names = list(dict.fromkeys(candidates))
    folded = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(wrong.lower(), list(folded), n=most, cutoff=0.6)
    return [folded[name] for name in near]


def migrated(name: str) -> str | None:
    """Returns what does here what a flag or key of another program does there, or None.

    Args:
        name: as it was typed, such as --learning-rate=0.1 or num_gpus=4.
    """
    asked = name.strip("-").partition("=")[0].lower().replace("-", "_")
    for line in MIGRATION.read_text(encoding="utf-8").splitlines():
        flags, _, here = line.strip("| ").partition(" | ")
        known = re.findall(r"`-*([\w-]+)(?:\(\))?`", flags.lower().replace("-", "_"))
        if here and asked in (flag.strip("_") for flag in known):
            return here.replace("`", "")
    return None


def did_you_mean(names: list[str]) -> str:
    """Returns " Did you mean a, b or c?" or nothing."""
    if not names:
        return ""
    return (
        f" Did you mean {' or '.join([', '.join(names[:-1]), names[-1]] if names[1:] else names)}?"
    )


def _tokens(argv: list[str]) -> Iterator[tuple[str, str | None, int]]:
    """Yields (option, value, number of arguments used) for each argument."""
    i = 0
    while i < len(argv):
        token = argv[i]
        if token in ("-c", "--config") and i + 1 < len(argv):
            yield "--config", argv[i + 1], 2
            i += 2
            continue
        option, is_assigned, value = token.partition("=")
        if token.startswith("--") and not is_assigned and i + 1 < len(argv):
            following = argv[i + 1]
            if not following.startswith("--"):
                yield option, following, 2
                i += 2
                continue
        yield option, value if is_assigned else None, 1
        i += 1


def expand_configs(argv: list[str]) -> list[str]:
    """Returns the arguments with the path of every `--config` file found and its keys checked, and
    the name of a strategy as its class where options of it are given: no name takes any.

    Raises:
        ValueError: a config is not readable, or options are given to a name without a class.
        FileNotFoundError: a config does not exist.
    """
    out: list[str] = []
    i = 0
    for option, value, used in _tokens(argv):
        if option == "--config" and value is not None and "\n" not in value:
            path = find_config(value)
            read_config(path)
            out += ["--config", str(path)]
        elif option not in LOCAL_RANK:
            out += argv[i : i + used]
        i += used
    return _with_strategy_class(out)


def find_own_classes(argv: list[str]) -> None:
    """Lets Python find the classes of the working folder that the command line or a YAML of the
    user names, as `python -m` would; nothing there hides an installed package.

    Args:
        argv: a command's options, as typed.
    """
    named: set[str] = set()
    for option, value, _ in _tokens(argv):
        if option != "--config":
            named.add(value or "")
        elif value and "\n" not in value and Path(value).is_file():
            with contextlib.suppress(ValueError, yaml.YAMLError):  # the parser says what is wrong
                named |= {str(inner) for _, inner in flat(read_config(Path(value)))}
    here = Path.cwd()
    for name in named:
        top = name.partition(".")[0]
        if not re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name) or str(here) in sys.path:
            continue
        if (here / f"{top}.py").is_file() or (here / top).is_dir():
            sys.path.append(str(here))


def _with_strategy_class(argv: list[str]) -> list[str]:
    """Returns the arguments with the class of a named strategy, and the options of it, at the end.

    The name may be a file's. In front of its class an option would be the class before's.
    """
    options: list[str] = []
    others: list[str] = []
    i = 0
    for option, _, used in _tokens(argv):
        words = argv[i : i + used]
        if option.startswith(f"{STRATEGY}."):
            options += words
        elif option != STRATEGY:
            others += words
        i += used
    name = given_value(argv, STRATEGY.removeprefix("--")) if options else None
    if not isinstance(name, str) or "." in name or not name.islower():
        return argv  # nothing to do, or a class already
    if name not in STRATEGY_CLASSES:
        check_strategy(name, [*START_METHODS])
        raise ValueError(
            f"{options[0].partition('=')[0]}: the strategy `{name}` takes no options by its name; "
            f"{', '.join(STRATEGY_CLASSES)} do. Or give a class: ddp_spawn is {STRATEGY}="
            f"{STRATEGY_CLASSES['ddp']} {STRATEGY}.start_method=spawn."
        )
    return [*others, f"{STRATEGY}={STRATEGY_CLASSES[name]}", *options]


def split_options(
    argv: list[str], own: list[str]
) -> tuple[list[tuple[str, str | None]], list[str]]:
    """Returns the options of these names with their values, and all other arguments as typed.

    Args:
        argv: arguments.
        own: names without a dot, as they are written in the arguments.

    Raises:
        ValueError: an option looks like one of these names and is none.
    """
    found: list[tuple[str, str | None]] = []
    rest: list[str] = []
    i = 0
    for option, value, used in _tokens(argv):
        if option.startswith("--") and option.removeprefix("--") in own:
            found.append((option.removeprefix("--"), value))
        else:
            name = option.removeprefix("--").replace("-", "_")
            likely = difflib.get_close_matches(name, own, cutoff=LIKELY)
            likely += [n for n in own if n.startswith(name) and n not in likely]
            if option.startswith("--") and "." not in option and likely:
                written = [f"--{n.replace('_', '-')}" for n in likely]
                raise ValueError(f"there is no option `{option}`.{did_you_mean(written)}")
            rest += argv[i : i + used]
        i += used
    return found, rest


def join_groups(argv: list[str]) -> list[str]:
    """Returns the arguments with the options of one group in one: --data.plan={"seed": 1, …}.

    Of several options such as --data.plan.seed, the parser of a plain dict keeps the last alone.
    """
    out: list[str] = []
    groups: dict[str, Any] = {}
    i = 0
    for option, value, used in _tokens(argv):
        names = _group_names(option)
        is_whole = value is not None and (value == "null" or value[:1] + value[-1:] == "{}")
        if value is not None and (len(names) > 1 or (len(names) == 1 and is_whole)):
            node = groups
            for name in names[:-1]:
                if not isinstance(node.setdefault(name, {}), dict):
                    node[name] = {}
                node = node[name]
            node[names[-1]] = load_yaml(value, option)
        else:
            groups.pop(names[0] if names else "", None)
            out += argv[i : i + used]
        i += used
    return [*out, *(f"{group}={json.dumps(values)}" for group, values in groups.items())]


def _group_names(option: str) -> list[str]:
    """Returns --change.fit and seed of --change.fit.seed; nothing of an option without a group."""
    outer, *inner = option.split(".")
    return [f"{outer}.{inner[0]}", *inner[1:]] if outer.startswith("--") and inner else []


def read_config(path: Path) -> dict[str, Any]:
    """Returns one YAML file as a dict.

    Raises:
        ValueError: not YAML, not a mapping, or a key that would not do what it seems to.
    """
    try:
        content = load_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}:{number}: byte 0x{error.object[error.start]:02X} is not UTF-8; save the file "
            "as UTF-8."
        ) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: a config is a mapping with keys such as model, data and trainer, "
            f"this one is a {type(content).__name__}."
        )
    for key, value in flat(content):
        if isinstance(value, list) and (key in GROUPS or key.endswith(".init_args")):
            raise ValueError(
                f"{path}:{line_of(path, key)}: {key} must be a mapping of options, NAME: VALUE on "
                f"lines of their own, got the list {str(value)[:60]}."
            )
    for key, reason in REFUSED_KEYS.items():
        if key in content:
            raise ValueError(
                f"{path}:{line_of(path, key)}: the key `{key}` is refused, because {reason}. "
                "Pass several --config options instead; later files win."
            )
    return content


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each option, of nested groups too."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def places_of(argv: list[str], text: str) -> list[str]:
    """Returns the options and lines of config files whose value stands in a text, at most three.

    Args:
        argv: arguments.
        text: such as a library's message, which knows the value and not where it comes from.
    """
    found: dict[str, tuple[str, Any]] = {}
    for option, value, _ in _tokens(argv):
        if option == "--config" and value and "\n" not in value:
            path = find_config(value)
            for key, inner in flat(read_config(path)):
                place = f"{key} in {short_name(path)}:{line_of(path, key)}"
                found[key.replace("init_args.", "")] = place, inner
        elif value is not None:
            found[option.removeprefix("--").replace("init_args.", "")] = f"{option}={value}", value
    words = {_plain(word) for word in re.findall(r"[^\s,;:=()'\"\[\]]+", text)}
    near = {key: place for key, (place, value) in found.items() if _plain(value) in words}
    named = [place for key, place in near.items() if key.rpartition(".")[2] in text]
    # Another value may well be a small number or a word of the language.
    told = [place for key, place in near.items() if len(_plain(found[key][1])) > len("9.0")]
    return (named or told)[:3]


def _plain(value: Any) -> str:
    """Returns one text for 2, 2.0 and "2"."""
    text = str(value).strip(".'\"`")
    try:
        return str(float(text))
    except ValueError:
        return text


def line_of(path: Path, key: str) -> int:
    """Returns the 1-based line where a YAML file first names a key (its last dotted part), or 1."""
    last = key.rsplit(".", 1)[-1]
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip().removeprefix("- ").startswith((f"{last}:", f"{last}+:")):
            return number
    return 1


def config_paths(argv: list[str]) -> list[Path]:
    """Returns the config files of the command line that exist, in order."""
    values = [v for option, v, _ in _tokens(argv) if option == "--config" and v and "\n" not in v]
    return [Path(v) for v in values if Path(v).is_file()]


def given_words(argv: list[str]) -> set[str]:
    """Returns every text in the config files, and every word of the options' values."""

    def words(value: Any) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for item in value.values() if isinstance(value, dict) else ():
            yield from words(item)
        for item in value if isinstance(value, list) else ():
            yield from words(item)

    typed = [word for _, value, _ in _tokens(argv) for word in re.findall(r"[\w.]+", value or "")]
    return {*typed, *(word for path in config_paths(argv) for word in words(read_config(path)))}


def given_option(argv: list[str], key: str) -> str | None:
    """Returns what the options alone say for a dotted key (the last one wins), or None."""
    given = [value for option, value, _ in _tokens(argv) if option == f"--{key}"]
    return given[-1] if given else None


def given_value(argv: list[str], key: str) -> Any:
    """Returns what files and options say for a dotted key (the last one wins), or None.

    Args:
        argv: arguments as expand_configs returns them.
        key: such as trainer.default_root_dir.
    """
    found: Any = None
    for option, value, _ in _tokens(argv):
        if option == "--config" and value:
            is_text = "\n" in value
            node: Any = load_yaml(value, option) if is_text else read_config(Path(value))
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            found = node if node is not None else found
        elif option == f"--{key}" and value is not None:
            found = load_yaml(value, option)
    return found
