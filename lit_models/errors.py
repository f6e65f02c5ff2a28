"""Errors on one screen: what, the value, the rule, the way out. Exit status 2 usage, 1 run."""

from __future__ import annotations

import errno
import importlib
import os
import re
import select
import shlex
import sys
import textwrap
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from lit_models.config_files import (
    GROUPS,
    config_paths,
    did_you_mean,
    given_option,
    line_of,
    migrated,
    near_names,
    places_of,
)

LINES, COLUMNS = 24, 80
USAGE, RUN = 2, 1
MESSAGE_LINES = 12  # of a library's error
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "NoneType": "null"}
READER_GONE = 128 + 13  # SIGPIPE, as of any program whose reader has seen enough
OWN_PACKAGES = ("lit_models", "datamodules")
CLASS_SOURCES = {
    "model": ["lit_models"],
    "data": ["datamodules"],
    "trainer.callbacks": ["lightning.pytorch.callbacks"],
    "trainer.logger": ["lightning.pytorch.loggers"],
    "trainer.strategy": ["lit_models.training.strategies", "lightning.pytorch.strategies"],
    "optimizer": ["torch.optim"],
    "lr_scheduler": ["torch.optim.lr_scheduler"],
}
EVERY_FLAG = "Flags of other programs, one by one: lit_models/migration.md."
OTHER_FOLDER = "choose another --trainer.default_root_dir or --data.predict_output"
STORAGE_ERRORS = {
    errno.EACCES: f"this user may not write there; {OTHER_FOLDER}",
    errno.EPERM: f"this user may not write there; {OTHER_FOLDER}",
    errno.EROFS: f"this file system is read-only; {OTHER_FOLDER}",
    errno.ENOSPC: "the disk is full; free some space, go on with --ckpt_path auto",
    errno.EDQUOT: "the disk quota is used up; free some space, go on with --ckpt_path auto",
    errno.EFBIG: "the file-size limit is reached; raise `ulimit -f`, go on with --ckpt_path auto",
    errno.ENOTDIR: "a part of this path is a file; choose another path",
    errno.EISDIR: "this is a folder, a file is needed",
}


class UsageError(ValueError):
    """A command line that cannot be run: exit status 2."""


def screen(message: str, title: str = "error") -> str:
    """Returns the message in at most 24 lines of 80 columns."""
    lines: list[str] = []
    for line in f"{title}: {message.strip()}".splitlines():
        indent = " " * (len(line) - len(line.lstrip()))
        wrapped = textwrap.wrap(
            line, COLUMNS, subsequent_indent=indent or "  ", break_on_hyphens=False
        )
        lines += wrapped or [""]
    if len(lines) > LINES - 1:
        lines = [*lines[: LINES - 2], "… (more with UNISONO_TRACEBACK=1)"]
    return "\n".join(lines)


class OneScreenErrors:
    """Mixed into a jsonargparse parser: errors without the usage text, with the nearest name."""

    takes_dashes = False  # in the names of its options

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Prints the message and leaves with status 2.

        Raises:
            SystemExit: always.
        """
        if os.environ.get("UNISONO_TRACEBACK") == "1" and ex is not None:
            traceback.print_exception(ex)
        say(screen(explain(message, getattr(ex, "subcommand_parser", None) or self)))
        raise SystemExit(USAGE)


def explain(message: str, parser: Any) -> str:
    """Returns a parser's message with the nearest valid name and without its internal types."""
    for pattern, answer in (
        (r"unrecognized arguments: (.+)", _unknown_options),
        (r"Option '([^']+)' is not accepted", _unknown_key),
        (r"does not accept (?:nested )?option '([^']+)'", _unknown_key),
        (r'Parser key "([^"]+)":(.+)', _bad_value),
        (r"argument (\S+): expected one argument", _no_value),
        (r"the following arguments are required: (.+)", _lacking),
    ):
        if match := re.search(pattern, message, flags=re.DOTALL):
            return answer(match, parser)
    return message


def _unknown_options(match: re.Match[str], parser: Any) -> str:
    words = [w for w in match[1].split() if w.startswith("-")] or match[1].split()
    wrong = words[0].split("=")[0]
    if not wrong.startswith("-"):
        if here := migrated(wrong):
            return f"`{wrong}` is no option. Here: {here}\n{EVERY_FLAG}"
        hint = did_you_mean([f"--config {wrong}"]) if wrong.endswith((".yaml", ".yml")) else ""
        return f"`{wrong}` is no option.{hint} Options are written --name=value."
    name = wrong.lstrip("-")
    # The parser of a class knows its own options alone: what stood before them is on the line.
    given = next((a.split("=")[0] for a in sys.argv if a.split("=")[0].endswith(f".{name}")), wrong)
    return _unknown_name(name, valid_keys(parser), given.removesuffix(name))


def _unknown_key(match: re.Match[str], parser: Any) -> str:
    place = ""
    for path in config_paths(sys.argv[1:]):
        last = match[1].rsplit(".", 1)[-1]
        if re.search(rf"^\s*(- )?{re.escape(last)}\+?:", path.read_text(encoding="utf-8"), re.M):
            place = f"{path}:{line_of(path, last)}: "
    return place + _unknown_name(match[1], valid_keys(parser), "")


def _unknown_name(wrong: str, valid: list[str], prefix: str) -> str:
    group, _, last = wrong.rpartition(".")
    if (not group or group in valid) and (here := migrated(last)):
        return f"there is no option `{prefix}{wrong}`. Here: {here}\n{EVERY_FLAG}"
    family = [k for k in valid if k.rpartition(".")[0] == group] or valid
    starts = [k for k in family if k.rpartition(".")[2].startswith(last)]
    # The options of a class that is still to be named are unknown: a wrong group keeps its last.
    groups = near_names(group, valid)[:1] if group and group not in valid else []
    starts = [f"{g}.{last}" for g in groups] + starts
    near = list(dict.fromkeys(starts + near_names(wrong, family) + near_names(wrong, valid)))
    near = near or [k for k in family if k.rpartition(".")[2].startswith(last[:3])][:1]
    text = f"there is no option `{prefix}{wrong}`.{did_you_mean([prefix + k for k in near[:3]])}"
    if not near:
        text += "\nThe options are: " + ", ".join(prefix + k for k in family[:25])
    return text + "\nOptions are written in full. --print_config shows every key and its value."


def valid_keys(parser: Any) -> list[str]:
    """Returns the dotted names that a parser accepts."""
    usage = re.findall(r"--([A-Za-z_][\w.]*)", parser.format_usage())
    return sorted({*usage, *parser.get_defaults(skip_validation=True).keys()})


def _bad_value(match: re.Match[str], parser: Any) -> str:
    key, detail = match[1], match[2].strip()
    given = re.search(r"(?:Given value|Got value): (.+)", detail)
    value = given[1].strip() if given else ""
    typed = re.findall(r"Expected an? <class '([\w.]+)'>", detail)
    kinds = [KINDS.get(name, name.rpartition(".")[2]) for name in typed]
    is_number = "a number" in kinds or "a whole number" in kinds
    if not is_number and re.search("dot import path|has no attribute|No module named", detail):
        named = re.search(r"class_path '([^']+)'", detail)
        return unknown_class(key, named[1] if named else value)
    if wrong_base := re.search(r"not correspond to a subclass of (\w+)", detail):
        return f"{key}: {value} is no {wrong_base[1]}. Name a class of that kind." + _sources(key)
    option, way_out = _option_and_way_out(key, parser)
    if literals := _literals(detail):
        near = [n for n in near_names(value, literals) if n != value]
        choices = ", ".join(literals)
        return f"{option} must be one of {choices}, got {value}.{did_you_mean(near)}"
    kinds = [
        f"options of {name}" for name in re.findall(r"valid subclass of (\w+)", detail)
    ] + kinds
    kinds = kinds or re.findall(r"Expected an? ([^.,\n]+)", detail)
    if "a number" in kinds and "a whole number" in kinds:
        kinds.remove("a whole number")
    if kinds and value:
        kinds = list(dict.fromkeys(kinds))
        return f"{option} must be {' or '.join(kinds)}, got {value}.{way_out}"
    if key in GROUPS and (text := given_option(sys.argv, key)):
        return f"--{key} must be a YAML file or a mapping of options, got {text}."
    return f"{option}: {detail}"


def _option_and_way_out(key: str, parser: Any) -> tuple[str, str]:
    """Returns a key as it is typed, and for an option of a command where it is explained."""
    # The parser of a class knows its own options alone: what stood before them is on the line.
    given = (a.split("=")[0].removeprefix("--") for a in sys.argv)
    key = next((name for name in given if name.endswith(f".{key}")), key)
    if "." in key or not getattr(parser, "takes_dashes", False):
        return key, ""
    return f"--{key.replace('_', '-')}", f" `{parser.prog} --help` says what it is."


def _no_value(match: re.Match[str], parser: Any) -> str:
    return f"{match[1]} needs a value: {match[1]}=VALUE."


def _lacking(match: re.Match[str], parser: Any) -> str:
    names = [name.rpartition(".")[2] for name in match[1].split(", ")]
    return (
        f"the command line lacks {', '.join(names)}: give the config of a run with --config, or "
        f"name a class with --{names[0]}=CLASS."
    )


def _literals(detail: str) -> list[str]:
    inner = re.findall(r"Literal\[([^\]]+)\]", detail)
    values = [v.strip().strip("'\"") for part in inner for v in part.split(",")]
    if not values:
        enum = re.search(r"Expected a member of .*?\{([^}]+)\}", detail)
        values = [v.strip() for v in enum[1].split(",")] if enum else []
    return list(dict.fromkeys(values))


def unknown_class(key: str, name: str) -> str:
    """Returns the message for a class that cannot be imported, with the nearest that can."""
    module, _, last = name.rpartition(".")
    sources = list(dict.fromkeys([*([module] if module else []), *_modules_for(key)]))
    candidates: list[str] = []
    for source in sources:
        candidates += [f"{source}.{n}" for n in _public_classes(source, key)]
    near = near_names(name, candidates)
    near += [c for n in near_names(last, [c.rpartition(".")[2] for c in candidates])
             for c in candidates if c.endswith(f".{n}") and c not in near]  # fmt: skip
    return (
        f"{key}: there is no class `{name}`.{did_you_mean(near[:3])}\n"
        "A class is named by its import path, such as lit_models.LitOccupationCoder."
        + ("" if near else _sources(key))
    )


def _modules_for(key: str) -> list[str]:
    for prefix, modules in CLASS_SOURCES.items():
        if key == prefix or key.startswith(f"{prefix}.") or key.endswith(f".{prefix}"):
            return modules
    return []


def _sources(key: str) -> str:
    lines = [f"{m}: {', '.join(_public_classes(m, key))}" for m in _modules_for(key)]
    return "".join(f"\nKnown in {line}" for line in lines if not line.endswith(": "))


def _public_classes(module: str, key: str) -> list[str]:
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError:
        return []
    exported = getattr(loaded, "__all__", None)
    names = exported or [n for n, value in vars(loaded).items() if isinstance(value, type)]
    ending = "DataModule" if key == "data" and exported else ""
    return [n for n in names if n[:1].isupper() and n.endswith(ending)]


def say(line: str) -> None:
    """Prints a line to the user on stderr, so that standard output stays the result's."""
    print(line, file=sys.stderr, flush=True)


def is_first_process() -> bool:
    """Returns whether this process speaks for all: rank 0 of a launch, or a launching process."""
    names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
    return all(os.environ.get(name, "").strip("0") == "" for name in names)


def run_guarded(run: Callable[[], Any]) -> int:
    """Runs a command and returns its exit status; an error is one screen on stderr.

    Errors are ours when the raising line lies in this project or when the storage refuses: they say
    all. Of others the screen tells type, message and what is at hand; their traceback goes to the
    run's folder. UNISONO_TRACEBACK=1 shows it for all of them.
    """
    try:
        status = run()
        sys.stdout.flush()
    except Exception as error:
        if isinstance(error, BrokenPipeError) and is_reader_gone():
            return READER_GONE
        if getattr(error, "is_echo", False):
            return RUN  # another rank has said what happened
        notes, what = getattr(error, "__notes__", []), one_screen(error) or foreign(error)
        is_lost = getattr(error, "is_lost", False)  # then the run knows more than the error
        message = "\n".join([*notes, what] if is_lost else [what, *notes])
        if os.environ.get("UNISONO_TRACEBACK") == "1":
            traceback.print_exc()
        names = ("RANK", "SLURM_PROCID", "LOCAL_RANK")
        rank = next((os.environ[name] for name in names if os.environ.get(name)), None)
        say(screen(message, "error" if is_first_process() else f"error on rank {rank}"))
        return USAGE if isinstance(error, UsageError) else RUN
    return status if isinstance(status, int) else 0


def foreign(error: Exception) -> str:
    """Returns the message of an error of a library, or of a bug: what, at hand, the traceback."""
    text = str(error).strip()
    if type(error).__name__ == "ProcessRaisedException":  # a traceback, whose end is the error
        starts = [found.start() for found in re.finditer(r"^[\w.]+: ", text, flags=re.MULTILINE)]
        text = text[starts[-1] if starts else 0 :]
    else:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    lines = text.splitlines()
    lines = [*lines[:MESSAGE_LINES], *(["…"] if len(lines) > MESSAGE_LINES else [])]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    own = [frame.f_locals for frame in reversed(frames) if is_own_file(frame.f_code.co_filename)]
    with suppress(ValueError, OSError):  # of a config that is gone or changed meanwhile
        if places := places_of(sys.argv[1:], text):
            lines.append(f"The value is that of {' or '.join(places)}; change it there.")
    runs = Path(getattr(error, "run_folder", "runs"))
    folder = next((f for f in (runs, runs.parent) if f.is_dir() and f != Path()), None)
    paths = [[v for v in names.values() if isinstance(v, Path) and v.exists()] for names in own]
    at_hand = next((found[-1] for found in paths if found), runs)
    if at_hand not in (runs, runs.parent) and str(at_hand) not in text:
        lines.append(f"It read or wrote {at_hand}: is that whole, and of this version?")
    shown = "UNISONO_TRACEBACK=1 shows where it was raised."
    if folder is not None:
        with suppress(OSError):  # a disk that is full may be the error itself
            with (folder / "error.txt").open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(' ', 'seconds')} {shlex.join(sys.argv)}\n")
                traceback.print_exception(error, file=file)
            shown = f"Its traceback is in {folder / 'error.txt'}"
    return "\n".join([*lines, shown])


def is_reader_gone() -> bool:
    """Returns whether nobody reads standard output any more, as after `| head`; what is still to
    be written at the end of the process then goes nowhere, without a word."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    is_gone = any(event & select.POLLERR for _, event in poll.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def one_screen(error: BaseException) -> str | None:
    """Returns the message to show for an error, or None where the traceback is the message."""
    if isinstance(error, UsageError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
        return f"{where}{error.strerror}: {_way_out(error)}."
    if type(error).__name__ == "ProcessRaisedException":
        return _from_child(str(error))
    if isinstance(error, ModuleNotFoundError) and "wandb" in str(error):
        return "Weights & Biases is an extra: pip install 'unisono[wandb]', or -e '.[wandb]' here."
    if isinstance(error, (ValueError, OSError, RuntimeError, FloatingPointError)):
        frames = traceback.extract_tb(error.__traceback__)
        if frames and is_own_file(frames[-1].filename):
            return str(error)
    # The parser wraps what a constructor raises.
    return one_screen(error.__cause__) if error.__cause__ is not None else None


def _way_out(error: OSError) -> str:
    name = error.filename
    is_closed = isinstance(name, str) and os.path.isfile(name) and not os.access(name, os.R_OK)
    if error.errno == errno.EACCES and is_closed:
        return "this user may not read it; change its rights or name another file"
    return STORAGE_ERRORS[error.errno or 0]


def is_own_file(filename: str) -> bool:
    """Returns whether a source file belongs to this project's packages."""
    root = Path(__file__).resolve().parents[1]
    return any(Path(filename).is_relative_to(root / package) for package in OWN_PACKAGES)


def _from_child(text: str) -> str | None:
    """Returns the message of an error raised in a spawned process, from its printed traceback."""
    files = re.findall(r'^  File "([^"]+)", line \d+', text, flags=re.MULTILINE)
    last = list(re.finditer(r"^(?:[\w.]+\.)?(\w+): ", text, flags=re.MULTILINE))
    shown = {"ValueError", "FileNotFoundError", "OSError", "RuntimeError"}
    if files and is_own_file(files[-1]) and last and last[-1][1] in shown:
        return text[last[-1].end() :]
    return None
