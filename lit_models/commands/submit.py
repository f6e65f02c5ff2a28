"""Scripts of jobs, and their submission."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lit_models.cli import check_run
from lit_models.commands import arguments_of
from lit_models.commands.chain import (
    TRAINER_VERBS,
    Stage,
    chain,
    check_outputs,
    chosen_stages,
    read_stages,
)
from lit_models.config_files import (
    ROOT,
    config_paths,
    expand_configs,
    given_option,
    given_value,
    one_word_each,
    run_root,
)
from lit_models.engines import jobs
from lit_models.engines.jobs import Resources
from lit_models.errors import UsageError, usage_errors
from lit_models.training import rules

TEMPLATES = Path(jobs.__file__).parent / "templates"
LOGS = Path("logs")  # as in the template
ACCELERATOR = "trainer.accelerator"
MODULE = ("-m", "lit_models")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


def submit(
    *,
    resources: Resources,
    run_options: list[str] | None = None,
    name: str | None = None,
    dry_run: bool = False,
) -> int:
    """Write the script of a job and submit it to a cluster.

    A SLURM job saves before its time limit, is requeued and resumes in its run folder until the run
    is complete. From the config of a chain, each stage that is not complete becomes such a job,
    which waits for the job before it. A stage runs on its `devices`, such as
    --change.dump.devices=8; --gpus-per-node or --tasks-per-node is the most that a node has.

    Args:
        run_options: every other option is the run's, such as --config and --trainer.max_epochs=3.
        name: name of the job, of its folder of scripts, jobs/NAME, and of its run: runs/NAME, with
            SLURM runs/NAME_JOBID.
        dry_run: write the scripts and submit nothing.

    Raises:
        UsageError: SLURM or the run's own parser would refuse the job.
        RuntimeError: sbatch, or another cluster's command, is missing or fails.
    """
    run, target = run_options or [], resources.target
    options = expand_configs(run)
    is_chain = given_value(options, "stages") is not None
    if name is None:
        namesake = config_paths(options)[0].resolve().parent if is_chain else run_root(options)
        name = re.sub(r"[^A-Za-z0-9_.]+", "-", namesake.name).strip("-._") or "run"
    if not NAME.fullmatch(name) or name in rules.SHELLS:
        raise UsageError(
            f"--name={name}: a job's name has letters, digits, dots, dashes and underscores, and "
            f"is none of {', '.join(rules.SHELLS)}, in which Lightning does not see SLURM."
        )
    is_there = not resources.activate and target not in jobs.REMOTE
    python = sys.executable if is_there else "python"  # on the PATH there
    if is_chain and target != "slurm":
        raise UsageError(
            f"--target={target}: the stages of a chain wait for each other in SLURM's queue alone. "
            "Give the config of one stage, or run them one after the other by `unisono chain`."
        )
    scripts = (chain_scripts if is_chain else run_script)(run, resources, name, python)
    if not scripts:
        return 0
    paths = write_scripts(scripts, name)
    numbers = hand_in(paths, resources, dry_run)
    if dry_run:
        return 0
    for path, job in zip(paths, numbers, strict=False):
        of_slurm = f"job {job}: {path.stem}, logs {LOGS}/train_{job}.out, .err"
        print(f"submitted  {of_slurm if job else path}")
    if target == "slurm" and not is_chain:
        folder = scripts["job.sh"].run_folder.replace("$SLURM_JOB_ID", numbers[0])
        folder = folder or given_option(options, ROOT) or ""
        print(f"run folder {folder}; with --{ROOT}= it a new job goes on")
    return 0


@dataclass(frozen=True)
class Script:
    """One file of a job."""

    resources: Resources
    name: str  # of the job
    python: str  # interpreter that it starts
    command: Sequence[str]  # its lines, quoted for the shell
    run_folder: str = ""  # in shell syntax; "" if the command names it

    def folder(self, path: Path) -> str:
        """Return the run folder; after a final slash, the name of the script's folder is added."""
        return self.run_folder + path.parent.name * self.run_folder.endswith("/")

    def text(self, path: Path) -> str:
        """Return the text of the file that will be written to `path`."""
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        # Shell and YAML, not HTML: every value is quoted, or checked to be one word.
        environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return environment.get_template(self.resources.target + path.suffix).render(
            **asdict(resources := self.resources),
            resources=resources,
            path=path,
            name=self.name,
            label=f"unisono-{re.sub('[^a-z0-9]+', '-', path.parent.name.lower())[:48]}".strip("-"),
            hand_in=shlex.join(resources.hand_in(path)),
            run_folder=self.folder(path),
            python=shlex.quote(self.python),
            command=" \\\n  ".join(self.command),
        )


def write_scripts(scripts: dict[str, Script], name: str) -> list[Path]:
    """Write scripts, file name -> script, to a folder without others; return their paths."""
    for number in itertools.count(1):  # jobs/NAME, jobs/NAME-2, …: no other script is overwritten
        place = Path("jobs", name if number == 1 else f"{name}-{number}")
        texts = {file: script.text(place / file) for file, script in scripts.items()}
        there = {path.name: path.read_bytes() for path in place.glob("[!.]*.*") if path.is_file()}
        folders = [shlex.split(one.folder(place / file)) for file, one in scripts.items()]
        is_free = not there and not any(Path(*words).exists() for words in folders if words)
        if is_free or there == {file: text.encode() for file, text in texts.items()}:
            break
    place.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        (place / file).write_text(text, encoding="utf-8")
        (place / file).chmod(0o755)
        print(f"wrote      {place / file} for {scripts[file].resources}")
    return [place / file for file in scripts]


def run_script(run: list[str], resources: Resources, name: str, python: str) -> dict[str, Script]:
    """Return the script of a run's job.

    Raises:
        UsageError: an option belongs to the job, not the run, or the run's parser refuses it.
    """
    options = expand_configs(run)
    jobs.check_options(options, "fit", "--gpus-per-node or --tasks-per-node", "--nodes")
    own = resources.world if resources.target == "slurm" else []  # the others set it at the start
    if given_value(options, ACCELERATOR) is None:
        own.append(f"--{ACCELERATOR}={resources.accelerator}")
    for nodes in {resources.fewest, resources.most}:
        world = replace(resources, nodes=str(nodes))
        check_run(["fit", *run, *own, *world.world], world.processes)
    words = [shlex.quote(word) for word in one_word_each([*run, *own])]
    run_folder, root = "", run_root(options)
    if resources.target in jobs.REMOTE:
        root = root if given_option(options, ROOT) is not None else Path(resources.mount, root)
        if not root.is_absolute() or (resources.mount and not root.is_relative_to(resources.mount)):
            raise UsageError(
                f"--{ROOT}={root}: a job for {resources.target} needs a folder that all its "
                f"machines see and that stays, such as --{ROOT}={resources.mount or '/shared'}"
                "/runs/mine."
            )
    if not given_option(options, ROOT):
        root = root.with_name(name)
        run_folder = f"{shlex.quote(str(root.parent))}/"
        if resources.target == "slurm":
            run_folder = f"{shlex.quote(str(root))}_$SLURM_JOB_ID"
        words.append(f'--{ROOT}="$run"')
    if resources.target == "slurm":  # the other targets' templates have these words
        words.insert(0, shlex.join([*resources.srun, python, *MODULE, "fit"]))
    file = next(TEMPLATES.glob(f"{resources.target}.*")).with_stem("job").name
    return {file: Script(resources, name, python, [*words, "--ckpt_path=auto"], run_folder)}


def hand_in(files: Sequence[Path], resources: Resources, is_dry: bool) -> list[str]:
    """Submit files with their cluster's command, or print how, and return the numbers of SLURM
    jobs. Each waits for the job before it; if one is refused, those before it are cancelled.

    Raises:
        RuntimeError: the command is missing or fails.
    """
    is_slurm, numbers = resources.target == "slurm", list[str]()
    if is_slurm:
        LOGS.mkdir(exist_ok=True)
    # Inside of a job, that job's variables would override the script.
    ours, allowed = ("SLURM_", "SBATCH_"), ("SLURM_CONF", "SLURM_CLUSTERS")
    environ = {k: v for k, v in os.environ.items() if k in allowed or not k.startswith(ours)}
    for file in files:
        command = resources.hand_in(file, numbers[-1] if numbers else None)
        line = shlex.join(command)
        if resources.target == "torchrun":
            print(f"start it   {line}, on each machine, from this folder, which all must see")
        elif is_dry:
            print(f"submit it  {f'job=$({line})'.replace('JOB', '$job') if is_slurm else line}")
            numbers = ["JOB"]
        elif shutil.which(command[0]) is None:
            raise RuntimeError(
                f"there is no {command[0]} on this machine, so nothing is submitted. Call this "
                f"where it is, such as a login node of the cluster, or there: {line}"
            )
        else:
            done = subprocess.run(command, env=environ, capture_output=is_slurm, text=True)
            if done.returncode:
                if numbers:
                    subprocess.run(["scancel", *numbers], capture_output=True)
                why = " ".join(done.stderr.split()) if is_slurm else "it says above why"
                back = f" The jobs before it are cancelled: {', '.join(numbers)}." * bool(numbers)
                raise RuntimeError(
                    f"{command[0]} ended with status {done.returncode}: {why or 'it does not say'}."
                    f" Its file is {file}; call `unisono submit` again with other options.{back}"
                )
            numbers.append(done.stdout.strip().partition(";")[0] if is_slurm else "")
    return numbers


def chain_scripts(run: list[str], most: Resources, name: str, python: str) -> dict[str, Script]:
    """Return a script for each stage of a chain that is not complete.

    Args:
        run: options of `unisono chain`.
        most: resources of a stage; its GPUs, or processes on CPUs, are the most on one machine.
        name: start of the jobs' names.
        python: interpreter that the job starts.

    Raises:
        UsageError: the chain or a stage is wrong, or a run would be refused.
        ValueError: the chain's folder holds output made from other values.
    """
    if most.most > 1:
        raise UsageError(
            f"--nodes={most.nodes}: a stage of a chain takes as many nodes as its devices need; "
            "give --change.NAME.devices=8, and the most on one node with --gpus-per-node."
        )
    options = expand_configs(run)
    stages: list[Stage] = []
    machines: dict[str, Resources] = {}
    changes: dict[str, list[str]] = {}
    with usage_errors():
        arguments = {**(chain.__kwdefaults__ or {}), **arguments_of(options, chain)}
        for stage in read_stages(arguments["stages"] or {}, arguments["change"]):
            machines[stage.name] = job = job_of_stage(stage, most)
            if stage.verb in TRAINER_VERBS:
                own: dict[str, Any] = {"trainer.num_nodes": job.most} if job.most > 1 else {}
                if not (stage.options.get(ACCELERATOR) or stage.given(ACCELERATOR)):
                    own[ACCELERATOR] = job.accelerator
                stage = replace(stage, devices=job.tasks, options={**stage.options, **own})
                words = {"devices": job.tasks, **{f"options.{k}": v for k, v in own.items()}}
                changes[stage.name] = [f"--change.{stage.name}.{k}={v}" for k, v in words.items()]
            stages.append(stage)
        chosen = chosen_stages(stages, arguments["only"])
    folder = Path(arguments["to"].replace("{seed}", str(arguments["seed"]))).expanduser()
    states, _ = check_outputs(stages, chosen, folder, arguments["seed"])
    run_words = [shlex.quote(word) for word in one_word_each(run) if not word.startswith("--only=")]
    scripts = {}
    for number, stage in enumerate(stages, 1):
        if stage not in chosen:
            continue
        if states[stage.name] == "complete":
            print(f"stage {stage.name} is complete: no job")
            continue
        job = machines[stage.name]
        if stage.given("model"):  # else it is the checkpoint's, which may not exist yet
            check_run(stage.arguments(folder, arguments["seed"]), job.processes, is_stage=True)
        launcher = f"--launcher={shlex.quote(shlex.join(job.srun))}"
        command = [shlex.join([python, *MODULE, "chain"]), *run_words, f"--only={stage.name}"]
        command += [*changes.get(stage.name, []), launcher]
        scripts[f"{number}-{stage.name}.sh"] = Script(job, f"{name}-{stage.name}", python, command)
    return scripts


def job_of_stage(stage: Stage, most: Resources) -> Resources:
    """Return the resources of a stage's job: the fewest nodes with equally many devices each.

    Raises:
        UsageError: the devices of the stage are no number.
    """
    count = 1 if stage.devices is None else stage.devices
    if not isinstance(count, int) or count < 1:
        raise UsageError(
            f"stage {stage.name}: a job needs a number of devices, got {count}; give "
            f"--change.{stage.name}.devices=8."
        )
    each = most.tasks if most.gpus_per_node is not None or most.tasks > 1 else count
    nodes = next(n for n in range(1, count + 1) if count % n == 0 and count // n <= each)
    gpus = count // nodes if most.gpus_per_node is not None and stage.config else None
    return replace(most, nodes=str(nodes), tasks_per_node=count // nodes, gpus_per_node=gpus)
