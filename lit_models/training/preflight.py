"""Refuses a run that cannot be what it says, before any data is read.

Pure functions of the settings, the machine and the environment: cross-field rules that no parser
checks. The worlds of launchers are checked in `launched_world.py`.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lit_models.training.launched_world import check_world

if TYPE_CHECKING:
    from datamodules.core.plan import Batching

GONE = "the strategy `{}` is gone"
GONE_STRATEGIES = {
    "dp": f"{GONE} (slow and inexact); `ddp` or `ddp_spawn` does it",
    "dataparallel": f"{GONE} (slow and inexact); `ddp` or `ddp_spawn` does it",
    "distributeddataparallel": "`{}` is called `ddp` here",
    "fullyshardeddataparallel": "`{}` is called `fsdp` here",
    "ddp2": f"{GONE}; `ddp` does it",
    "ddpcpu": f"{GONE}; use `ddp` with --trainer.accelerator=cpu",
    "ddpsharded": f"{GONE}; `fsdp` shards",
    "fairscale": f"{GONE}; `fsdp` shards",
    "horovod": f"{GONE}; `ddp` does it, with srun or torchrun as launcher",
    "bagua": f"{GONE}; `ddp` does it",
}
DEEPSPEED = (
    "trainer.strategy: `{}` is called fsdp here: ZeRO 3 is --trainer.strategy=fsdp, ZeRO 1 and 2 "
    "are fsdp with --trainer.strategy.reshard_after_forward=false, and ZeRO-Offload is fsdp with "
    "--trainer.strategy.cpu_offload=true, on GPUs."
)
OnMissing = Literal["error", "fallback"]
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps", "tpu")


@dataclass(frozen=True)
class Machine:
    """What this machine has."""

    num_cpus: int
    num_gpus: int


@dataclass(frozen=True)
class Settings:
    """The values of a command line that depend on each other.

    Args:
        accelerator: as the Trainer takes it.
        devices: as the Trainer takes it: a count, `auto`, -1, a list, or "0,1".
        num_nodes: machines.
        strategy: a name, or None where the config names a strategy class.
        accumulate_grad_batches: as the Trainer takes it; 1 lets the data derive it.
        global_batch_size: samples per optimizer step, None where the data has no such option.
        micro_batch_size: samples per forward call, or `auto`.
        batch_size: the conventional size per device.
        on_missing_devices: `fallback` runs on the devices that are there.
        tensor_parallel_size: devices that compute the same samples together.
    """

    accelerator: str = "auto"
    devices: int | str | list[int] = "auto"
    num_nodes: int = 1
    strategy: str | None = "auto"
    accumulate_grad_batches: int = 1
    global_batch_size: int | None = None
    micro_batch_size: int | Literal["auto"] = "auto"
    batch_size: int | None = None
    on_missing_devices: OnMissing = "error"
    tensor_parallel_size: int = 1


@dataclass
class Verdict:
    """The run as it will be.

    Attributes:
        accelerator: for the Trainer.
        devices: for the Trainer: a count or a list of indices.
        num_devices: processes on this machine.
        world_size: processes on all machines.
        warnings: to be shown, one line each.
        fallback: what was asked for and is not there, for topology.json; None where nothing fell.
    """

    accelerator: str
    devices: int | list[int]
    num_devices: int
    world_size: int
    warnings: list[str] = field(default_factory=list)
    fallback: str | None = None


def settings_of(config: Any) -> Settings:
    """Returns the settings in a parsed command line of one verb."""
    trainer, data = config.trainer, config.data.get("init_args") or {}
    return Settings(
        accelerator=trainer.accelerator if isinstance(trainer.accelerator, str) else "cpu",
        devices=trainer.devices,
        num_nodes=trainer.num_nodes,
        strategy=_strategy_name(trainer.strategy),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        global_batch_size=data.get("global_batch_size"),
        micro_batch_size=data.get("micro_batch_size") or "auto",
        batch_size=data.get("batch_size"),
        on_missing_devices=config.on_missing_devices,
        tensor_parallel_size=_strategy_options(trainer.strategy).get("tensor_parallel_size") or 1,
    )


def _strategy_name(strategy: Any) -> str | None:
    """Returns the name of a strategy that may be given as a class with options."""
    if isinstance(strategy, str):
        return strategy
    name = ((strategy or {}).get("class_path") or "").rpartition(".")[2]
    if name == "DeepSpeedStrategy":  # Lightning's: refused by its name
        return name
    start_method = _strategy_options(strategy).get("start_method")
    return f"ddp_{start_method}" if start_method in ("spawn", "fork") else None


def _strategy_options(strategy: Any) -> Any:
    """Returns the options of a strategy that is given as a class; none of a name."""
    return {} if isinstance(strategy, str) else (strategy or {}).get("init_args") or {}


def this_machine() -> Machine:
    """Returns the CPUs that this process may use and the GPUs of this machine."""
    import torch

    has_affinity = hasattr(os, "sched_getaffinity")
    num_cpus = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return Machine(num_cpus, torch.cuda.device_count() if torch.cuda.is_available() else 0)


def check(
    settings: Settings, machine: Machine, environ: Mapping[str, str], strategies: list[str]
) -> Verdict:
    """Returns what will run.

    Args:
        settings: what was asked for.
        machine: what is there.
        environ: the environment, for what launchers set in it.
        strategies: names that the Trainer knows.

    Raises:
        ValueError: the settings contradict each other, the machine or the launcher.
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
    check_world(verdict.world_size, settings.strategy, environ, verdict.warnings)
    check_batch(settings, verdict.world_size)
    return verdict


def tensor_groups(size: int, world_size: int) -> int:
    """Returns the number of tensor groups, each of which has samples of its own.

    Raises:
        ValueError: the size is below 1 or does not divide the world.
    """
    if size < 1 or world_size % size:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {size}, which does not divide "
            f"trainer.devices x trainer.num_nodes = {world_size}; use a divisor, at most the "
            "devices of one node."
        )
    return world_size // size


def check_strategy(strategy: str | None, known: list[str]) -> None:
    """Refuses a strategy name that does not exist.

    Raises:
        ValueError: the name is gone or unknown.
    """
    plain = re.sub("[-_ ]", "", strategy or "").lower()
    if "deepspeed" in plain or re.fullmatch("zero[123]?", plain):
        raise ValueError(DEEPSPEED.format(strategy))
    if strategy is None or strategy in ("auto", *known):
        return
    if plain in GONE_STRATEGIES:
        raise ValueError(f"trainer.strategy: {GONE_STRATEGIES[plain].format(strategy)}.")
    near = difflib.get_close_matches(strategy, known, n=3)
    offered = sorted(name for name in known if "deepspeed_" not in name)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(offered)}."
    raise ValueError(f"trainer.strategy: there is no strategy `{strategy}`.{hint}")


def resolve_devices(settings: Settings, machine: Machine) -> Verdict:
    """Returns devices as a number, `auto` and fallback resolved, never silently.

    Raises:
        ValueError: devices that are not there.
    """
    if settings.accelerator not in ACCELERATORS:
        near = difflib.get_close_matches(settings.accelerator, ACCELERATORS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"trainer.accelerator must be one of {', '.join(ACCELERATORS)}, got "
            f"{settings.accelerator}.{hint}"
        )
    wants_gpu = settings.accelerator in ("gpu", "cuda")
    may_gpu = wants_gpu or settings.accelerator == "auto"
    indices = _indices(settings.devices)
    count = len(indices) if indices is not None else _count(settings.devices)
    if not may_gpu or (machine.num_gpus == 0 and not wants_gpu):
        accelerator = "cpu" if settings.accelerator == "auto" else settings.accelerator
        return _on_cpu(settings, machine, accelerator, count)
    highest = max(indices) + 1 if indices else count
    if count == -1 and machine.num_gpus:
        indices, count = None, machine.num_gpus
    elif highest > machine.num_gpus or count == -1:
        return _missing(settings, machine, "all" if count == -1 else str(settings.devices))
    return _verdict(settings, "gpu", indices or count, count)


def _indices(devices: int | str | list[int]) -> list[int] | None:
    """Returns the indices of a list such as [0, 2] or "0,2", else None."""
    if isinstance(devices, list):
        return devices
    if isinstance(devices, str) and "," in devices:
        return [int(d) for d in devices.split(",") if d.strip()]
    return None


def _count(devices: int | str | list[int]) -> int:
    """Returns the number of devices; -1 means all that are there."""
    text = str(devices).strip()
    if text == "auto":
        return -1
    if not text.lstrip("-").isdigit():
        raise ValueError(
            f"trainer.devices must be a number, auto, or indices such as 0,2; got {devices}."
        )
    return int(text)


def _on_cpu(settings: Settings, machine: Machine, accelerator: str, count: int) -> Verdict:
    if count == -1:
        verdict = _verdict(settings, accelerator, 1, 1)
        if accelerator == "cpu":
            verdict.warnings.append(
                "devices: auto found no GPU, the run uses 1 CPU process; --trainer.devices=2 uses "
                "two"
            )
        return verdict
    verdict = _verdict(settings, accelerator, count, count)
    if accelerator == "cpu" and _indices(settings.devices) is not None:
        verdict.warnings.append(
            f"trainer.devices={settings.devices} names GPUs; on the CPU it means {count} processes"
        )
    if accelerator == "cpu" and count > machine.num_cpus:
        verdict.warnings.append(
            f"{count} processes share {machine.num_cpus} CPU cores: right, but slower than "
            f"--trainer.devices={machine.num_cpus}"
        )
    return verdict


def _missing(settings: Settings, machine: Machine, asked: str) -> Verdict:
    there = f"{machine.num_gpus} GPU{'s' * (machine.num_gpus != 1)}"
    what = f"trainer.devices={asked} asks for GPUs that this machine does not have: it has {there}"
    if settings.on_missing_devices == "error":
        way_out = f"--trainer.devices={machine.num_gpus}" if machine.num_gpus else (
            "--trainer.accelerator=cpu"
        )  # fmt: skip
        raise ValueError(
            f"{what}. Use {way_out}, or --on_missing_devices=fallback to run on what is there."
        )
    accelerator = "gpu" if machine.num_gpus else "cpu"
    count = machine.num_gpus or 1
    verdict = _verdict(settings, accelerator, count, count)
    verdict.fallback = f"{what}; the run uses {count} {accelerator.upper()} device(s)"
    verdict.warnings.append(verdict.fallback)
    return verdict


def _verdict(settings: Settings, accelerator: str, devices: int | list[int], count: int) -> Verdict:
    if count < 1:
        raise ValueError(f"trainer.devices must be at least 1 or auto, got {settings.devices}.")
    if settings.num_nodes < 1:
        raise ValueError(f"trainer.num_nodes must be at least 1, got {settings.num_nodes}.")
    return Verdict(accelerator, devices, count, count * settings.num_nodes)


def check_batch(settings: Settings, world_size: int) -> None:
    """Refuses batch sizes that contradict each other or leave devices idle.

    Raises:
        ValueError: devices x micro-batch x accumulation does not make the global batch, or tensor
            groups do not make up the world.
    """
    num_replicas = tensor_groups(settings.tensor_parallel_size, world_size)
    if settings.global_batch_size is None:
        return
    from datamodules.core.plan import derive_batching

    batching = derive_batching(
        num_replicas,
        settings.global_batch_size,
        settings.micro_batch_size,
        settings.batch_size,
        settings.accumulate_grad_batches,
    )
    check_share(batching, num_replicas)


def check_share(batching: Batching, world_size: int) -> None:
    """Refuses a global batch that has less than one sample for each micro-batch.

    Raises:
        ValueError: some device would have nothing to do.
    """
    slots = world_size * batching.accumulate_grad_batches
    if slots > batching.global_batch_size:
        raise ValueError(
            f"data.global_batch_size={batching.global_batch_size} is smaller than devices x "
            f"accumulation = {world_size} x {batching.accumulate_grad_batches}: some would have "
            f"nothing to do. Use fewer devices or data.global_batch_size >= {slots}."
        )
