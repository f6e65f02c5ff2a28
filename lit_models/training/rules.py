"""Rules on strategy, devices, launchers and batch sizes, checked before any data is read.

Each refuses a value that would silently train something else: copies of one run, one rank of
several, fewer devices than asked for, another batch. Torch is imported by `this_machine` alone.
"""

from __future__ import annotations

import difflib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datamodules.core.plan import Batching

# Names of strategies: the classes of those that take options, how ddp's start their processes.
STRATEGY_CLASSES = {
    "ddp": "lit_models.training.strategies.ReplicatedStrategy",
    "fsdp": "lit_models.training.strategies.FullyShardedStrategy",
}
START_METHODS: dict[str, Literal["popen", "spawn", "fork"]] = {
    "ddp": "popen",
    "ddp_spawn": "spawn",
    "ddp_fork": "fork",
    "ddp_notebook": "fork",
}
DEEPSPEED = (
    "trainer.strategy: `{}` is called fsdp here: ZeRO 3 is --trainer.strategy=fsdp, ZeRO 1 and 2 "
    "are fsdp with --trainer.strategy.reshard_after_forward=false, and ZeRO-Offload is fsdp with "
    "--trainer.strategy.cpu_offload=true, on GPUs."
)


LAUNCHER_NUMBERS = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "OMP_NUM_THREADS"),
)


@dataclass(frozen=True)
class Machine:
    """What this machine has."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True)
class Settings:
    """The values of a command line that depend on each other; `None` for a strategy's class, and
    where the data has no such option."""

    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    strategy: str | None = "auto"
    accumulate_grad_batches: int = 1
    global_batch_size: int | None = None
    micro_batch_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int = 1


@dataclass
class Verdict:
    """The run as it will be: `devices` as the Trainer takes them, processes on all machines, and
    warnings of a line each."""

    accelerator: str
    devices: int | list[int]
    world_size: int
    warnings: list[str] = field(default_factory=list)


def settings_of(config: Any) -> Settings:
    """Returns the settings in a parsed command line of one verb."""
    trainer, data = config.trainer, config.data.get("init_args") or {}
    strategy, options = strategy_of(trainer.strategy)
    return Settings(
        accelerator=trainer.accelerator if isinstance(trainer.accelerator, str) else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=strategy,
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        global_batch_size=data.get("global_batch_size"),
        micro_batch_size=data.get("micro_batch_size") or "auto",
        tensor_parallel_size=options.get("tensor_parallel_size") or 1,
    )


def strategy_of(given: Any) -> tuple[str | None, Any]:
    """Returns the name and the options of a strategy in a parsed configuration; of classes, only
    those that spawn processes or are refused have a name."""
    if isinstance(given, str):
        return given, {}
    options = (given or {}).get("init_args") or {}
    name = ((given or {}).get("class_path") or "").rpartition(".")[2]
    start_method = options.get("start_method")
    spawning = f"ddp_{start_method}" if start_method in ("spawn", "fork") else None
    return (name if name == "DeepSpeedStrategy" else spawning), options


def this_machine() -> Machine:
    """Returns the CPUs that this process may use and the GPUs of this machine."""
    import torch

    from datamodules.core.planned import usable_cpus

    return Machine(usable_cpus(), torch.cuda.device_count() if torch.cuda.is_available() else 0)


def check(
    settings: Settings, machine: Machine, environ: Mapping[str, str], strategies: list[str]
) -> Verdict:
    """Returns what will run on a machine; `strategies` are the names that the Trainer knows.

    Raises:
        ValueError: the settings contradict each other, the machine or the launcher's variables.
    """
    check_strategy(settings.strategy, strategies)
    verdict = resolve_devices(settings, machine)
    placed = ("MASTER_ADDR", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID")
    if settings.num_nodes > 1 and not any(environ.get(name) for name in placed):
        raise ValueError(
            f"trainer.num_nodes is {settings.num_nodes}, but no launcher started this process: it "
            "would wait for the other machines. Use srun or torchrun (`unisono submit` writes the "
            "job), or set MASTER_ADDR, MASTER_PORT and NODE_RANK on every machine."
        )
    verdict.warnings += check_world(verdict.world_size, settings.strategy, environ)
    check_batch(settings, verdict.world_size)
    return verdict


def check_strategy(strategy: str | None, known: list[str]) -> None:
    """Refuses, with a ValueError, an unknown strategy name."""
    plain = re.sub("[-_ ]", "", strategy or "").lower()
    if "deepspeed" in plain or re.fullmatch("zero[123]?", plain):
        raise ValueError(DEEPSPEED.format(strategy))
    if strategy is None or strategy in ("auto", *known):
        return
    near = difflib.get_close_matches(strategy, known, n=3)
    offered = sorted(name for name in known if "deepspeed_" not in name)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(offered)}."
    raise ValueError(f"trainer.strategy: there is no strategy `{strategy}`.{hint}")


def resolve_devices(settings: Settings, machine: Machine) -> Verdict:
    """Returns devices as a number, `auto` resolved, never silently.

    Raises:
        ValueError: devices that are not there, or no devices at all.
    """
    accelerator, devices, nodes = settings.accelerator, settings.devices, settings.num_nodes
    indices = devices if isinstance(devices, list) else None
    text = "-1" if devices == "auto" else str(devices).strip()
    if re.fullmatch(r"[\d ]+(,[\d ]*)+", text):
        indices = [int(index) for index in text.split(",") if index.strip()]
    if indices is None and not re.fullmatch(r"-1|0*[1-9]\d*", text):
        raise ValueError(
            f"trainer.devices must be a number, auto, or indices such as 0,2; got {devices}."
        )
    if nodes < 1:
        raise ValueError(f"trainer.num_nodes must be at least 1, got {nodes}.")
    count = int(text) if indices is None else len(indices)  # -1: all that are there
    if accelerator in ("gpu", "cuda") or (accelerator == "auto" and machine.num_gpus):
        there = machine.num_gpus
        number = there if count == -1 else count
        if 0 < (max(indices) + 1 if indices else number) <= there:
            return Verdict("gpu", indices or number, number * nodes)
        raise ValueError(
            f"trainer.devices={'all' if count == -1 else devices} asks for GPUs that this machine "
            f"does not have: it has {there} GPU{'s' * (there != 1)}. Use --trainer."
            f"{f'devices={there}' if there else 'accelerator=cpu'}; auto takes what is there."
        )
    number = max(count, 1)
    out = Verdict("cpu" if accelerator == "auto" else accelerator, number, number * nodes)
    if out.accelerator == "cpu" and count == -1:
        out.warnings.append(
            "devices: auto found no GPU, the run uses 1 CPU process; --trainer.devices=2 uses two"
        )
    if out.accelerator == "cpu" and count > machine.num_cpus:
        out.warnings.append(
            f"{count} processes share {machine.num_cpus} CPU cores: right, but slower than "
            f"--trainer.devices={machine.num_cpus}"
        )
    return out


def tensor_groups(size: int, world_size: int) -> int:
    """Returns the number of tensor groups; ValueError where `size` does not divide the world."""
    if size < 1 or world_size % size:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {size}, which does not divide "
            f"trainer.devices x trainer.num_nodes = {world_size}; use a divisor, at most the "
            "devices of one node."
        )
    return world_size // size


def check_batch(settings: Settings, world_size: int) -> None:
    """Refuses batch sizes that contradict each other or the devices."""
    num_replicas = tensor_groups(settings.tensor_parallel_size, world_size)
    if settings.global_batch_size is None:
        return
    from datamodules.core.plan import derive_batching

    sizes = settings.micro_batch_size, settings.accumulate_grad_batches
    check_share(derive_batching(num_replicas, settings.global_batch_size, *sizes), num_replicas)


def check_share(batching: Batching, world_size: int) -> None:
    """Refuses a global batch that has less than one sample for each micro-batch."""
    slots = world_size * batching.accumulate_grad_batches
    if slots > batching.global_batch_size:
        raise ValueError(
            f"data.global_batch_size={batching.global_batch_size} is smaller than devices x "
            f"accumulation = {world_size} x {batching.accumulate_grad_batches}: some would have "
            f"nothing to do. Use fewer devices or data.global_batch_size >= {slots}."
        )


def check_world(world_size: int, strategy: str | None, environ: Mapping[str, str]) -> list[str]:
    """Refuses a launcher's world that differs from the trainer's: N silent copies of one run, or
    one silent rank of several. Returns warnings of a line each."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in environ  # it wins over SLURM
    # In an interactive allocation only `srun` starts the tasks; there Lightning ignores SLURM.
    is_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    num_tasks = int(environ.get("SLURM_NTASKS") or 0)
    worlds = {"WORLD_SIZE": int(environ.get("WORLD_SIZE") or 1)}
    if not is_torchrun and (not is_shell or "SLURM_STEP_ID" in environ):
        worlds["SLURM_NTASKS"] = num_tasks
    for name, started in worlds.items():
        if started <= 1:
            continue
        if started != world_size:
            raise ValueError(
                f"the launcher started {started} processes ({name}={started}), but trainer.devices "
                f"x trainer.num_nodes is {world_size}: each would train a copy of its own. Set "
                "--trainer.devices to the processes per node and --trainer.num_nodes to the nodes."
            )
        if START_METHODS.get(strategy or "", "popen") != "popen":
            raise ValueError(
                f"trainer.strategy={strategy} starts its own processes, but {name}={started} says "
                "that a launcher did; use --trainer.strategy=ddp."
            )
    if is_torchrun or is_shell:
        return []
    if num_tasks == 1 and world_size > 1:
        raise ValueError(
            f"SLURM has one task (SLURM_NTASKS=1), but trainer.devices x trainer.num_nodes is "
            f"{world_size}: rank 0 would train alone, without a word. Ask for --ntasks-per-node="
            "DEVICES and --nodes=NODES, with `srun` before the command."
        )
    if num_tasks > 1 and "SLURM_PROCID" in environ and "SLURM_STEP_ID" not in environ:
        return [
            "this looks like a SLURM batch script with several tasks and no `srun` before the "
            "command: it would wait for the others for ever"
        ]
    return []


def is_first_process(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether this process speaks for all and holds the run folder: rank 0 of a launch, or
    the process that starts the others."""
    # Where ranks are numbered, machines may be so in another order.
    places = ("RANK",) if environ.get("RANK") else ("SLURM_PROCID", "NODE_RANK")
    return not any(environ.get(name, "").strip("0") for name in (*places, "LOCAL_RANK"))


def check_launcher_variables(environ: Mapping[str, str]) -> None:
    """Refuses, with a ValueError, a launcher's variable that is no number, and a machine of rank 0
    that cannot be found."""
    for name in LAUNCHER_NUMBERS:
        if not (environ.get(name) or "0").isdecimal():
            raise ValueError(
                f"the environment has {name}={environ[name]}, which must be a whole number; "
                "launchers set it: unset it, or correct it in the script that sets it."
            )
    address = environ.get("MASTER_ADDR")
    if address:
        try:
            socket.getaddrinfo(address, None)
        except OSError as error:
            raise ValueError(
                f"MASTER_ADDR={address} is no machine that can be found ({error.strerror}); give "
                "the name or the address of the node with rank 0, or unset it for one machine."
            ) from error


def complete_rendezvous(environ: dict[str, str] | os._Environ[str], num_nodes: int) -> None:
    """Adds LOCAL_RANK and NODE_RANK for a rank that was started by hand, with RANK, WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT alone, equally many ranks on each node.

    Raises:
        ValueError: a variable is missing, or the numbers contradict each other.
    """
    is_launched = "LOCAL_RANK" in environ or "SLURM_NTASKS" in environ
    if "RANK" not in environ or is_launched or environ.get("WORLD_SIZE") == "1":
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ValueError(
            f"RANK={environ['RANK']} is set but {', '.join(missing)} is not: a rank started by "
            f"hand needs {', '.join(names)}. Set all of them, or unset RANK."
        )
    rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if rank >= world_size or world_size % num_nodes:
        raise ValueError(
            f"RANK={rank} of WORLD_SIZE={world_size} on {num_nodes} node(s): ranks count from 0, "
            "and every node has equally many; correct the numbers, or unset them."
        )
    environ["NODE_RANK"], environ["LOCAL_RANK"] = map(str, divmod(rank, world_size // num_nodes))
