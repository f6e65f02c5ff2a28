"""Checks of machine, job and process group."""

import os
import platform
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import distributions, requires
from pathlib import Path
from typing import Any, Literal

from lit_models.commands import check_rendezvous
from lit_models.commands.report import counted
from lit_models.engines import BY_HAND
from lit_models.errors import UsageError, labelled
from lit_models.training.rules import SHELLS

Level = Literal["ok", "warning", "error"]
SHOWN = ("torch", "lightning", "torchmetrics", "transformers", "jsonargparse", "numpy")
LABEL = 23  # columns, of level and check
GIB = 2**30
ENOUGH_SHARED_BYTES, ENOUGH_DISK_BYTES = GIB, 10 * GIB
BUSY_SHARE = 0.1  # of a GPU's memory, in use by another program
MESSAGE_BYTES, ROUNDS = 64 * 2**20, 5


@dataclass(frozen=True)
class Diagnosis:
    """Result of one check."""

    check: str  # name, such as "disk"; several results may share it
    level: Level  # warning: a run works, perhaps badly; error: it fails or is wrong
    what: str  # the finding, with values
    todo: str = ""  # consequence and way out; empty if ok


def doctor(
    *, folder: Path = Path("runs"), collectives: bool = False, timeout_s: float = 60.0
) -> int:
    """Check everything outside of the project that a run depends on, and say what to mend.

    Rank 0 prints the results. With --collectives they cover the whole job: rank 0 also prints what
    is wrong on other machines, and all ranks end with the same status.

    Args:
        folder: the folder that runs are written to.
        collectives: try an all-reduce in the process group of srun or torchrun.
        timeout_s: how long ranks of that group wait for each other.

    Returns:
        1 if a check found an error, else 0.

    Raises:
        UsageError: --collectives without a launcher, or a timeout that is not above 0.
    """
    if timeout_s <= 0:
        raise UsageError(f"--timeout-s must be above 0 seconds, got {timeout_s:g}.")
    environ = launched_environment()
    if collectives and environ is None:
        raise UsageError(
            "--collectives tries the group of a launcher: srun unisono doctor --collectives, or "
            "torchrun --nproc_per_node=2 -m lit_models doctor --collectives; ranks started by hand "
            f"need {', '.join(BY_HAND)}."
        )
    is_first = environ is None or environ["RANK"] == "0"
    own: list[Diagnosis] = []
    if is_first or (collectives and environ and environ["LOCAL_RANK"] == "0"):
        own = [*check_packages(), *check_machine(folder), *check_gpus()]
    if is_first:
        own += check_launcher(os.environ)
    level = worst(own)
    if collectives and environ is not None:
        own, level = _group(environ, timeout_s, own)
    for d in own:
        print(labelled(f"{d.level:<8} {d.check}", d.what, LABEL))
        if d.todo:
            print(labelled("", f"-> {d.todo}", LABEL))
    if own:
        num = Counter(d.level for d in own)
        faults = [counted(num["warning"], "warning"), counted(num["error"], "error")]
        print(", ".join([f"{num['ok']} ok", *faults]))
    return 1 if level == "error" else 0


def worst(diagnoses: Sequence[Diagnosis]) -> Level:
    """Return the most severe level."""
    levels: tuple[Level, ...] = ("error", "warning")
    return next((level for level in levels if any(d.level == level for d in diagnoses)), "ok")


def check_packages() -> list[Diagnosis]:
    """Check Python and the installed packages against the versions that the project needs."""
    from packaging.requirements import Requirement

    versions: dict[str, str] = {}
    for distribution in distributions():  # the first of a name is imported
        versions.setdefault(distribution.metadata["Name"], distribution.version)
    python = f"{platform.python_version()} on {platform.platform(terse=True)}"
    out = [Diagnosis("python", "ok", python)]
    if "unisono" not in versions:
        todo = "its versions cannot be compared: pip install -e . in that folder"
        what = "unisono runs from a folder, not installed"
        return [*out, Diagnosis("packages", "warning", what, todo)]
    for need in map(Requirement, requires("unisono") or []):
        installed = versions.get(need.name)
        if need.marker is None and installed and not need.specifier.contains(installed, True):
            what = f"{need.name} {installed} is outside of {need.specifier}"
            todo = f"unisono was never run with it: pip install '{need.name}{need.specifier}'"
            out.append(Diagnosis("packages", "error", what, todo))
    shown = ", ".join(f"{name} {versions[name]}" for name in SHOWN if name in versions)
    return out if len(out) > 1 else [*out, Diagnosis("packages", "ok", shown)]


def check_machine(folder: Path) -> list[Diagnosis]:
    """Check CPUs, shared memory and disk of this machine; `folder`, which runs are written to, need
    not exist yet."""
    from datamodules.core.planned import usable_cpus

    usable, threads = usable_cpus(), os.environ.get("OMP_NUM_THREADS", "")
    what = f"this process may use {usable} of {os.cpu_count() or 1}"
    out = [Diagnosis("cpus", "ok", what)]
    if threads.isdigit() and int(threads) > usable:
        todo = f"threads wait for each other: unset it, or {usable} / processes per machine"
        out = [Diagnosis("cpus", "warning", f"{what}, and OMP_NUM_THREADS is {threads}", todo)]
    shared = Path("/dev/shm")  # used by dataloader workers and NCCL on Linux
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        what, todo = f"{usage.free >> 20:,} of {usage.total >> 20:,} MiB free in {shared}", ""
        if usage.free < ENOUGH_SHARED_BYTES:
            what += ": little for loader processes and NCCL, which end with a bus error"
            todo = f"remove what lies in {shared}; in a container, --shm-size=8g or --ipc=host"
        out.append(Diagnosis("shared memory", "warning" if todo else "ok", what, todo))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
    except OSError as fault:
        what = f"{existing} cannot be written ({fault.strerror}): no checkpoint could be kept"
        todo = "free space there, chown or chmod it, or name another folder with --folder, and in "
        todo += "the run --trainer.default_root_dir"
        return [*out, Diagnosis("run folder", "error", what, todo)]
    free = shutil.disk_usage(existing).free
    what = f"{free / GIB:,.1f} GiB free at {existing}"
    if free >= ENOUGH_DISK_BYTES:
        return [*out, Diagnosis("disk", "ok", what)]
    todo = "a checkpoint takes 12 bytes per weight with AdamW, two or three are kept: free space, "
    todo += "or --trainer.default_root_dir on another disk"
    return [*out, Diagnosis("disk", "warning", what, todo)]


def check_gpus() -> list[Diagnosis]:
    """Check that torch sees the GPUs of the driver, and that they are alike and free."""
    import torch

    if not torch.cuda.is_available():
        if not Path("/proc/driver/nvidia/version").is_file():
            return [Diagnosis("gpus", "ok", "none; runs use CPU processes")]
        what = f"a driver is there, and torch {torch.__version__} sees no GPU: runs use the CPU"
        todo = "install a torch build with CUDA for this driver; look at CUDA_VISIBLE_DEVICES"
        return [Diagnosis("gpus", "error", what, todo)]
    indices = range(torch.cuda.device_count())
    memory = [torch.cuda.mem_get_info(index) for index in indices]  # bytes: free, total
    names = [f"{torch.cuda.get_device_name(i)} ({memory[i][1] / GIB:.0f} GiB)" for i in indices]
    what = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    what += f"; CUDA {torch.version.cuda}"
    if torch.distributed.is_nccl_available():
        what += f", NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    what += "".join(f"; {k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("NCCL_"))
    out = [Diagnosis("gpus", "ok", what)]
    if len(set(names)) > 1:
        todo = "all wait for the slowest in every step: choose equal ones with CUDA_VISIBLE_DEVICES"
        out = [Diagnosis("gpus", "warning", what, todo)]
    for index, (free, whole) in enumerate(memory):
        if whole - free > BUSY_SHARE * whole:
            what = f"GPU {index}: {(whole - free) / GIB:.1f} of {whole / GIB:.1f} GiB are used"
            todo = "another program computes there: nvidia-smi names it; end it, or choose others"
            out.append(Diagnosis("gpus", "warning", what, todo))
    return out


def check_launcher(environ: Mapping[str, str]) -> list[Diagnosis]:
    """Check which launcher set environment variables, and whether they contradict each other."""
    try:
        check_rendezvous(environ)
    except ValueError as fault:
        what, _, todo = str(fault).partition("; ")
        return [Diagnosis("launcher", "error", what, todo)]
    is_torchrun, tasks = "TORCHELASTIC_RUN_ID" in environ, int(environ.get("SLURM_NTASKS") or 0)
    is_step, name = "SLURM_STEP_ID" in environ, environ.get("SLURM_JOB_NAME")
    what = "none: unisono starts its own processes on this machine"
    if is_torchrun or "RANK" in environ:
        what = "torchrun" if is_torchrun else "ranks started by hand"
        what += f": rank {environ.get('RANK')} of {environ.get('WORLD_SIZE', '?')}"
    elif tasks and is_step:
        what = f"srun (SLURM_STEP_ID is set): task {environ.get('SLURM_PROCID')} of {tasks}"
    elif tasks:
        what = f"none, inside of SLURM job {environ.get('SLURM_JOB_ID', '?')}"
    out = [Diagnosis("launcher", "ok", what)]
    if is_torchrun and is_step and tasks > 1:
        what = f"srun started {tasks} tasks, and torchrun runs in them"
        todo = "each task starts a world of its own, and all train the same: start torchrun once "
        todo += "per machine (srun --ntasks-per-node=1), or srun unisono fit … without it"
        out.append(Diagnosis("launcher", "error", what, todo))
    elif name in SHELLS and tasks > 1 and is_step:
        what = f'srun started {tasks} tasks in a job called "{name}"'
        todo = "Lightning takes that for a shell, and each task trains a copy: give the job another"
        todo += " name, srun -J train …, sbatch -J train"
        out.append(Diagnosis("launcher", "error", what, todo))
    return out


def launched_environment() -> dict[str, str] | None:
    """Return the launcher's variables for rank, world and rendezvous, `None` without a launcher;
    under srun those that Lightning derives, which a run would use."""
    if all(map(os.environ.get, BY_HAND)):
        return {"LOCAL_RANK": "0", **os.environ}
    if "SLURM_STEP_ID" not in os.environ or int(os.environ.get("SLURM_NTASKS") or 1) < 2:
        return None
    from lightning.fabric.plugins.environments import SLURMEnvironment

    slurm = SLURMEnvironment()
    return {
        "MASTER_ADDR": slurm.main_address,
        "MASTER_PORT": str(slurm.main_port),
        "RANK": str(slurm.global_rank()),
        "LOCAL_RANK": str(slurm.local_rank()),
        "WORLD_SIZE": str(slurm.world_size()),
    }


def _group(
    environ: Mapping[str, str], timeout_s: float, own: list[Diagnosis]
) -> tuple[list[Diagnosis], Level]:
    """Time an all-reduce of known result in the launcher's process group; return the diagnoses that
    this rank prints, and the most severe level of all ranks.

    A rank that finds no group reports that itself; otherwise rank 0 reports for all machines. `own`
    are this rank's diagnoses of its machine; `environ` has RANK, WORLD_SIZE, LOCAL_RANK,
    MASTER_ADDR and MASTER_PORT.
    """
    import torch
    import torch.distributed as dist

    os.environ.update(environ)  # where torch reads them
    rank, world, host = int(environ["RANK"]), int(environ["WORLD_SIZE"]), socket.gethostname()
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        index = int(environ["LOCAL_RANK"]) % torch.cuda.device_count()  # ranks may see one each
        device, backend = torch.device("cuda", index), "nccl"
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as fault:
        place = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        reason = " ".join(str(fault).partition("\n")[0].split())
        what = f"rank {rank} of {world} on {host} found no group at {place} ({reason})"
        todo = (
            "the same MASTER_ADDR, of rank 0's machine, and the same free MASTER_PORT for all; a "
            "firewall that lets it through; the logs of the other ranks; NCCL_SOCKET_IFNAME"
        )
        return [*own, Diagnosis("group", "error", what, todo)], "error"
    try:
        seconds, is_right = [], torch.ones((), device=device)
        for _ in range(ROUNDS):
            values = torch.full((MESSAGE_BYTES // 4,), float(rank + 1), device=device)
            begin = time.perf_counter()
            dist.all_reduce(values)
            is_right *= (values == world * (world + 1) / 2).all()
            is_right.item()  # waits for a GPU
            seconds.append(time.perf_counter() - begin)
        dist.all_reduce(is_right, op=dist.ReduceOp.MIN)
        reports: list[Any] = [None] * world
        dist.all_gather_object(reports, [host, [asdict(d) for d in own if d.level != "ok"]])
    finally:
        dist.destroy_process_group()
    for other, (name, faults) in enumerate(reports):
        if other != rank:
            own = own + [
                Diagnosis(**f | {"what": f"{name} (rank {other}): {f['what']}"}) for f in faults
            ]
    hosts = Counter(name for name, _ in reports)
    names = ", ".join(f"{name} ({count})" for name, count in hosts.items())
    own = [*own, Diagnosis("group", "ok", f"{world} ranks by {backend} on {names}")]
    if is_right.item():
        rate = 2 * (world - 1) / world * MESSAGE_BYTES / min(seconds) / GIB  # as a ring
        what = f"the known sum of {MESSAGE_BYTES >> 20} MiB in {min(seconds) * 1e3:.1f} ms"
        own.append(Diagnosis("all-reduce", "ok", f"{what} ({rate:.2f} GiB/s)"))
    else:
        todo = "every gradient would be wrong: NCCL_P2P_DISABLE=1 tells whether a link between "
        todo += "GPUs is at fault; else mend the driver or the network card"
        own.append(Diagnosis("all-reduce", "error", "a sum over the ranks is wrong", todo))
    return own if rank == 0 else [], worst(own)
