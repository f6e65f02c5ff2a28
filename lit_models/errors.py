"""One-screen errors: problem, value, rule, way out. Exit status 2 for usage, 1 for a run."""

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import Any

from lit_models.config_files import ROOT, config_paths, did_you_mean, line_of, near_names, options
from lit_models.training.rules import is_first_process

LINES, COLUMNS = 24, 80
USAGE, RUN = 2, 1
READER_GONE = 128 + 13  # SIGPIPE: the reader, such as `head`, closed the output
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
MESSAGE_LINES = 12  # shown of a library's error
HERE = Path(__file__).resolve().parent
OWN_PACKAGES = (HERE, HERE.with_name("datamodules"))
RUN_NAMES = ("name", "run_name", "run-name", "output_dir", "output-dir")  # of other programs
OTHERS = "Flags of other programs, one by one: lit_models/migration.md."
BARE = "give the config of a run with --config, or name a class, --model=CLASS."
OF_EARLIER = "\nIf an earlier version wrote that file, delete the option there, or correct it."
CLASS_HOMES = (
    *("lit_models", "datamodules", "lit_models.training.strategies"),
    *("lightning.pytorch.callbacks", "lightning.pytorch.loggers", "torch.optim"),
    "torch.optim.lr_scheduler",
)
OTHER_FOLDER = "choose another --trainer.default_root_dir, --data.predict_output or --to"
STORAGE_ERRORS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"this user may not write there; {OTHER_FOLDER}"),
    errno.EROFS: f"this file system is read-only; {OTHER_FOLDER}",
    errno.ENOSPC: "the disk is full; free some space, go on with --ckpt_path auto",
    errno.EDQUOT: "the disk quota is used up; free some space, go on with --ckpt_path auto",
    errno.EFBIG: "the file-size limit is reached; raise `ulimit -f`, go on with --ckpt_path auto",
    errno.ENOTDIR: "a part of this path is a file; choose another path",
    errno.ENOENT: "it is missing; copy the folder that it belongs to again, or name another",
    errno.EISDIR: "this is a folder, a file is needed",
    errno.EEXIST: "a file is in the way; move it away",
    errno.ENAMETOOLONG: "this file system has no names so long; choose another path",
}


class UsageError(ValueError):
    """A command line that cannot be run: exit status 2."""


class Refusal(BaseException):
    """Message of a parser, and the parser. An Exception would make jsonargparse try other types."""

    def __str__(self) -> str:
        return explained(*self.args)  # here, not in the folder of a config, where a parser works


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns wrong values and missing files into usage errors, for which a run writes no files."""
    try:
        yield
    except (ValueError, FileNotFoundError, Refusal) as error:
        text = str(error)
        if isinstance(error, OSError) and error.strerror:  # a folder that cannot be made
            text = f"{error.filename}: {error.strerror}; choose another path."
        raise UsageError(text) from error


def screen(message: str, title: str = "error") -> str:
    """Returns the message in at most 24 lines of 80 columns."""
    lines: list[str] = []
    for line in f"{title}: {message.strip()}".splitlines():
        indent = " " * (len(line) - len(line.lstrip())) or "  "
        wrapped = textwrap.wrap(line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)
        lines += wrapped or [""]
    if len(lines) > LINES - 1:
        lines = [*lines[: LINES - 2], "… (more with UNISONO_TRACEBACK=1)"]
    return "\n".join(lines)


def say(line: str) -> None:
    """Prints a line to the user on stderr, so that standard output holds results alone."""
    print(line, file=sys.stderr, flush=True)


def labelled(label: str, text: str, width: int) -> str:
    """Returns the text after a label of `width` columns, in lines of 80; paths stay whole."""
    return textwrap.fill(
        text,
        COLUMNS,
        initial_indent=f"{label:<{width}} ",
        subsequent_indent=" " * (width + 1),
        break_long_words=False,
        break_on_hyphens=False,
    )


def say_first(line: str) -> None:
    """Prints a line to the user, in the first process of a run alone."""
    if is_first_process():
        say(line)


def run_guarded(run: Callable[[], Any]) -> int:
    """Runs a command and returns its exit status; an error is one screen on stderr.

    Errors raised by a line of this project and storage errors explain themselves: only their
    message is printed. Other errors print type and message; their traceback goes to the run
    folder. UNISONO_TRACEBACK=1 prints the traceback of every error.
    """
    try:
        status = run()
        sys.stdout.flush()
    except Exception as error:
        if isinstance(error, BrokenPipeError):
            poll = select.poll()
            poll.register(sys.stdout.fileno(), 0)
            if any(event & select.POLLERR for _, event in poll.poll(0)):
                # Nobody reads standard output any more, as after `| head`: redirect it, so that
                # Python's last flush at exit does not fail.
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return READER_GONE
        if getattr(error, "is_echo", False):
            return RUN  # another rank has reported it
        both = (error.__context__, error)  # after a GPU error, ending the run may raise again
        notes = [note for each in both for note in getattr(each, "__notes__", [])]
        what = one_screen(error) or _foreign(error)
        is_lost = getattr(error, "is_lost", False)  # then the notes explain more
        message = "\n".join([*notes, what] if is_lost else [what, *notes])
        if os.environ.get("UNISONO_TRACEBACK") == "1":
            traceback.print_exc()
        rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID")
        local, node = (os.environ.get(name) or "0" for name in ("LOCAL_RANK", "NODE_RANK"))
        place = f"rank {rank}" if rank else f"process {local} of node {node}"
        say(screen(message, "error" if is_first_process() else f"error on {place}"))
        return USAGE if isinstance(error, UsageError) else RUN
    return status if isinstance(status, int) else 0


def one_screen(error: BaseException) -> str | None:
    """Returns the message of an error that explains itself, or `None` for other errors."""
    if isinstance(error, UsageError) or type(error).__name__ == "MisconfigurationException":
        return str(error)
    if isinstance(error, OSError) and error.errno in STORAGE_ERRORS:
        path, way_out = error.filename, STORAGE_ERRORS[error.errno]
        if error.errno == errno.EACCES and os.path.isfile(path) and not os.access(path, os.R_OK):
            way_out = "this user may not read it; change its rights or name another file"
        place = f"{os.fsdecode(path)}: " if path else ""
        return f"{place}{error.strerror}: {way_out}."
    if isinstance(error, OSError) and re.fullmatch(r"\d+ requested and \d+ written", str(error)):
        # numpy drops the system's reason
        return f"{error}: {STORAGE_ERRORS[errno.ENOSPC]}, or name another disk by UNISONO_CACHE."
    if isinstance(error, (ValueError, OSError, RuntimeError, FloatingPointError)):
        frames = traceback.extract_tb(error.__traceback__)
        if frames and any(Path(frames[-1].filename).is_relative_to(own) for own in OWN_PACKAGES):
            return str(error)
    # The parser wraps what a constructor raises.
    return one_screen(error.__cause__) if error.__cause__ is not None else None


def _foreign(error: Exception) -> str:
    """Returns the message of a library's error or a bug, and says where its traceback is."""
    text = str(error).strip()
    if type(error).__name__ == "ProcessRaisedException":  # its text is the traceback
        starts = [match.start() for match in re.finditer(r"^[\w.]+: ", text, flags=re.MULTILINE)]
        text = text[starts[-1] if starts else 0 :]
    else:
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    lines = text.splitlines()
    lines = [*lines[:MESSAGE_LINES], *(["…"] if len(lines) > MESSAGE_LINES else [])]
    shown = "UNISONO_TRACEBACK=1 shows where it was raised."
    runs = Path(getattr(error, "run_folder", "runs"))
    folder = next((f for f in (runs, runs.parent) if f.is_dir() and f != Path()), None)
    if folder is not None:
        with suppress(OSError):  # a full disk may be the error itself
            with (folder / "error.txt").open("a", encoding="utf-8") as file:
                file.write(f"{datetime.now().isoformat(' ', 'seconds')} {shlex.join(sys.argv)}\n")
                traceback.print_exception(error, file=file)
            shown = f"Its traceback is in {folder / 'error.txt'}; --print_config shows all values."
    return "\n".join([*lines, shown])


def explained(message: str, parser: Any) -> str:
    """Returns a parser's message with the nearest option or value; the text names the wrong one."""
    if match := re.search(r"unrecognized arguments: (.+)", message, flags=re.DOTALL):
        words = match[1].split()
        wrong = next((w for w in words if w.startswith("-")), words[0])
        if not wrong.startswith("-"):
            is_file = wrong.endswith((".yaml", ".yml"))
            hint = did_you_mean([f"--config {wrong}"]) if is_file else ""
            return f"`{wrong}` is no option.{hint} Options are written --name=value.\n{OTHERS}"
        wrong = wrong.partition("=")[0]
        name = wrong.lstrip("-")
        return unknown_option(name, _keys_of(parser), f"--{_as_typed(name)}".removesuffix(name))
    refused = r"(?:^Option|(?:Group '(\w+)' does not )?accept (?:nested )?option) '([^']+)'"
    if match := re.search(refused, message):
        name = ".".join(filter(None, match.groups()))
        text = _placed(name, unknown_option(name, _keys_of(parser)))
        typed = dict(options(sys.argv[1:]))
        is_bare = "config" not in typed and _as_typed(name) in typed
        return text + f"\nModels and data bring options of their own: {BARE}" * is_bare
    if match := re.search(r'Parser key "([^"]+)":(.+)', message, flags=re.DOTALL):
        key, detail = _as_typed(match[1]), match[2].strip()
        value = "".join(re.findall(r"(?:Given value|Got value): (.+)", detail)[:1]).strip()
        text = _bad_value(key, value, detail)
        return _placed(key, text, value) if value else text
    if "arguments are required" in message:
        return f"{message}; {BARE}"
    return message


def _placed(key: str, text: str, value: str = "") -> str:
    """Returns a message with file and line of the option, unless it was typed, and with the way out
    if a run wrote that file."""
    words = sys.argv[1:]
    if key not in dict(options(words)):
        of_runs = [Path(w, name) for w in words for name in glob("config*.yaml", root_dir=w)]
        for path in reversed([*of_runs, *config_paths(words)]):
            if line := line_of(path, key, value):
                is_of_run = (path.parent / "ledger.jsonl").exists()
                return f"{path}:{line}: {text}" + OF_EARLIER * is_of_run
    return text


def _as_typed(name: str) -> str:
    """Returns the full name of an option as typed, because the parser of a class knows the names of
    its own options without their prefix."""
    return next((key for key, _ in options(sys.argv[1:]) if key.endswith(f".{name}")), name)


def _keys_of(parser: Any) -> list[str]:
    usage = re.findall(r"--([A-Za-z_][\w.]*)", parser.format_usage())
    return sorted({*usage, *parser.get_defaults(skip_validation=True).keys()})


def unknown_option(name: str, valid: list[str], prefix: str = "") -> str:
    """Returns the message for an unknown option, with the nearest valid names. Names are dotted;
    `prefix` precedes them on the command line."""
    group, _, last = name.rpartition(".")
    family = [k for k in valid if k.rpartition(".")[0] == group] or valid
    # `valid` lacks options of a class that is not named yet: then only the group is corrected.
    near = [f"{g}.{last}" for g in near_names(group, valid)[:1] if group not in valid]
    near += [k for k in family if k.rpartition(".")[2].startswith(last)]
    near = list(dict.fromkeys(near + near_names(name, family) + near_names(name, valid)))
    near = near or [k for k in family if k.rpartition(".")[2].startswith(last[:3])][:1]
    near = [ROOT] if name in RUN_NAMES and ROOT in valid else near
    text = f"there is no option `{prefix}{name}`.{did_you_mean([prefix + k for k in near[:3]])}"
    return text if near else f"{text}\n{OTHERS}"


def _bad_value(key: str, value: str, detail: str) -> str:
    """Returns the message for a value of the wrong type, a class that cannot be imported (with the
    nearest that can), or a value that is none of the choices."""
    if value == "None" and "NoneType" in detail:  # jsonargparse passes null on as this text
        return f"{key}: null is read here only from YAML; write it into a file for --config."
    class_names = re.findall("(?:class_path'?[ =:]+|val=)'([^']+)'", f"{detail} {value}")
    module, _, last = (name := [*class_names, value][0]).rpartition(".")
    known: dict[str, list[str]] = {}  # class -> import paths
    homes = [module] if re.fullmatch(r"[^\W\d][\w.]*", module) else []
    is_number = re.search("<class '(int|float)'>", detail)
    for home in () if is_number else dict.fromkeys([*homes, *CLASS_HOMES]):
        try:
            loaded = importlib.import_module(home)
        except Exception as error:
            if not f"{home}.".startswith(f"{getattr(error, 'name', None)}."):  # exists, but fails
                what = "".join(traceback.format_exception(error, limit=-1, chain=False)[1:])
                return f"{key}: {name} cannot be imported, install or mend it:\n{what}"
            continue
        for one in getattr(loaded, "__all__", vars(loaded)):
            known.setdefault(one, []).append(f"{home}.{one}")
    if re.search("No module named|dot import path|has no attribute", detail) and not is_number:
        paths = [path for one in near_names(last, known) for path in known[one]]
        return (
            f"{key}: there is no class `{name}`.{did_you_mean(paths[:3])}\n"
            "A class is named by its import path, such as lit_models.LitOccupationCoder."
        )
    if base := re.search(r"not correspond to a subclass of (\w+)", detail):
        return f"{key}: {value} is no {base[1]}. Name a class of that kind."
    kinds = [text for kind, text in KINDS.items() if f"Expected a <class '{kind}'>" in detail]
    choices = ",".join(re.findall(r"Literal\[([^\]]+)\]", detail)).split(",")
    if words := list(dict.fromkeys(word.strip(" '\"") for word in choices if word)):
        near = did_you_mean(near_names(value, words))
        return f"{key} must be one of {', '.join([*words, *kinds])}, got {value}.{near}"
    if re.search(r"[\[, ]\*", f" {value}"):
        detail = f"{value}: in YAML a word that begins with * is quoted, as in '[\"*_proj\"]'."
    return f"{key} must be {' or '.join(kinds)}, got {value}." if kinds else f"{key}: {detail}"
