"""Fills the templates of configs/slurm in, and puts the scripts into a folder."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lit_models.config_files import config_folders
from lit_models.errors import UsageError
from lit_models.scheduling.resources import Resources

LOGS = Path("logs")  # the templates name it
MODULE = ("-m", "lit_models")
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
# Without --kill-on-bad-exit the other tasks wait for ever for one that has failed.
SRUN = ("srun", "--kill-on-bad-exit=1")
TORCHRUN = ("-m", "torch.distributed.run")
SHELL = ("activate", "command")  # lines of the shell, words quoted already
RENDEZVOUS_PORT = 29400
MAX_RESTARTS = 3


def python_of(activate: Iterable[str]) -> str:
    """Return the Python of a job: the one its activation lines find, else the one of this."""
    return "python" if list(activate) else sys.executable


def srun_of(resources: Resources) -> list[str]:
    """Return the words before a command that start it once for each process of the job."""
    cpus = resources.cpus_per_task
    return [*SRUN, *([f"--cpus-per-task={cpus}"] if cpus else [])]  # srun does not inherit it


def torchrun_options(resources: Resources, name: str) -> list[str]:
    """Return the options of torchrun, for the shell, that start as many processes."""
    options = [f"--max-restarts={MAX_RESTARTS}", f"--nproc-per-node={resources.tasks_per_node}"]
    if resources.nodes == 1:
        return [*options, "--standalone"]
    options += [f"--nnodes={resources.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={name}"]
    return [*options, '--rdzv-endpoint="$first:$port"']


def job_script(
    resources: Resources, names: Mapping[str, str], activate: Iterable[str], command: list[str]
) -> str:
    """Return the text of an sbatch script.

    Args:
        resources: of the job.
        names: `title`, `path` of the script, `name` of the job, and `run_folder` as the shell
            reads it, empty where the command knows it.
        activate: lines for the shell.
        command: its lines, see `command_lines`.
    """
    values: dict[str, Any] = {**asdict(resources), **names}
    # An option without a value: its line is there, or it is not.
    values["exclusive"] = " " if resources.is_exclusive else None
    return filled("job.sh", {**values, **shell_values(activate), "command": "\n".join(command)})


def shell_values(activate: Iterable[str]) -> dict[str, str]:
    """Return what both templates say of the job's shell: `activate`, its Python as the shell reads
    it, and what to do where that has no unisono.

    Args:
        activate: lines for the shell.
    """
    lines = list(activate)
    way_out = "these lines find another Python; mend the ones above, or --activate of submit"
    if not lines:
        way_out = "install it there, or give unisono submit the lines that find it with --activate"
    python = shlex.quote(python_of(lines))
    return {"activate": "\n".join(lines), "python": python, "missing": way_out}


def filled(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with its values; a line is left out if its value is none or empty.

    Raises:
        UsageError: a value has a line break, after which the shell would read a command.
    """
    for name, value in values.items():
        if name not in SHELL and isinstance(value, str) and (value + "x").splitlines()[1:]:
            raise UsageError(f"the job's {name} has a line break: {value!r}; write it in one line.")
    folder = next(f for f in config_folders() if (f / "slurm" / template).is_file())
    lines: list[str] = []
    for line in (folder / "slurm" / template).read_text(encoding="utf-8").splitlines():
        names = PLACEHOLDER.findall(line)
        is_there = all(values[name] not in (None, "") for name in names)
        # Blank lines between which a line was left out become one.
        if is_there and (line or lines[-1:] != [""]):
            lines.append(PLACEHOLDER.sub(lambda m: str(values[m[1]]), line).rstrip())
    return "\n".join(lines) + "\n"


def command_lines(first: list[str], options: Iterable[str]) -> list[str]:
    """Return the lines of one shell command, an option in each.

    Args:
        first: shell words, quoted where they must be.
        options: of the command, quoted too.
    """
    lines = [" ".join(first), *(f"  {option}" for option in options)]
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def quoted_options(words: list[str]) -> list[str]:
    """Return the words of a command line for the shell, an option and its value in one text."""
    out: list[str] = []
    for i, word in enumerate(words):
        is_value = i > 0 and not word.startswith("--") and is_open(words[i - 1])
        if is_value:
            out[-1] += f" {shlex.quote(word)}"
        else:
            out.append(shlex.quote(word))
    return out


def is_open(word: str) -> bool:
    """Return whether a word is an option whose value would be the next one."""
    return word.startswith("-") and "=" not in word


def put(scripts: Mapping[str, str], folder: Path) -> None:
    """Write the scripts of one job, and the folder in which SLURM opens its logs.

    Args:
        scripts: file name -> text.
        folder: as `free_folder` returns it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    LOGS.mkdir(exist_ok=True)


def free_folder(folder: Path, scripts_in: Any) -> tuple[Path, dict[str, str]]:
    """Return the first of FOLDER, FOLDER-2, … in which no other script is overwritten.

    Args:
        folder: that was asked for.
        scripts_in: returns file name -> text of the scripts for a folder, which they name.

    Raises:
        UsageError: a file is where a folder is needed.
    """
    _check_folder(LOGS, "SLURM opens the logs in this folder; move that file away")
    number, chosen = 1, folder
    while True:
        _check_folder(chosen, "name a folder for the scripts with --scripts")
        scripts = scripts_in(chosen)
        there = {p.name: p.read_text(encoding="utf-8") for p in chosen.glob("*.sh")}
        if not there or there == scripts:
            return chosen, scripts
        number += 1
        chosen = folder.with_name(f"{folder.name}-{number}")


def _check_folder(folder: Path, way_out: str) -> None:
    for path in (folder, *folder.parents):
        if os.path.lexists(path) and not path.is_dir():
            raise UsageError(f"{path} is no folder: {way_out}.")
