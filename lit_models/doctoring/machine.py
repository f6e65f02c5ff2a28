"""What this machine gives a run: CPUs, memory, shared memory, open files, disk, its clock."""

import errno
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

from lit_models.doctoring.findings import Finding, ok

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
ENOUGH_SHARED_GIB, LEAST_SHARED_MIB = 1.0, 64
ENOUGH_FILES = 4096
ENOUGH_DISK_GIB, ENOUGH_INODES = 10.0, 10_000
MOST_CLOCK_S = 5.0


def check(folder: Path) -> list[Finding]:
    """Return findings on this machine.

    Args:
        folder: where runs are written; it may not exist yet.
    """
    return [
        _cpus(),
        _memory(),
        _shared_memory(SHARED_MEMORY),
        _open_files(),
        *_run_folder(folder),
    ]


def memory_limit_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that this process may use: the machine's, or what its cgroup allows."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = root / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            whole = min(whole, int(text))
    return whole


def _cpus() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    there = os.cpu_count()
    what = f"this process may use {usable} of {there}"
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and usable and int(threads) > usable:
        return Finding(
            "cpus",
            "warning",
            f"{what}, and OMP_NUM_THREADS is {threads}",
            "threads wait for each other: a step takes many times as long",
            f"unset OMP_NUM_THREADS, or set it to {usable} / processes per machine",
        )
    return ok("cpus", what)


def _memory() -> Finding:
    limit = memory_limit_bytes()
    free = _available_bytes()
    what = f"{limit / GIB:.1f} GiB, {free / GIB:.1f} GiB of them available"
    if free < GIB:
        return Finding(
            "memory",
            "error",
            what,
            "importing torch alone takes half a GiB per process",
            "end other programs, or ask the scheduler for more (--mem)",
        )
    return ok("memory", what)


def _available_bytes() -> int:
    path = Path("/proc/meminfo")
    if path.is_file():
        for line in path.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, memory_limit_bytes())
    return memory_limit_bytes()


def _shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding(
            "shared memory",
            "warning",
            f"there is no {folder}",
            "loader processes and NCCL share data through it",
            "--data.loader.num_workers=0, or mount a tmpfs there",
        )
    usage = shutil.disk_usage(folder)
    free, total = usage.free / 2**20, usage.total / 2**20
    what = f"{free:,.0f} of {total:,.0f} MiB free in {folder}"
    if free < LEAST_SHARED_MIB:
        return Finding(
            "shared memory",
            "error",
            what,
            "loader processes and NCCL end with a bus error (signal 7)",
            f"remove what lies in {folder}; in a container, start it with --shm-size=8g or "
            "--ipc=host",
        )
    if free < ENOUGH_SHARED_GIB * 1024:
        return Finding(
            "shared memory",
            "warning",
            what,
            "little for several GPUs and many loader processes",
            "in a container, --shm-size=8g",
        )
    return ok("shared memory", what)


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    what = f"at most {soft} (hard limit {hard})"
    if soft < ENOUGH_FILES:
        return Finding(
            "open files",
            "warning",
            what,
            "many loader processes or many data files fail with 'Too many open files'",
            f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}, before the command",
        )
    return ok("open files", what)


def _run_folder(folder: Path) -> list[Finding]:
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        return [
            Finding(
                "run folder",
                "error",
                f"{there} is a file",
                "nothing can be written below it",
                "name another folder with --folder, and with --trainer.default_root_dir in the run",
            )
        ]
    try:
        written_at = _probe(there)
    except OSError as error:
        return [_unwritable(there, error)]
    return [_disk(there), _clock(there, written_at)]


def _probe(folder: Path) -> tuple[float, float]:
    """Write a file and return when, by the clock of the disk and by that of this machine."""
    handle, name = tempfile.mkstemp(dir=folder, prefix=".doctor-")
    try:
        before = time.time()
        os.write(handle, b"x")
        os.fsync(handle)
        return os.fstat(handle).st_mtime, (before + time.time()) / 2
    finally:
        os.close(handle)
        os.unlink(name)


def _unwritable(folder: Path, error: OSError) -> Finding:
    ways = {
        errno.ENOSPC: "free space there, or name another disk",
        errno.EDQUOT: "your quota is used up: free space there",
        errno.EROFS: "it is mounted read-only: name another folder",
    }
    way = ways.get(error.errno or 0, "chown or chmod it, or name another folder")
    return Finding(
        "run folder",
        "error",
        f"{folder} cannot be written ({error.strerror})",
        "no checkpoint and no ledger could be kept",
        f"{way} (--trainer.default_root_dir in the run)",
    )


def _disk(folder: Path) -> Finding:
    usage, status = shutil.disk_usage(folder), os.statvfs(folder)
    what = f"{usage.free / GIB:,.1f} GiB free at {folder}"
    if status.f_files:  # some file systems do not count them
        what += f", {status.f_favail:,} inodes"
    few_inodes = status.f_files > 0 and status.f_favail < ENOUGH_INODES
    if usage.free < ENOUGH_DISK_GIB * GIB or few_inodes:
        return Finding(
            "disk",
            "warning",
            what,
            "a checkpoint takes 12 bytes per weight with AdamW, and two or three are kept",
            "free space, or name another disk with --trainer.default_root_dir",
        )
    return ok("disk", what)


def _clock(folder: Path, written_at: tuple[float, float]) -> Finding:
    disk, here = written_at
    apart = disk - here
    what = f"{abs(apart):.1f} s between this machine and the disk of {folder}"
    if abs(apart) > MOST_CLOCK_S:
        return Finding(
            "clock",
            "error",
            what,
            "the newest checkpoint is chosen and claims are dropped by the time of files",
            "set the clock by NTP (timedatectl set-ntp true), on the file server too",
        )
    return ok("clock", what)
