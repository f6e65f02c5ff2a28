"""One run as a job: what is added to its options, its scripts, and into the queue."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lit_models import config_files
from lit_models.commands.chain import TRAINER_VERBS
from lit_models.errors import UsageError, say, screen
from lit_models.scheduling import queue, scripts
from lit_models.scheduling.resources import NODE_GPUS, Resources, usable_nodelist

ROOT = "trainer.default_root_dir"
ACCELERATOR = "trainer.accelerator"
OWN = {
    "trainer.devices": "--gpus-per-node, or --tasks-per-node for a job on CPUs",
    "trainer.num_nodes": "--nodes",
}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# In a job of these names Lightning does not look for SLURM, and each task trains a copy.
NO_NAMES = ("bash", "interactive")


@dataclass(frozen=True)
class Job:
    """What `unisono submit` was asked for, but for the resources.

    Args:
        run: options of the run, as they were typed.
        name: of the job; none takes that of its config.
        folder: of the scripts; none takes jobs/NAME.
        activate: lines for the job's shell.
        dry_run: nothing is submitted.
    """

    run: list[str]
    name: str | None = None
    folder: Path | None = None
    activate: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def options(self) -> list[str]:
        """Of the run, with the paths of its configs found."""
        return config_files.expand_configs(self.run)

    @property
    def python(self) -> str:
        """That the job starts."""
        return scripts.python_of(self.activate)


def requested(
    nodes: int,
    gpus_per_node: int | None,
    tasks_per_node: int | None,
    cpus_per_task: int | None,
    node_gpus: int | None,
    exclusive: bool | None,
    nodelist: str | None,
    partition: str | None,
    account: str | None,
    time_limit: str,
    save_ahead_s: int,
) -> Resources:
    """Return what was asked for, with what was left out.

    Raises:
        UsageError: SLURM would refuse it, or the run could not be what it says.
    """
    if gpus_per_node is not None and node_gpus is None:
        node_gpus = queue.gpus_per_machine(partition)
    nodelist, ignored = usable_nodelist(nodelist, nodes)
    if ignored:
        say(screen(ignored, "warning"))
    return Resources(
        nodes=nodes,
        tasks_per_node=tasks_per_node if tasks_per_node is not None else gpus_per_node or 1,
        gpus_per_node=gpus_per_node,
        cpus_per_task=cpus_per_task,
        node_gpus=NODE_GPUS if node_gpus is None else node_gpus,
        exclusive=exclusive,
        nodelist=nodelist,
        partition=partition,
        account=account,
        time_limit=time_limit,
        save_ahead_s=save_ahead_s,
    )


def submit_run(job: Job, resources: Resources, stages: Sequence[str], verb: str) -> int:
    """Write the scripts of a run, and submit it unless it is a rehearsal.

    Raises:
        UsageError: the job would be refused, by SLURM or by the run's own parser.
        RuntimeError: sbatch is not here, or refuses.
    """
    from lit_models.cli import run_root
    from lit_models.scheduling.acceptance import check_run

    check_options(job.options, resources, verb, stages)
    check_is_run(job.options)
    words = [verb, *job.run, *added_options(job.options, resources)]
    check_run(words, resources.processes)
    root = config_files.given_option(job.options, ROOT)
    folder = run_root(job.options)
    name = checked_name(job.name or folder.name)
    keeps = None if verb != "fit" or root else folder.with_name(name)

    def scripts_in(place: Path) -> dict[str, str]:
        return {
            "job.sh": sbatch_text(job, resources, place / "job.sh", name, words, keeps),
            "torchrun.sh": torchrun_text(job, resources, place / "torchrun.sh", name, words, keeps),
        }

    place, texts = scripts.free_folder(job.folder or Path("jobs") / name, scripts_in)
    scripts.put(texts, place)
    print(f"wrote      {place / 'job.sh'}, {place / 'torchrun.sh'} for {resources.in_words()}")
    if job.dry_run:
        print(f"submit it  {shlex.join(queue.sbatch_command(place / 'job.sh', None))}")
        return 0
    number = into_the_queue([place / "job.sh"])[0]
    if verb == "fit":
        print(f"run folder {root or f'{keeps}_{number}'}; with --{ROOT}= it a new job goes on")
    return 0


def into_the_queue(paths: Sequence[Path]) -> list[str]:
    """Submit scripts, each after the one before it, and say so; return the jobs' numbers.

    Raises:
        RuntimeError: sbatch is not here, or refuses.
    """
    numbers = queue.submit_all(paths)
    for path, number in zip(paths, numbers, strict=True):
        print(f"submitted  job {number}: {path.stem}, logs {scripts.LOGS}/train_{number}.out, .err")
        reason = queue.never_starts(number)
        if reason is not None:
            say(
                screen(
                    f"SLURM took the job {number} and will not start it, for {reason}: it asks for "
                    f"more than its partition gives (`sinfo` shows that). Take it back with "
                    f"`scancel {number}` and ask for less, such as a shorter --time-limit.",
                    "warning",
                )
            )
    return numbers


def check_options(argv: list[str], resources: Resources, verb: str, stages: Sequence[str]) -> None:
    """Refuse options of the run that are the job's own, or that contradict it.

    Raises:
        UsageError: there is one.
    """
    if verb not in TRAINER_VERBS:
        raise UsageError(f"--verb must be one of {', '.join(TRAINER_VERBS)}, got {verb}.")
    if stages:
        raise UsageError(
            f"--stage={stages[0]}: only a chain has stages, a config with the key `stages`; a run "
            "takes --nodes and --gpus-per-node."
        )
    for key, instead in OWN.items():
        given = config_files.given_option(argv, key)
        if given is not None:
            raise UsageError(f"--{key}={given} is set by the job: use {instead}.")
    ckpt_path = config_files.given_option(argv, "ckpt_path")
    if verb == "fit" and ckpt_path not in (None, "auto"):
        raise UsageError(
            f"--ckpt_path={ckpt_path}: a job goes on from the newest checkpoint of its run folder. "
            f"To go on with an earlier run, set --{ROOT} to its folder; to begin with weights, "
            "--model.init_from."
        )
    accelerator = config_files.given_value(argv, ACCELERATOR)
    if accelerator in ("gpu", "cuda") and not resources.gpus_per_node:
        raise UsageError(f"{ACCELERATOR}={accelerator} in a job without GPUs: add --gpus-per-node.")


def check_is_run(argv: list[str]) -> None:
    """Refuse a command line that names no run: neither a config nor a module and data.

    Raises:
        UsageError: it does not.
    """
    named = {word.partition("=")[0].partition(".")[0] for word in argv}
    if "--config" not in named and not {"--model", "--data"} <= named:
        raise UsageError(
            "`unisono submit` needs a run: give its config with --config FILE, such as --config "
            "occupation_coder/demo.yaml; `unisono --help` lists those that are shipped."
        )


def added_options(argv: list[str], resources: Resources) -> list[str]:
    """Return the options of the run that follow from the job."""
    added = [
        f"--trainer.devices={resources.tasks_per_node}",
        f"--trainer.num_nodes={resources.nodes}",
    ]
    if config_files.given_value(argv, ACCELERATOR) is None:
        added.append(f"--{ACCELERATOR}={accelerator_of(resources)}")
    return added


def accelerator_of(resources: Resources) -> str:
    """Return that of a run which names none: `auto` would train on the CPUs of a machine whose
    GPUs are broken, and take GPUs that the job did not ask for."""
    return "gpu" if resources.gpus_per_node else "cpu"


def checked_name(name: str) -> str:
    """Return the name of a job.

    Raises:
        UsageError: SLURM, Lightning or a file system would stumble over it.
    """
    if not NAME.fullmatch(name) or name in NO_NAMES:
        raise UsageError(
            f"--name={name}: a job's name has letters, digits, dots, dashes and underscores, and "
            f"is none of {', '.join(NO_NAMES)}, in which Lightning does not see SLURM."
        )
    return name


def sbatch_text(
    job: Job, resources: Resources, path: Path, name: str, words: list[str], keeps: Path | None
) -> str:
    """Return the sbatch script of a run.

    Args:
        job: that was asked for.
        resources: of the job.
        path: of the script.
        name: of the job.
        words: the run's command line.
        keeps: the run folder but for the job's number; none where the run's options know it.
    """
    first = [*scripts.srun_of(resources), job.python, *scripts.MODULE, words[0]]
    names = {
        "title": f"unisono {words[0]} on {resources.in_words()}.",
        **{"path": str(path), "name": name},
        "run_folder": f"{shlex.quote(str(keeps))}_$SLURM_JOB_ID" if keeps else "",
    }
    command = scripts.command_lines(
        [shlex.quote(word) for word in first],
        [*scripts.quoted_options(words[1:]), *_root_and_checkpoint(words, keeps, '"$run"')],
    )
    return scripts.job_script(resources, names, job.activate, command)


def torchrun_text(
    job: Job, resources: Resources, path: Path, name: str, words: list[str], keeps: Path | None
) -> str:
    """Return the script of a run for machines without SLURM; arguments as `sbatch_text`."""
    has_others = resources.nodes > 1
    root = shlex.quote(f"{keeps}_torchrun") if keeps else ""
    first = [shlex.quote(job.python), *scripts.TORCHRUN]
    options = [*scripts.torchrun_options(resources, name)]
    options += [shlex.join([*scripts.MODULE, words[0]]), *scripts.quoted_options(words[1:])]
    options += _root_and_checkpoint(words, keeps, root)
    values = {
        "title": f"unisono {words[0]} on {resources.in_words()}.",
        "usage": f"bash {path}" + " FIRST_MACHINE [PORT]   (on each machine)" * has_others,
        **scripts.shell_values(job.activate),
        "arguments": has_others
        * (
            "first=${1:?give the name or the address of the first machine} "
            f"port=${{2:-{scripts.RENDEZVOUS_PORT}}}"
        ),
        "command": "\n".join(scripts.command_lines(first, options)),
    }
    return scripts.filled("torchrun.sh", values)


def _root_and_checkpoint(words: list[str], keeps: Path | None, root: str) -> list[str]:
    if words[0] != "fit":
        return []
    own = [f"--{ROOT}={root}"] if keeps else []
    return [*own, "--ckpt_path=auto"]
