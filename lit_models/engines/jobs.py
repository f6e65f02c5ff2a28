"""Resources of a job, and the kinds of clusters that run it."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path

from lit_models.config_files import ROOT, given_option, given_value
from lit_models.errors import UsageError

CPUS_BESIDE_A_GPU = 4  # which prepare its batches
# Formats of sbatch: minutes, minutes:seconds, hours:minutes:seconds, or these after days-.
TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
LOCAL = "localhost:29400"  # torchrun's own port
TAKERS = {  # target -> words of the command that submits its file
    "slurm": ("sbatch", "--parsable"),
    "torchrun": ("bash",),
    "ray": (
        *("ray", "job", "submit", "--no-wait", "--working-dir=."),  # sent along, except for these
        '--runtime-env-json={"excludes": ["/runs/", "/logs/", "/.git/"]}',
    ),
    "skypilot": ("sky", "jobs", "launch", "--yes"),
    "kubernetes": ("kubectl", "apply", "--filename"),
}
ELASTIC = ("torchrun", "ray", "kubernetes")  # their nodes may come and go
REMOTE = ("ray", "skypilot", "kubernetes")  # they do not see the folder of the submission
USERS = {  # option that only some targets have -> these targets
    **dict.fromkeys(("nodelist", "partition", "account", "time_limit", "save_ahead_s"), ("slurm",)),
    "cpus_per_task": ("slurm", "skypilot", "kubernetes"),
    "max_restarts": ("torchrun", "ray", "skypilot", "kubernetes"),
    "rendezvous": ("torchrun",),
    "address": ("ray",),
    "gpu": ("skypilot",),
    "image": ("kubernetes",),
    "storage": ("skypilot", "kubernetes"),
    "install": ("skypilot",),
    "activate": ("slurm", "torchrun", "skypilot", "kubernetes"),
}


@dataclass(frozen=True)
class Resources:
    """Resources that a job asks the cluster for, checked before the job waits for them.

    Args:
        target: slurm, ray, skypilot, kubernetes, or torchrun, which is started by hand on each
            machine. Options without a target here apply to all.
        nodes: number of machines; 1:4 is the fewest and the most of a run that grows and shrinks:
            torchrun, ray, kubernetes.
        gpus_per_node: GPUs of each machine, with one process per GPU; left out, the job uses CPUs.
        tasks_per_node: processes on each machine of a job on CPUs; 1 by default.
        cpus_per_task: CPU cores of each process; with a GPU 4 by default, which prepare its
            batches; slurm, skypilot, kubernetes.
        nodelist: machines that the job must include; slurm.
        partition: partition of the cluster; slurm.
        account: account that the job is charged to; slurm.
        time_limit: limit of one job, such as 90 (minutes) or 2-12 (days and hours); slurm.
        save_ahead_s: how long before the time limit the run is told to save; slurm.
        max_restarts: restarts after the loss of a rank or a node before the run is given up; all
            but slurm, which requeues without limit.
        rendezvous: HOST:PORT of one of the machines, at which all meet; torchrun.
        address: address of the cluster's dashboard, such as http://HOST:8265; ray.
        gpu: name of the GPU, such as H100; skypilot.
        image: container image in which unisono is installed; kubernetes.
        storage: a claim or volume and its mount point, such as my-volume:/data, for the run
            folder, by default /data/runs/NAME; kubernetes, and skypilot, where a job on one node
            can take a bucket, s3://mine:/data.
        install: a shell line that installs unisono on a new machine, run in the folder that is
            sent there; skypilot.
        activate: a shell line that the job runs first, such as "source ~/venv/bin/activate";
            repeatable; all but ray, whose workers have the cluster's Python.

    Raises:
        UsageError: the job would be refused, or an option has no effect for the target.
    """

    target: str = "slurm"
    nodes: str = "1"
    gpus_per_node: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    nodelist: str | None = None
    partition: str | None = None
    account: str | None = None
    time_limit: str = "24:00:00"
    save_ahead_s: int = 300
    max_restarts: int = 9
    rendezvous: str = LOCAL
    address: str | None = None
    gpu: str | None = None
    image: str | None = None
    storage: str | None = None
    install: str = "pip install --editable ."
    activate: list[str] | None = None

    def __post_init__(self) -> None:
        if self.target not in TAKERS:
            raise UsageError(f"--target={self.target} must be one of {', '.join(TAKERS)}.")
        for field in fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            able = USERS.get(field.name, TAKERS)
            if value != field.default and self.target not in able:
                raise UsageError(
                    f"{option} has no effect for --target={self.target}, only for "
                    f"{', '.join(able)}: leave it out, or give another --target."
                )
            if isinstance(value, int) and value < 1:
                raise UsageError(f"{option} must be 1 or more, got {value}; else leave it out.")
            is_line = field.name == "install"
            if isinstance(value, str) and not is_line and not re.fullmatch(r"\S+", value):
                raise UsageError(
                    f"{option}={value!r} must be one word, without spaces or line breaks."
                )
        if self.gpus_per_node and self.tasks != self.gpus_per_node:
            raise UsageError(
                f"--tasks-per-node={self.tasks_per_node} with --gpus-per-node="
                f"{self.gpus_per_node}: a GPU has one process; leave --tasks-per-node out."
            )
        limit_s = seconds(self.time_limit)
        if self.save_ahead_s >= limit_s:
            raise UsageError(
                f"--save-ahead-s={self.save_ahead_s} must be below the time limit {self.time_limit}"
                f" ({limit_s} s): it is how long before it the run saves. Lower it, or raise "
                "--time-limit."
            )
        if self.target == "kubernetes" and not (self.image and self.storage):
            raise UsageError("--target=kubernetes needs --image and --storage.")
        if self.target == "skypilot" and (self.gpu is None) != (self.gpus_per_node is None):
            raise UsageError(
                "SkyPilot looks for GPUs by name: give --gpu=H100 with --gpus-per-node=8, or "
                "neither."
            )
        if self.storage and not re.fullmatch(r"\S+:/\S+", self.storage):
            raise UsageError(
                f"--storage={self.storage} must be a volume and the folder to mount it at, such as "
                "my-volume:/data."
            )
        if self.most > 1 and "://" in (self.storage or ""):
            raise UsageError(
                f"--storage={self.storage} with --nodes={self.most}: each node writes to a bucket "
                "late and by itself, so that they would disagree on the newest checkpoint. Take "
                "one node, or a volume that all share."
            )
        if self.fewest < self.most and self.target not in ELASTIC:
            raise UsageError(
                f"--nodes={self.nodes}: --target={self.target} starts as many nodes as it is "
                f"told; they come and go with {', '.join(ELASTIC)}. Give one number."
            )
        if self.target == "torchrun" and self.most > 1 and self.rendezvous == LOCAL:
            raise UsageError(
                f"--nodes={self.nodes}: nodes meet on one of them; name it with "
                "--rendezvous=HOST:29400."
            )

    @property
    def fewest(self) -> int:
        """Smallest number of nodes."""
        return world_sizes(self.nodes, "--nodes")[0]

    @property
    def most(self) -> int:
        """Largest number of nodes."""
        return world_sizes(self.nodes, "--nodes")[1]

    @property
    def tasks(self) -> int:
        """Number of processes on each node."""
        return self.tasks_per_node if self.tasks_per_node is not None else self.gpus_per_node or 1

    @property
    def mount(self) -> str:
        """Mount point of the storage; "" without storage."""
        return (self.storage or "").rpartition(":")[2]

    @property
    def processes(self) -> int:
        """Largest number of processes on all machines."""
        return self.most * self.tasks

    @property
    def cpus(self) -> int | None:
        """CPU cores of each process; `None` leaves it to the cluster, which often gives one."""
        return self.cpus_per_task or (CPUS_BESIDE_A_GPU if self.gpus_per_node else None)

    @property
    def accelerator(self) -> str:
        """Accelerator of a run that names none. `auto` would train on the CPUs of a machine whose
        GPUs are broken, and take GPUs that the job did not ask for."""
        return "gpu" if self.gpus_per_node else "cpu"

    @property
    def srun(self) -> list[str]:
        """The words before a command that start it once for each process of the job."""
        # Without --kill-on-bad-exit the other tasks wait for ever for one that has failed.
        cpus = [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        return ["srun", "--kill-on-bad-exit=1", *cpus]  # srun does not inherit these

    @property
    def world(self) -> list[str]:
        """Options of a run in a world of this size."""
        return [f"--trainer.devices={self.tasks}", f"--trainer.num_nodes={self.most}"]

    def hand_in(self, path: Path, after: str | None = None) -> list[str]:
        """Return the command that submits the file of a job. `after` is a SLURM job, or a shell
        variable with its number, that must succeed first: if it fails, this one is cancelled."""
        words = [*TAKERS[self.target], *([f"--address={self.address}"] if self.address else [])]
        words += [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"] if after else []
        # Ray quotes for another system's shell, which would break words of the run.
        return [*words, *(["--", "bash"] if self.target == "ray" else []), str(path)]

    def __str__(self) -> str:
        kind = "GPUs" if self.gpus_per_node else "CPU processes"
        return f"nodes x {kind}: {self.nodes} x {self.tasks}"


def world_sizes(text: str, option: str) -> tuple[int, int]:
    """Return the smallest and the largest number of a text such as 4 or 1:8.

    Raises:
        UsageError: the text has another form.
    """
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most:
        raise UsageError(
            f"{option} must be 1 or more, got {text}: a number, such as 4, or the fewest and the "
            "most of a run that grows and shrinks, such as 1:8."
        )
    return fewest, most


def check_options(options: list[str], verb: str, of_devices: str, of_nodes: str) -> None:
    """Refuse options of a run that its launcher sets by `of_devices` and `of_nodes`, its options.

    Raises:
        UsageError: devices or nodes are given, or the checkpoint that a training resumes from.
    """
    for name, own in (("devices", of_devices), ("num_nodes", of_nodes)):
        if (value := given_option(options, f"trainer.{name}")) is not None:
            raise UsageError(f"--trainer.{name}={value} is set by {own}: leave it out.")
    ckpt_path = given_value(options, "ckpt_path")
    if verb == "fit" and ckpt_path not in (None, "auto"):
        raise UsageError(
            f"--ckpt_path={ckpt_path}: a run that may be started again goes on from the newest "
            f"checkpoint of its folder. To go on with an earlier run, set --{ROOT} to its folder; "
            "to begin with weights, --model.init_from."
        )


def device_counts(text: str) -> list[int]:
    """Return the numbers of devices in a text such as 1,2,4; UsageError if it is not valid."""
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise UsageError(f"--devices must be numbers such as 1,2,4,8, got {text}.")
    return [int(part) for part in text.split(",")]


def seconds(time_limit: str) -> int:
    """Return a time limit in seconds.

    Raises:
        UsageError: sbatch would not accept it.
    """
    match = TIME.fullmatch(time_limit)
    if match is None:
        raise UsageError(
            f"--time-limit={time_limit} is no time; write 24:00:00, 90 (minutes) or 2-12 (days and "
            "hours)."
        )
    days, *rest = match.groups()
    values = [int(value) for value in rest if value is not None]
    factors = (3600, 60, 1) if days is not None or len(values) == 3 else (60, 1, 0)
    return int(days or 0) * 86400 + sum(v * f for v, f in zip(values, factors, strict=False))
