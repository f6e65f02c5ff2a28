"""Write a job's script for SLURM or torchrun, and submit it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lit_models.errors import UsageError

if TYPE_CHECKING:  # a chain's help needs none of it
    from lit_models.commands.chain import Stage

TEMPLATES = Path(__file__).parent / "templates"
LOGS = Path("logs")  # the template names it
ROOT, ACCELERATOR = "trainer.default_root_dir", "trainer.accelerator"
MODULE = ("-m", "lit_models")
CPUS_BESIDE_A_GPU = 4  # which make its batches
MOST_AHEAD_S = 65535  # of sbatch --signal
# In the order of the manual of sbatch: minutes, minutes:seconds, hours:minutes:seconds, then days.
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
TIME_RULE = "write 24:00:00, 90 (minutes) or 2-12 (days and hours)"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
# In a job of these names Lightning does not look for SLURM, and each task trains a copy.
NO_NAMES = ("bash", "interactive")


@dataclass(frozen=True)
class Resources:
    """What a job asks the cluster for, checked before it waits a night for it.

    Args: as `submit`; `gpus_per_node` is `None` for a job on CPUs.
    """

    nodes: int = 1
    tasks_per_node: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    exclusive: bool = False
    nodelist: str | None = None
    partition: str | None = None
    account: str | None = None
    time_limit: str = "24:00:00"
    save_ahead_s: int = 300

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            option = f"--{name.replace('_', '-')}"
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                way_out = "; leave it out for a job on CPUs." if name == "gpus_per_node" else "."
                raise UsageError(f"{option} must be 1 or more, got {value}{way_out}")
            if isinstance(value, str) and not re.fullmatch(r"\S+", value):
                raise UsageError(
                    f"{option}={value!r} must be one word, without spaces or line breaks."
                )
        if self.gpus_per_node and self.tasks_per_node != self.gpus_per_node:
            raise UsageError(
                f"--tasks-per-node={self.tasks_per_node} with --gpus-per-node="
                f"{self.gpus_per_node}: a GPU has one process; leave --tasks-per-node out."
            )
        limit_s = seconds(self.time_limit)
        if self.save_ahead_s >= limit_s or self.save_ahead_s > MOST_AHEAD_S:
            raise UsageError(
                f"--save-ahead-s={self.save_ahead_s} must be below the time limit {self.time_limit}"
                f" ({limit_s} s) and at most {MOST_AHEAD_S}: it is how long before it the run "
                "saves. Lower it, or raise --time-limit."
            )

    @property
    def processes(self) -> int:
        """On all machines."""
        return self.nodes * self.tasks_per_node

    @property
    def cpus(self) -> int | None:
        """Of each process; `None` leaves them to the cluster, which often gives one."""
        return self.cpus_per_task or (CPUS_BESIDE_A_GPU if self.gpus_per_node else None)

    @property
    def accelerator(self) -> str:
        """That of a run which names none: `auto` would train on the CPUs of a machine whose GPUs
        are broken, and take GPUs that the job did not ask for."""
        return "gpu" if self.gpus_per_node else "cpu"

    @property
    def srun(self) -> list[str]:
        """The words before a command that start it once for each process of the job."""
        # Without the first option the other tasks wait for ever for one that has failed.
        cpus = [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        return ["srun", "--kill-on-bad-exit=1", *cpus]  # srun does not inherit it

    def __str__(self) -> str:
        kind = "GPU" if self.gpus_per_node else "CPU process"
        ending = "" if self.tasks_per_node == 1 else "s" if self.gpus_per_node else "es"
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{nodes} x {self.tasks_per_node} {kind}{ending}"


@dataclass(frozen=True)
class Script:
    """One script of a job.

    Args:
        resources: of the job.
        name: of the job.
        title: the first line.
        command: its lines, quoted where they must be.
        run_folder: as the shell reads it; "" where the command knows it.
        is_torchrun: for machines without SLURM.
    """

    resources: Resources
    name: str
    title: str
    command: Sequence[str]
    run_folder: str = ""
    is_torchrun: bool = False

    def text(self, path: Path, activate: Sequence[str] = ()) -> str:
        """Return the script.

        Args:
            path: where it will lie.
            activate: lines for the job's shell.

        Raises:
            UsageError: a value has a line break, after which the shell would read a command.
        """
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        plain = {"title": self.title, "path": str(path), "name": self.name}
        plain |= {"run_folder": self.run_folder}
        for name, value in plain.items():
            if len((value + "x").splitlines()) > 1:
                raise UsageError(
                    f"the job's {name} has a line break: {value!r}; write it in one line."
                )
        # Shell, not HTML: every value is quoted, or checked to be one word or one line.
        environment = Environment(
            loader=FileSystemLoader(TEMPLATES),
            undefined=StrictUndefined,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        return environment.get_template("job.sh").render(
            **asdict(self.resources) | {"cpus_per_task": self.resources.cpus},
            **plain,
            is_torchrun=self.is_torchrun,
            activate=list(activate),
            python=shlex.quote(python_of(activate)),
            command=" \\\n  ".join(self.command),
        )


def submit(
    *,
    run_options: list[str] | None = None,
    nodes: int = 1,
    gpus_per_node: int | None = None,
    tasks_per_node: int | None = None,
    cpus_per_task: int | None = None,
    exclusive: bool = False,
    nodelist: str | None = None,
    partition: str | None = None,
    account: str | None = None,
    time_limit: str = "24:00:00",
    save_ahead_s: int = 300,
    activate: list[str] | None = None,
    name: str | None = None,
    scripts: Path | None = None,
    verb: Literal["fit", "validate", "test", "predict"] = "fit",
    dry_run: bool = False,
) -> int:
    """Write the script of a job, and put it into SLURM's queue.

    The job saves ahead of its time limit, is requeued and goes on in the same run folder until the
    run is complete. Beside it lies torchrun.sh, the same for machines without SLURM. The config of
    a chain becomes one job for each stage that is not complete, each after the one before it; a
    stage runs on its `devices`, such as --change.dump.devices=8, of which a node has as many as
    --gpus-per-node says, or --tasks-per-node.

    Args:
        run_options: every other option is the run's, such as --config and --trainer.max_epochs=3.
        nodes: machines.
        gpus_per_node: GPUs of each, with one process for each GPU; without it, a job on CPUs.
        tasks_per_node: processes on each machine of a job on CPUs; 1 by default.
        cpus_per_task: CPU cores of each process; beside a GPU 4 by default, which make its batches.
        exclusive: no other jobs on these machines.
        nodelist: machines that must be among them.
        partition: of the cluster.
        account: that the job is charged to.
        time_limit: of one job, such as 24:00:00, 90 (minutes) or 2-12 (days and hours).
        save_ahead_s: how long before the time limit the run is told to save.
        activate: a line for the job's shell, such as "source ~/venv/bin/activate"; repeatable.
        name: of the job and of its run folder, runs/NAME_JOBID.
        scripts: folder of the scripts; jobs/NAME by default.
        verb: of the run.
        dry_run: write the scripts and submit nothing.

    Raises:
        UsageError: the job would be refused, by SLURM or by the run's own parser.
        RuntimeError: sbatch is not here, or refuses.
    """
    from lit_models import config_files

    resources = Resources(
        nodes,
        tasks_per_node if tasks_per_node is not None else gpus_per_node or 1,
        gpus_per_node,
        cpus_per_task,
        *(exclusive, nodelist, partition, account, time_limit, save_ahead_s),
    )
    lines, run = activate or [], run_options or []
    is_chain = config_files.given_value(config_files.expand_configs(run), "stages") is not None
    job_scripts = chain_scripts if is_chain else run_scripts
    name, found = job_scripts(run, resources, verb, name, python_of(lines))
    if not found:
        return 0
    place, texts = free_folder(
        scripts or Path("jobs") / name,
        lambda folder: {file: one.text(folder / file, lines) for file, one in found.items()},
    )
    place.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(exist_ok=True)
    for file, text in texts.items():
        (place / file).write_text(text, encoding="utf-8")
        (place / file).chmod(0o755)
        print(f"wrote      {place / file} for {found[file].resources}")
    jobs = [place / file for file, one in found.items() if not one.is_torchrun]
    if dry_run:
        for i, path in enumerate(jobs):
            command = shlex.join(sbatch_command(path, "JOB" if i else None))
            print(f"submit it  job=$({command.replace('JOB', '$job')})")
        return 0
    numbers = submit_all(jobs)
    for path, number in zip(jobs, numbers, strict=True):
        print(f"submitted  job {number}: {path.stem}, logs {LOGS}/train_{number}.out, .err")
    if not is_chain and verb == "fit":
        root = found["job.sh"].run_folder.replace("$SLURM_JOB_ID", numbers[0])
        root = root or config_files.given_option(config_files.expand_configs(run), ROOT) or ""
        print(f"run folder {root}; with --{ROOT}= it a new job goes on")
    return 0


def run_scripts(
    run: list[str],
    resources: Resources,
    verb: str,
    name: str | None,
    python: str,
) -> tuple[str, dict[str, Script]]:
    """Return the name of a run's job, and its scripts.

    Raises:
        UsageError: an option of the run is the job's own or contradicts it, or the run's parser
            refuses it.
    """
    from lit_models import config_files
    from lit_models.cli import run_root

    options = config_files.expand_configs(run)
    for key, instead in (
        ("trainer.devices", "--gpus-per-node, or --tasks-per-node for a job on CPUs"),
        ("trainer.num_nodes", "--nodes"),
    ):
        if (given := config_files.given_option(options, key)) is not None:
            raise UsageError(f"--{key}={given} is set by the job: use {instead}.")
    ckpt_path = config_files.given_option(options, "ckpt_path")
    if verb == "fit" and ckpt_path not in (None, "auto"):
        raise UsageError(
            f"--ckpt_path={ckpt_path}: a job goes on from the newest checkpoint of its run folder. "
            f"To go on with an earlier run, set --{ROOT} to its folder; to begin with weights, "
            "--model.init_from."
        )
    accelerator = config_files.given_value(options, ACCELERATOR)
    if accelerator in ("gpu", "cuda") and not resources.gpus_per_node:
        raise UsageError(f"{ACCELERATOR}={accelerator} in a job without GPUs: add --gpus-per-node.")
    named = {word.partition("=")[0].partition(".")[0] for word in options}
    if "--config" not in named and not {"--model", "--data"} <= named:
        raise UsageError(
            "`unisono submit` needs a run: give its config with --config FILE, such as --config "
            "occupation_coder/demo.yaml; `unisono --help` lists those that are shipped."
        )
    own = [
        f"--trainer.devices={resources.tasks_per_node}",
        f"--trainer.num_nodes={resources.nodes}",
    ]
    own += [] if accelerator is not None else [f"--{ACCELERATOR}={resources.accelerator}"]
    check_run([verb, *run, *own], resources.processes)
    folder = run_root(options)
    name = checked_name(name or folder.name)
    keeps = verb == "fit" and not config_files.given_option(options, ROOT)
    root = shlex.quote(str(folder.with_name(name)))
    words = quoted_options([*run, *own])
    goes_on = ["--ckpt_path=auto"] if verb == "fit" else []
    title = f"unisono {verb} on {resources}."
    options_of = {
        file: [*words, *([f"--{ROOT}={place}"] if keeps else []), *goes_on]
        for file, place in (("job.sh", '"$run"'), ("torchrun.sh", f"{root}_torchrun"))
    }
    torchrun = f"{shlex.quote(python)} -m torch.distributed.run"
    ranks = [f"{torchrun} --max-restarts=3", f"--nproc-per-node={resources.tasks_per_node}"]
    if resources.nodes == 1:
        ranks.append("--standalone")
    else:
        ranks += [f"--nnodes={resources.nodes}", "--rdzv-backend=c10d", f"--rdzv-id={name}"]
        ranks.append('--rdzv-endpoint="$first:$port"')
    ranks.append(shlex.join([*MODULE, verb]))
    srun = [*resources.srun, python, *MODULE, verb]
    run_folder = f"{root}_$SLURM_JOB_ID" if keeps else ""
    return name, {
        "job.sh": Script(
            resources, name, title, [shlex.join(srun), *options_of["job.sh"]], run_folder
        ),
        "torchrun.sh": Script(
            resources, name, title, [*ranks, *options_of["torchrun.sh"]], is_torchrun=True
        ),
    }


def chain_scripts(
    run: list[str], most: Resources, verb: str, name: str | None, python: str
) -> tuple[str, dict[str, Script]]:
    """Return the name of a chain's jobs, and a script for each stage that is not complete.

    Args:
        run: options of `unisono chain`.
        most: of each stage; its GPUs, or processes on CPUs, are the most on one machine.
        verb: of the command line, which stages have themselves.
        name: of the jobs; `None` takes the folder of the config.
        python: that the job starts.

    Raises:
        UsageError: the chain or a stage is wrong, or a run would be refused.
        ValueError: what lies in the chain's folder was made from something else.
    """
    from lit_models import config_files
    from lit_models.commands import arguments_of, chain

    if verb != "fit":
        raise UsageError(f"--verb={verb}: the stages of a chain have verbs of their own.")
    if most.nodes > 1:
        raise UsageError(
            f"--nodes={most.nodes}: a stage of a chain takes as many nodes as its devices need; "
            "give --change.NAME.devices=8, and the most on one node with --gpus-per-node."
        )
    options = config_files.expand_configs(run)
    for key in ("launcher", "stages"):
        if config_files.given_option(options, key) is not None:
            raise UsageError(f"--{key} is set by the job; leave it out.")
    try:
        given = {**(chain.chain.__kwdefaults__ or {}), **arguments_of(options, chain.chain)}
        changes = {key: dict(values) for key, values in (given["change"] or {}).items()}
        machines: dict[str, Resources] = {}
        added: dict[str, list[str]] = {}
        for stage in chain.read_stages(given["stages"] or {}, changes):
            machines[stage.name] = job = job_of_stage(stage, most)
            if stage.verb not in chain.TRAINER_VERBS:
                continue
            own: dict[str, Any] = {"trainer.num_nodes": job.nodes} if job.nodes > 1 else {}
            paths = [str(config_files.find_config(file)) for file in stage.config]
            files = [word for path in paths for word in ("--config", path)]
            if not (stage.options.get(ACCELERATOR) or config_files.given_value(files, ACCELERATOR)):
                own[ACCELERATOR] = job.accelerator
            change = changes.setdefault(stage.name, {})
            change |= {
                "devices": job.tasks_per_node,
                "options": {**change.get("options", {}), **own},
            }
            added[stage.name] = [f"--change.{stage.name}.devices={job.tasks_per_node}"]
            added[stage.name] += [f"--change.{stage.name}.options.{k}={v}" for k, v in own.items()]
        stages = chain.read_stages(given["stages"] or {}, changes)
        chosen = chain.chosen_stages(stages, given["only"])
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error
    folder = Path(given["to"].replace("{seed}", str(given["seed"]))).expanduser()
    states = chain.check_outputs(stages, chosen, folder, given["seed"])
    name = checked_name(name or config_files.config_paths(options)[0].resolve().parent.name)
    kept = [word for word in quoted_options(run) if not word.startswith("--only")]
    found = {}
    for number, stage in enumerate(stages, 1):
        if stage not in chosen:
            continue
        if states[stage.name] == "complete":
            print(f"stage {stage.name} is complete: no job")
            continue
        job = machines[stage.name]
        if stage.verb in chain.TRAINER_VERBS:
            check_run(stage.arguments(folder, given["seed"]), job.processes, is_stage=True)
        launcher = f"--launcher={shlex.quote(shlex.join(job.srun))}"
        command = [shlex.join([python, *MODULE, "chain"]), *kept, f"--only={stage.name}"]
        found[f"{number}-{stage.name}.sh"] = Script(
            job,
            f"{name}-{stage.name}",
            f"The stage {stage.name} of a chain, on {job}.",
            [*command, *added.get(stage.name, []), launcher],
        )
    return name, found


def job_of_stage(stage: "Stage", most: Resources) -> Resources:
    """Return what a stage's job asks for: the fewest nodes with equally many devices each.

    Raises:
        UsageError: its devices are no number.
    """
    count = 1 if stage.devices is None else stage.devices
    if not isinstance(count, int) or count < 1:
        raise UsageError(
            f"stage {stage.name}: a job needs a number of devices, got {count}; give "
            f"--change.{stage.name}.devices=8."
        )
    is_limited = most.gpus_per_node is not None or most.tasks_per_node > 1
    each = most.tasks_per_node if is_limited else count
    nodes = next(n for n in range(1, count + 1) if count % n == 0 and count // n <= each)
    gpus = count // nodes if most.gpus_per_node is not None and stage.config else None
    return replace(most, nodes=nodes, tasks_per_node=count // nodes, gpus_per_node=gpus)


def check_run(argv: list[str], processes: int, is_stage: bool = False) -> None:
    """Refuse a command line that the job would be refused for, read by the run's own parser.

    Args:
        argv: the verb and its options.
        processes: of the job, on all machines.
        is_stage: files of earlier stages may be missing.

    Raises:
        UsageError: the parser refuses it, or the strategy or the batch do not fit the job.
    """
    from lightning.pytorch.strategies import StrategyRegistry

    from lit_models.cli import parsed_options
    from lit_models.training import rules

    try:
        settings = rules.settings_of(parsed_options(argv, is_stage=is_stage))
        rules.check_strategy(settings.strategy, StrategyRegistry.available_strategies())
        rules.check_world(processes, settings.strategy, {"SLURM_NTASKS": str(processes)}, [])
        rules.check_batch(settings, processes)
    except (ValueError, FileNotFoundError) as error:
        raise UsageError(str(error)) from error


def seconds(time_limit: str) -> int:
    """Return a time limit in seconds.

    Raises:
        UsageError: sbatch would not read it, or it is no time at all.
    """
    match = TIME.fullmatch(str(time_limit))
    if match is None:
        raise UsageError(f"--time-limit={time_limit} is no time; {TIME_RULE}.")
    days, *rest = match.groups()
    values = [int(value) for value in rest if value is not None]
    factors = (3600, 60, 1) if days is not None or len(values) == 3 else (60, 1, 0)
    total = int(days or 0) * 86400 + sum(v * f for v, f in zip(values, factors, strict=False))
    if total < 60:
        raise UsageError(
            f"--time-limit={time_limit} is {total} s, and SLURM counts whole minutes; {TIME_RULE}."
        )
    return total


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


def python_of(activate: Sequence[str]) -> str:
    """Return the Python of a job: the one its activation lines find, else the one of this."""
    return "python" if activate else sys.executable


def quoted_options(words: list[str]) -> list[str]:
    """Return the words of a command line for the shell, an option and its value in one text."""
    out: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        if not word.startswith("--") and before.startswith("-") and "=" not in before:
            out[-1] += f" {shlex.quote(word)}"
        else:
            out.append(shlex.quote(word))
    return out


def free_folder(
    folder: Path, texts_in: Callable[[Path], Mapping[str, str]]
) -> tuple[Path, Mapping[str, str]]:
    """Return the first of FOLDER, FOLDER-2, … in which no other script is overwritten.

    Args:
        folder: that was asked for.
        texts_in: returns file name -> text of the scripts for a folder, which they name.

    Raises:
        UsageError: a file is where a folder is needed.
    """
    number, chosen = 1, folder
    while True:
        for place, way_out in (
            (LOGS, "SLURM opens the logs in this folder; move that file away"),
            (chosen, "name a folder for the scripts with --scripts"),
        ):
            for path in (place, *place.parents):
                if os.path.lexists(path) and not path.is_dir():
                    raise UsageError(f"{path} is no folder: {way_out}.")
        texts = texts_in(chosen)
        there = {path.name: path.read_text(encoding="utf-8") for path in chosen.glob("*.sh")}
        if not there or there == texts:
            return chosen, texts
        number += 1
        chosen = folder.with_name(f"{folder.name}-{number}")


def sbatch_command(script: Path, after: str | None) -> list[str]:
    """Return the command that puts a job into the queue.

    Args:
        script: of the job.
        after: the job, or the shell's word for it, that must have ended well before; where it
            cannot any more, this one is cancelled too.
    """
    waits = [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
    return ["sbatch", "--parsable", *waits, str(script)]


def submit_all(scripts: Sequence[Path]) -> list[str]:
    """Put jobs into the queue, each after the one before it, all or none; return their numbers.

    Raises:
        RuntimeError: sbatch is not here, or refuses.
    """
    if shutil.which("sbatch") is None:
        raise RuntimeError(
            "there is no sbatch on this machine, so nothing is submitted. Call this on a login "
            "node of the cluster; or write the scripts with --dry-run: one of them, torchrun.sh, "
            "needs no SLURM."
        )
    jobs: list[str] = []
    # Its own job's variables, where this is called within one, would win over the script.
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    environ = {k: v for k, v in os.environ.items()
               if k in kept or not k.startswith(("SLURM_", "SBATCH_"))}  # fmt: skip
    for script in scripts:
        command = sbatch_command(script, jobs[-1] if jobs else None)
        done = subprocess.run(command, env=environ, capture_output=True, text=True)
        if done.returncode:
            taken_back = f" The jobs before it are taken back: {', '.join(jobs)}." if jobs else ""
            if jobs:
                subprocess.run(["scancel", *jobs], capture_output=True)
            raise RuntimeError(
                f"sbatch refuses the job: {' '.join(done.stderr.split()) or 'it does not say why'}."
                f" The script is {script}; change what it asks for by the options of `unisono "
                f"submit`, and call it again: {shlex.join(command)} would be refused again."
                f"{taken_back}"
            )
        jobs.append(done.stdout.strip().partition(";")[0])
    return jobs
