"""Lookup and parsing of YAML config files and command-line options.

Free of torch, so that usage errors show in well under a second.
"""

from __future__ import annotations

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lit_models.training.rules import START_METHODS, STRATEGY_CLASSES, check_strategy

GROUPS = ("model", "data", "trainer", "init_args")  # keys whose value is a mapping
STRATEGY = "--trainer.strategy"
ROOT = "trainer.default_root_dir"
ABSENT = "absent"
# The loader of libyaml is ten times as fast, but PyYAML may be built without it.
PLAIN_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class StrictLoader(PLAIN_LOADER):
    """Reads plain values; refuses duplicate keys in a mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in lines:
                    first = lines[key.value]
                    problem = f"the key `{key.value}` stands twice, first in line {first}"
                    raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
                lines[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


# As in YAML 1.2, 1e-3 is a number, and dates and times stay text.
StrictLoader.yaml_implicit_resolvers = {
    letter: [("tag:yaml.org,2002:str", re.compile(r"[-+]?\d[\d_]*[-:]\d")), *pairs]
    for letter, pairs in PLAIN_LOADER.yaml_implicit_resolvers.items()
}
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


class PlainDumper(yaml.SafeDumper):
    """Writes plain values and string enums, such as the options of Lightning's Timer."""


PlainDumper.add_multi_representer(str, yaml.SafeDumper.represent_str)


def load_yaml(text: str, place: str) -> Any:
    """Returns the plain value of a YAML text; `place` names its file or option in messages.

    Raises:
        ValueError: the text is not YAML, nested too deep, or has a duplicate key in a mapping.
    """
    try:
        return yaml.load(text, StrictLoader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ValueError(
            f"{place}{line}: this is not readable YAML: {getattr(error, 'problem', None) or error}."
            " Check the brackets, keys, quotes and indentation there."
        ) from error


def read_in_parsers() -> None:
    """Makes jsonargparse read configs and values with `load_yaml` and dump with PlainDumper."""
    from jsonargparse import set_dumper, set_loader

    def load(text: str, path: str = "") -> Any:
        value = load_yaml(text, str(path) or "value")
        trainer = value.get("trainer") if isinstance(value, dict) else None
        if isinstance(trainer, dict) and trainer.get("num_nodes") == "auto":
            del trainer["num_nodes"]  # in_launched_world adds the launcher's number
        return value

    set_loader("yaml", load, exceptions=(ValueError,))
    form: Any = {"Dumper": PlainDumper, "allow_unicode": True, "sort_keys": False}
    set_dumper("yaml", lambda values: yaml.dump(values, **form))


def config_folders() -> list[Path]:
    """Returns the folders of the shipped configs, in the checkout or the installed package."""
    package = Path(__file__).resolve().parent
    return [p for p in (package.parent / "configs", package / "configs") if p.is_dir()]


def shipped_configs() -> list[str]:
    """Returns the shipped configs as `--config` takes them, such as occupation_coder/demo.yaml."""
    files = ((folder, path) for folder in config_folders() for path in folder.glob("*/*.yaml"))
    return sorted({path.relative_to(folder).as_posix() for folder, path in files})


def find_config(name: str) -> Path:
    """Returns the file that `--config name` means: one in the working folder, else a shipped one.

    Raises:
        FileNotFoundError: neither exists; the message lists similar names.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    short = name.removeprefix("./").removeprefix("configs/")
    for folder in config_folders():
        if (folder / short).is_file():
            return folder / short
    around = [str(p) for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = near_names(short, [*around, *shipped_configs()])
    what = "is a folder" if path.is_dir() else "does not exist"
    raise FileNotFoundError(
        f"--config {name}: this file {what}.{did_you_mean(near)}\n"
        f"Give a path from the working folder ({Path.cwd()}), or a shipped config, as "
        "`unisono --help` lists them."
    )


def near_names(wrong: str, candidates: Iterable[str]) -> list[str]:
    """Returns up to three candidates similar to the wrong name, nearest first."""
    names = list(dict.fromkeys(candidates))
    folded = {name.lower(): name for name in reversed(names)}
    near = difflib.get_close_matches(wrong.lower(), list(folded), n=3, cutoff=0.6)
    return [folded[name] for name in near]


def did_you_mean(names: list[str]) -> str:
    """Returns " Did you mean a, b, c?", or "" without names."""
    return f" Did you mean {', '.join(names)}?" if names else ""


def newest_config(run: Path) -> Path:
    """Returns the config of the newest training in a run folder: config.yaml, config-2.yaml, …

    Raises:
        FileNotFoundError: the folder has no config.
    """
    name = re.compile(r"config(?:-(\d+))?\.yaml")
    matches = ((name.fullmatch(path.name), path) for path in run.glob("config*.yaml"))
    versions = {int(match[1] or 1): path for match, path in matches if match}
    if not versions:
        raise FileNotFoundError(
            f"{run} holds no config.yaml, from which its module and data are built; `unisono fit` "
            "writes it. A run of a script has none and cannot be built again."
        )
    return versions[max(versions)]


def read_config(path: Path) -> dict[str, Any]:
    """Returns one YAML file as a dict.

    Raises:
        ValueError: it is not YAML, not a mapping, or has a key that would do something unexpected.
    """
    try:
        content = load_yaml(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}); save it as UTF-8.") from error
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
                f"{path}: {key} must be a mapping of options, NAME: VALUE on lines of their own, "
                f"got the list {str(value)[:60]}."
            )
    if "config" in content:
        raise ValueError(
            f"{path}: the key `config` is refused, because the outer file would silently replace "
            "whole groups of the inner one. Pass several --config options instead; later files win."
        )
    return content


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted name and the value of each option, including those of nested groups."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields the dotted name, without `init_args`, and both values of each option that differs; a
    missing value is ABSENT. A tuple equals the list that it is saved as, 2.0 equals 2, and NaN
    equals NaN."""
    for key in dict.fromkeys([*before, *now]):
        old, new = before.get(key, ABSENT), now.get(key, ABSENT)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            prefix = "" if key == "init_args" else f"{key}."
            yield from ((prefix + name, *values) for name, *values in changes(old, new))
            continue
        one, two = (json.loads(json.dumps(value, default=str)) for value in (old, new))
        if one != two and not (one != one and two != two):
            yield key, old, new


def line_of(path: Path, key: str, value: str = "") -> int | None:
    """Returns the first line, from 1, of a YAML file with the last part of a dotted key, and with a
    value that begins so."""
    entry = re.compile(rf"[- ]*{re.escape(key.rpartition('.')[2])}\+?: *{re.escape(value)}")
    lines = path.read_text(encoding="utf-8").splitlines()
    return next((number for number, line in enumerate(lines, 1) if entry.match(line)), None)


def one_word_each(argv: list[str]) -> list[str]:
    """Returns the arguments with each option and its value in one word: --seed=1 for --seed 1."""
    out: list[str] = []
    for word in argv:
        if out and re.match("--[^=]+$", out[-1]) and not word.startswith("--"):
            out[-1] = f"{out[-1]}={word}"
        else:
            out.append(re.sub("^-c(?==|$)", "--config", word))
    return out


def options(argv: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yields each word's name, without dashes, and its value, or `None` for a word without `=`."""
    for word in one_word_each(argv):
        name, is_assigned, value = word.partition("=")
        yield name.removeprefix("--"), value if is_assigned else None


def config_paths(argv: list[str]) -> list[Path]:
    """Returns the existing config files of the command line, in order."""
    return [Path(v) for n, v in options(argv) if n == "config" and v and Path(v).is_file()]


def given_option(argv: list[str], key: str) -> str | None:
    """Returns the last value that options, not config files, give a dotted key, or `None`."""
    values = [value for name, value in options(argv) if name == key]
    return values[-1] if values else None


def given_value(argv: list[str], key: str) -> Any:
    """Returns the last value that config files and options give a dotted key such as
    trainer.default_root_dir, or `None`; `argv` comes from `expand_configs`."""
    latest: Any = None
    for name, value in options(argv):
        if name == "config" and value:
            node: Any = read_config(Path(value))
            for part in key.split("."):
                node = node.get(part) if isinstance(node, dict) else None
            latest = node if node is not None else latest
        elif name == key and value is not None:
            latest = load_yaml(value, f"--{name}")
    return latest


def run_root(argv: list[str]) -> Path:
    """Returns trainer.default_root_dir; default: runs/FAMILY-NAME after the first config file."""
    root = given_value(argv, ROOT)
    if root:
        return Path(str(root))
    paths = config_paths(argv)
    if not paths:
        return Path("runs") / "unnamed"
    family = paths[0].resolve().parent.name
    is_family = (Path(__file__).parent / family).is_dir()
    return Path("runs") / (f"{family}-{paths[0].stem}" if is_family else paths[0].stem)


def stated_root(command: str) -> Path:
    """Returns the run folder that a command names, else the path of its first config without its
    suffix; unlike `run_root`, it reads no file."""
    argv = shlex.split(command)
    config = next((value for name, value in options(argv) if name == "config" and value), "")
    return Path(given_option(argv, ROOT) or re.sub(r"\.ya?ml$", "", config))


def given_words(argv: list[str]) -> set[str]:
    """Returns all words of the config files, without comments, and of the options' values."""
    texts = [value or "" for _, value in options(argv)]
    texts += [re.sub("#.*", "", path.read_text(encoding="utf-8")) for path in config_paths(argv)]
    return {word for text in texts for word in re.findall(r"[\w.]+", text)}


def expand_configs(argv: list[str]) -> list[str]:
    """Returns the arguments, one word for each option, with resolved `--config` paths; checks the
    keys of each file.

    Names of strategies take no options: where `--trainer.strategy.KEY` is given, the name, also one
    from a file, becomes a class. The class precedes its options, or an earlier class gets them.

    Raises:
        ValueError: a config is not readable, or the strategy's name has no class to take options.
        FileNotFoundError: a config does not exist.
    """
    out: list[str] = []
    for word in one_word_each(argv):
        name, _, value = word.partition("=")
        if name == "--config" and value:
            read_config(path := find_config(value))
            out.append(f"--config={path}")
        else:
            out.append(word)
    of_strategy = [word for word in out if word.startswith(f"{STRATEGY}.")]
    chosen = given_value(out, STRATEGY.removeprefix("--")) if of_strategy else None
    if not isinstance(chosen, str) or "." in chosen or not chosen.islower():
        return out
    if chosen not in STRATEGY_CLASSES:
        check_strategy(chosen, [*START_METHODS])
        raise ValueError(
            f"the strategy `{chosen}` takes no options by its name; {', '.join(STRATEGY_CLASSES)} "
            f"do, and ddp_spawn is {STRATEGY}=ddp {STRATEGY}.start_method=spawn."
        )
    others = [w for w in out if not w.startswith((f"{STRATEGY}.", f"{STRATEGY}="))]
    return [*others, f"{STRATEGY}={STRATEGY_CLASSES[chosen]}", *of_strategy]
