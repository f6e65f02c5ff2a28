"""Rules on strategy, devices, launchers and batch sizes, checked before any data is read.

Each refuses a value that would silently train something else: copies of one run, one rank of
several, fewer devices than asked for, another batch. Only `resolve_devices` imports torch.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from datamodules.core.plan import Batching

# By strategy name: classes of strategies with options, and how ddp's variants start processes.
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
SHELLS = ("bash", "interactive")  # SLURM job names for which Lightning ignores SLURM


@dataclass
class Verdict:
    """Resolved devices of a run: indices of GPUs or the number of other devices, processes on all
    machines, and warnings of a line each. If a launcher shows each task one GPU only, index 0 is
    listed once per task."""

    accelerator: str
    devices: int | list[int]
    world_size: int
    warnings: list[str] = field(default_factory=list)


def strategy_of(value: Any) -> tuple[str | None, Any]:
    """Returns the name and the options of a strategy in a parsed configuration; the name of a class
    is `None`, unless it spawns processes or is refused."""
    if isinstance(value, str):
        return value, {}
    options = (value or {}).get("init_args") or {}
    name = ((value or {}).get("class_path") or "").rpartition(".")[2]
    start_method = options.get("start_method")
    spawning = f"ddp_{start_method}" if start_method in ("spawn", "fork") else None
    return (name if name == "DeepSpeedStrategy" else spawning), options


def check(config: Any, environ: Mapping[str, str], strategies: list[str]) -> Verdict:
    """Returns the devices that a parsed command line will use on this machine; `strategies` are the
    names that the Trainer knows.

    Raises:
        ValueError: values contradict each other, the machine or the launcher's variables.
    """
    strategy, _ = strategy_of(config.trainer.strategy)
    check_strategy(strategy, strategies)
    verdict = resolve_devices(config.trainer, environ)
    nodes, placed = config.trainer.num_nodes, ("MASTER_ADDR", "SLURM_NTASKS", "TORCHELASTIC_RUN_ID")
    if nodes > 1 and not any(environ.get(name) for name in placed):
        raise ValueError(
            f"trainer.num_nodes is {nodes}, but no launcher started this process: it would wait "
            "for the other machines. Use srun or torchrun (`unisono submit` writes the job), or "
            "set MASTER_ADDR, MASTER_PORT and NODE_RANK on every machine."
        )
    verdict.warnings += check_world(verdict.world_size, strategy, environ)
    check_batch(config, verdict.world_size)
    return verdict


def check_strategy(strategy: str | None, known: list[str]) -> None:
    """Refuses, with a ValueError, an unknown strategy name."""
    plain = re.sub("[-_ ]", "", strategy or "").lower()
    if "deepspeed" in plain or re.fullmatch("zero[123]?", plain):
        raise ValueError(
            f"trainer.strategy: `{strategy}` is called fsdp here: ZeRO 3 is "
            "--trainer.strategy=fsdp, ZeRO 1 and 2 are fsdp with "
            "--trainer.strategy.reshard_after_forward=false, and ZeRO-Offload is fsdp with "
            "--trainer.strategy.cpu_offload=true, on GPUs."
        )
    if strategy is None or strategy in ("auto", *known):
        return
    near = difflib.get_close_matches(strategy, known, n=3)
    offered = sorted(name for name in known if "deepspeed_" not in name)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(offered)}."
    raise ValueError(f"trainer.strategy: there is no strategy `{strategy}`.{hint}")


def resolve_devices(trainer: Any, environ: Mapping[str, str]) -> Verdict:
    """Returns the devices of this machine for the parsed `trainer` key; if `auto` finds no GPU, it
    warns. If each task of a launcher sees one GPU, every task counts as a device.

    Raises:
        ValueError: devices do not exist, or none is named.
    """
    import torch
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator

    accelerator, devices, nodes = trainer.accelerator, trainer.devices, trainer.num_nodes
    accelerator = accelerator if isinstance(accelerator, str) else "cpu"
    takes_all = str(devices) in ("auto", "-1")
    try:
        if accelerator in ("gpu", "cuda") or (accelerator == "auto" and torch.cuda.is_available()):
            num_tasks = max(launched_worlds(environ).values()) // nodes
            is_shown = "CUDA_VISIBLE_DEVICES" in environ or "ROCR_VISIBLE_DEVICES" in environ
            is_one_each = num_tasks > 1 and is_shown and torch.cuda.device_count() == 1
            if is_one_each and (takes_all or str(devices).isdigit()):
                indices: Any = [0] * (num_tasks if takes_all else int(devices))
            else:
                indices = CUDAAccelerator.parse_devices(-1 if takes_all else devices)
            if not indices:
                raise ValueError("it names none.")
            return Verdict("gpu", indices, len(indices) * nodes)
        number = 1 if takes_all else CPUAccelerator.parse_devices(devices)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ValueError(
            f"trainer.devices must be a number, auto, or indices of GPUs that are there, such as "
            f"0,2; got {devices}: {error}"
        ) from error
    out = Verdict("cpu" if accelerator == "auto" else accelerator, number, number * nodes)
    if out.accelerator == "cpu" and takes_all:
        out.warnings.append(
            "devices: auto found no GPU, the run uses 1 CPU process; --trainer.devices=2 uses two"
        )
    return out


def tensor_groups(size: int, world_size: int) -> int:
    """Returns the number of tensor groups; ValueError if `size` does not divide `world_size`."""
    if size < 1 or world_size % size:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {size}, which does not divide "
            f"trainer.devices x trainer.num_nodes = {world_size}; use a divisor, at most the "
            "devices of one node."
        )
    return world_size // size


def check_batch(config: Any, world_size: int) -> None:
    """Refuses batch sizes that contradict each other or the devices, in a parsed command line."""
    from datamodules.core.plan import derive_batching

    _, options = strategy_of(config.trainer.strategy)
    num_replicas = tensor_groups(options.get("tensor_parallel_size") or 1, world_size)
    data = config.data.get("init_args") or {}
    if data.get("global_batch_size") is not None:  # else the data have no such option
        batching = derive_batching(
            num_replicas,
            data["global_batch_size"],
            data.get("micro_batch_size") or "auto",
            accumulate_grad_batches=config.trainer.accumulate_grad_batches,
        )
        check_share(batching, num_replicas)


def check_share(batching: Batching, world_size: int) -> None:
    """Refuses a global batch that has less than one sample for each micro-batch."""
    slots = world_size * batching.accumulate_grad_batches
    if slots > batching.global_batch_size:
        raise ValueError(
            f"data.global_batch_size={batching.global_batch_size} is smaller than devices x "
            f"accumulation = {world_size} x {batching.accumulate_grad_batches}: some would have "
            f"nothing to do. Use fewer devices or data.global_batch_size >= {slots}."
        )


def launched_worlds(environ: Mapping[str, str]) -> dict[str, int]:
    """Returns environment variable -> number of processes that a launcher started."""
    worlds = {"WORLD_SIZE": int(environ.get("WORLD_SIZE") or 1)}
    # In an interactive allocation only `srun` starts the tasks; there Lightning ignores SLURM.
    is_task = environ.get("SLURM_JOB_NAME") not in SHELLS or "SLURM_STEP_ID" in environ
    if "TORCHELASTIC_RUN_ID" not in environ and is_task:  # torchrun wins over SLURM
        worlds["SLURM_NTASKS"] = int(environ.get("SLURM_NTASKS") or 0)
    return worlds


def check_world(world_size: int, strategy: str | None, environ: Mapping[str, str]) -> list[str]:
    """Refuses a launcher that started another number of processes than the trainer's: N copies of a
    run, or one rank of several, would train silently. Returns warnings of a line each."""
    for name, started in launched_worlds(environ).items():
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
    if "TORCHELASTIC_RUN_ID" in environ or environ.get("SLURM_JOB_NAME") in SHELLS:
        return []
    num_tasks = int(environ.get("SLURM_NTASKS") or 0)
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
    """Returns whether this process acts for all and locks the run folder: rank 0 of a launcher, or
    the process that starts the others."""
    # If ranks have numbers, those count: nodes may be numbered in another order.
    places = ("RANK",) if environ.get("RANK") else ("SLURM_PROCID", "NODE_RANK")
    return not any(environ.get(name, "").strip("0") for name in (*places, "LOCAL_RANK"))
