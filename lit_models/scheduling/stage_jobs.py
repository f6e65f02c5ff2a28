"""The stages of a chain as jobs: each waits for the one before it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_models import config_files
from lit_models.commands.chain import (
    TRAINER_VERBS,
    Stage,
    chain,
    check_outputs,
    chosen_stages,
    read_stages,
)
from lit_models.errors import OneScreenErrors, UsageError
from lit_models.scheduling import queue, scripts
from lit_models.scheduling.jobs import (
    ACCELERATOR,
    Job,
    accelerator_of,
    checked_name,
    into_the_queue,
)
from lit_models.scheduling.resources import Resources, machines_for

NUM_NODES = "trainer.num_nodes"
CHOICES = ("--only", "--start")  # each job has one stage


@dataclass(frozen=True)
class Chain:
    """A chain as `unisono chain` reads it.

    Args:
        stages: all, in their order.
        chosen: those that are to run.
        folder: of the chain.
        seed: of the chain.
        machines: stage -> those of its job.
        changed: stage -> what its job changes in it, see `unisono chain --change`.
    """

    stages: list[Stage]
    chosen: list[Stage]
    folder: Path
    seed: int
    machines: Mapping[str, Resources]
    changed: Mapping[str, Mapping[str, Any]]


def is_chain(job: Job) -> bool:
    """Return whether the config of a job is that of a chain."""
    return config_files.given_value(job.options, "stages") is not None


def submit_chain(job: Job, most: Resources, counts: Sequence[str], verb: str) -> int:
    """Write a script for each stage that is not complete, and submit them, each after the last.

    Args:
        job: that was asked for.
        most: of each stage; its GPUs, or processes on CPUs, are the most on one machine.
        counts: devices of stages, such as dump:8.
        verb: of the command line, which stages have themselves.

    Raises:
        UsageError: the chain, a stage or its number of devices is wrong, or a run would be refused.
        ValueError: what lies in the chain's folder was made from something else.
        RuntimeError: sbatch is not here, or refuses.
    """
    _check_options(most, verb)
    read = _read(job.options, most, counts)
    waiting = _waiting(read)
    if not waiting:
        return 0
    _check_runs(read, waiting)
    name = checked_name(job.name or config_files.config_paths(job.options)[0].resolve().parent.name)
    files = {f"{read.stages.index(stage) + 1}-{stage.name}.sh": stage for stage in waiting}

    def scripts_in(place: Path) -> dict[str, str]:
        return {
            file: _text(job, read, stage, place / file, f"{name}-{stage.name}")
            for file, stage in files.items()
        }

    place, texts = scripts.free_folder(job.folder or Path("jobs") / name, scripts_in)
    scripts.put(texts, place)
    for file, stage in files.items():
        print(f"wrote      {place / file} for {read.machines[stage.name].in_words()}")
    _submit([place / file for file in files], job.dry_run)
    return 0


def devices_of(counts: Sequence[str], names: list[str]) -> dict[str, int]:
    """Return stage -> devices.

    Args:
        counts: such as dump:8.
        names: of the stages.

    Raises:
        UsageError: one is not written so, or there is no such stage.
    """
    found = {}
    for text in counts:
        name, _, count = text.partition(":")
        if name not in names:
            near = config_files.did_you_mean(config_files.near_names(name, names))
            raise UsageError(
                f"--stage={text}: there is no stage {name}.{near} The stages are "
                f"{', '.join(names)}."
            )
        if not count.isdigit() or int(count) < 1:
            raise UsageError(
                f"--stage={text}: write the stage and its number of devices, 1 or more, such as "
                f"--stage={name}:8."
            )
        found[name] = int(count)
    return found


def _check_options(most: Resources, verb: str) -> None:
    if verb != "fit":
        raise UsageError(f"--verb={verb}: the stages of a chain have verbs of their own.")
    if most.nodes > 1:
        raise UsageError(
            f"--nodes={most.nodes}: a stage of a chain takes as many nodes as its devices need; "
            "give --stage=NAME:DEVICES, and the most on one node with --gpus-per-node."
        )


def _parsed(argv: list[str]) -> Any:
    """Return the options of a chain, as `unisono chain` reads them.

    Raises:
        UsageError: one is the job's own.
    """
    from jsonargparse import ArgumentParser

    class ChainParser(OneScreenErrors, ArgumentParser):
        takes_dashes = True

    for key in ("launcher", "stages"):
        if config_files.given_option(argv, key) is not None:
            raise UsageError(f"--{key} is set by the job; leave it out.")
    parser = ChainParser(prog="unisono submit")
    parser.add_argument("--config", action="config")
    parser.add_function_arguments(chain)
    return parser.parse_args(config_files.join_groups(argv))


def _machines(
    stages: Mapping[str, Any], most: Resources, counts: Sequence[str]
) -> dict[str, Resources]:
    """Return stage -> machines: those of its devices, one where none are named."""
    devices = devices_of(counts, list(stages))
    has_gpus = most.gpus_per_node is not None
    found = {}
    for stage in read_stages(stages):
        if stage.verb not in TRAINER_VERBS and stage.name in devices:
            raise UsageError(f"--stage={stage.name}:{devices[stage.name]}: {stage.verb} runs on "
                             "no devices; leave it out.")  # fmt: skip
        count = devices.get(stage.name, 1)
        limit = most.tasks_per_node if has_gpus or most.tasks_per_node > 1 else count
        nodes, each = machines_for(count, limit)
        gpus = each if has_gpus and stage.verb in TRAINER_VERBS else None
        found[stage.name] = replace(most, nodes=nodes, tasks_per_node=each, gpus_per_node=gpus)
    return found


def _changes(stage: Stage, machines: Resources) -> dict[str, Any]:
    """Return what the job changes in a stage; see `unisono chain --change`."""
    if stage.verb not in TRAINER_VERBS:
        return {}
    options: dict[str, Any] = {NUM_NODES: machines.nodes} if machines.nodes > 1 else {}
    paths = [str(config_files.find_config(name)) for name in stage.config]
    files = [word for path in paths for word in ("--config", path)]
    said = stage.options.get(ACCELERATOR) or config_files.given_value(files, ACCELERATOR)
    if said is None:
        options[ACCELERATOR] = accelerator_of(machines)
    return {"devices": machines.tasks_per_node, **({"options": options} if options else {})}


def _read(argv: list[str], most: Resources, counts: Sequence[str]) -> Chain:
    """Return the chain of a command line.

    Raises:
        UsageError: it cannot be run.
    """
    try:
        given = _parsed(argv)
        return _with_machines(given, _machines(given["stages"] or {}, most, counts))
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def _with_machines(given: Any, machines: Mapping[str, Resources]) -> Chain:
    changes = {name: dict(values) for name, values in (given["change"] or {}).items()}
    changed = {}
    for stage in read_stages(given["stages"], changes):
        before = changes.setdefault(stage.name, {})
        if "devices" in before:
            raise UsageError(
                f"--change.{stage.name}.devices={before['devices']} is set by the job: use "
                f"--stage={stage.name}:{before['devices']}."
            )
        own = changed[stage.name] = _changes(stage, machines[stage.name])
        options = {**before.get("options", {}), **own.get("options", {})}
        changes[stage.name] = {**before, **own, **({"options": options} if options else {})}
    stages = read_stages(given["stages"], changes)
    only = [given["only"]] if isinstance(given["only"], str) else given["only"]
    folder = Path(given["to"].replace("{seed}", str(given["seed"]))).expanduser()
    chosen = chosen_stages(stages, given["start"], only)
    return Chain(stages, chosen, folder, given["seed"], machines, changed)


def _waiting(read: Chain) -> list[Stage]:
    """Return the chosen stages that are not complete, and say which are."""
    states = check_outputs(read.stages, read.chosen, read.folder, read.seed)
    for stage in read.chosen:
        if states[stage.name] == "complete":
            print(f"stage {stage.name} is complete: no job")
    return [stage for stage in read.chosen if states[stage.name] != "complete"]


def _check_runs(read: Chain, waiting: list[Stage]) -> None:
    from lit_models.scheduling.acceptance import check_run

    for stage in waiting:
        if stage.verb in TRAINER_VERBS:
            arguments = stage.arguments(read.folder, read.seed)
            check_run(arguments, read.machines[stage.name].processes, is_stage=True)


def _text(job: Job, read: Chain, stage: Stage, path: Path, name: str) -> str:
    """Return the sbatch script of a stage."""
    machines = read.machines[stage.name]
    kept = [word for word in scripts.quoted_options(job.run) if not word.startswith(CHOICES)]
    own = [f"--only={stage.name}"]
    for key, value in read.changed[stage.name].items():
        values = value if isinstance(value, Mapping) else {"": value}
        own += [f"--change.{stage.name}.{key}{'.' * bool(k)}{k}={v}" for k, v in values.items()]
    launcher = shlex.join(scripts.srun_of(machines))
    first = [job.python, *scripts.MODULE, "chain"]
    options = [*kept, *own, f"--launcher={shlex.quote(launcher)}"]
    names = {
        "title": f"The stage {stage.name} of a chain, on {machines.in_words()}.",
        **{"path": str(path), "name": name, "run_folder": ""},
    }
    command = scripts.command_lines([shlex.quote(word) for word in first], options)
    return scripts.job_script(machines, names, job.activate, command)


def _submit(paths: list[Path], is_rehearsal: bool) -> None:
    if not is_rehearsal:
        into_the_queue(paths)
        return
    for i, path in enumerate(paths):
        command = shlex.join(queue.sbatch_command(path, "JOB" if i else None))
        print(f"submit it  job=$({command.replace('JOB', '$job')})")
