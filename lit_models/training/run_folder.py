"""Chooses the folder of a run and the checkpoint it starts from: once, for all ranks.

The launching process decides and hands the choice to its children by an environment variable.
Under srun or torchrun, where nobody launches, the first rank writes it to a claim file that is
named by the launch and that the others wait for.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from filelock import SoftFileLock, Timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from datamodules.core.checkpoint_recipe import checkpoint_to_load
from lit_models.training.checkpoints import newest_checkpoint

HANDED_DOWN = "UNISONO_RUN"
LEDGER = "ledger.jsonl"
LOCK, LOCK_JOB = ".lock", ".lock-job"  # process id and host; job id and restarts, under SLURM
WORDS = ("last", "best", "hpc", "registry")  # what Lightning knows instead of a path
CLAIM_TIMEOUT_S = 120.0
_held: dict[Path, tuple[SoftFileLock, list[Path]]] = {}  # by this process; folders that it made


@dataclass(frozen=True)
class Run:
    """Where a run writes and what it starts from.

    Attributes:
        folder: the run folder.
        ckpt_path: a checkpoint, or None for a fresh start.
        notice: one line for the user, or "".
    """

    folder: str
    ckpt_path: str | None = None
    notice: str = ""


def decide(
    verb: str,
    root: Path,
    ckpt_path: str | None,
    newest: Callable[[Path], Path | None],
    is_asked: bool = False,
) -> Run:
    """Returns the run that a command line means; reads the disk, writes nothing.

    Args:
        verb: fit, validate, test or predict.
        root: trainer.default_root_dir, such as runs/demo.
        ckpt_path: a path, a word that Lightning knows, "auto" or None.
        newest: returns the newest sound checkpoint of a run folder, or None.
        is_asked: the command line names the root itself, no file does; an evaluation writes there,
            wherever its checkpoint lies.

    Raises:
        FileNotFoundError: the checkpoint does not exist, or `auto` finds none for an evaluation.
        ValueError: the root is a file.
    """
    there = next((p for p in (root, *root.parents) if p.exists()), None)
    if there is not None and not there.is_dir():
        raise ValueError(f"trainer.default_root_dir {root}: {there} is a file; name a folder.")
    if ckpt_path == "auto":
        return _from_newest(verb, root, newest)
    if ckpt_path is not None and ckpt_path not in WORDS:
        path = Path(ckpt_path)
        if not path.exists():
            raise FileNotFoundError(
                f"--ckpt_path {ckpt_path}: there is no such checkpoint. --ckpt_path auto takes the "
                f"newest of {root}, if there is one."
            )
        home = run_of(path)
        if verb != "fit" and is_asked and not _is_of(path, home, root):
            return Run(str(root), ckpt_path)
        if verb != "fit" and home is not None and not os.access(home, os.W_OK):
            return Run(str(root), ckpt_path, f"{home} is read-only: this one writes to {root}")
        if home is not None and (verb != "fit" or home.resolve() in _resolved(siblings(root))):
            return Run(str(home), ckpt_path)
    if verb != "fit":
        return Run(str(root), ckpt_path)
    folder, notice = free_folder(root)
    return Run(str(folder), ckpt_path, notice)


def _from_newest(verb: str, root: Path, newest: Callable[[Path], Path | None]) -> Run:
    for folder in reversed(siblings(root)):
        found = newest(folder)
        if found is not None:
            does = "resumes from" if verb == "fit" else "uses"
            return Run(str(folder), str(found), f"--ckpt_path auto {does} {found}")
    if verb != "fit":
        raise FileNotFoundError(
            f"--ckpt_path auto: no sound checkpoint in {root} or a later run of that name. Train "
            "first with `unisono fit`, or name a file: --ckpt_path runs/NAME/checkpoints/last.ckpt"
        )
    begun = [folder for folder in siblings(root) if (folder / LEDGER).exists()]
    if begun and not any((begun[-1] / "checkpoints").glob("*.ckpt")):
        # It was killed before its first checkpoint: the same run begins again, with one ledger.
        return Run(str(begun[-1]), None, f"--ckpt_path auto: {begun[-1]} begins again")
    folder, notice = free_folder(root)
    fresh = "--ckpt_path auto found no sound checkpoint: a fresh start"
    return Run(str(folder), None, f"{fresh}; {notice}" if notice else fresh)


def siblings(root: Path) -> list[Path]:
    """Returns the run folders <name>, <name>-2, <name>-3 … that exist, oldest first."""
    pattern = re.compile(re.escape(root.name) + r"-(\d+)")
    numbered = [(1, root)] if root.is_dir() else []
    if root.parent.is_dir():
        for path in root.parent.iterdir():
            match = pattern.fullmatch(path.name)
            if match and int(match[1]) > 1 and path.is_dir():
                numbered.append((int(match[1]), path))
    return [path for _, path in sorted(numbered)]


def holds_run(folder: Path) -> bool:
    """Returns whether a run has begun in a folder; one of plain Lightning keeps no ledger."""
    return (folder / LEDGER).exists() or any((folder / "checkpoints").glob("*.ckpt"))


def free_folder(root: Path) -> tuple[Path, str]:
    """Returns the first of <name>, <name>-2, … that holds no run, and what to tell the user."""
    folder, number = root, 1
    while holds_run(folder):
        number += 1
        folder = root.with_name(f"{root.name}-{number}")
    if number == 1:
        return root, ""
    return folder, f"{root} holds a run already: this one writes to {folder}"


def check_writable(folder: Path) -> None:
    """Raises PermissionError unless files can be made in a run folder that may not exist yet."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def locked(choose: Callable[[], Run], environ: Mapping[str, str] = os.environ) -> Run:
    """Returns the run that is chosen, whose folder no other process writes until `release`.

    The lock of a process of this host that is gone is taken over, and that of an earlier start of
    the same SLURM job.

    Args:
        choose: decides; called again under the lock for a new run, as another may have begun.
        environ: of this process.

    Raises:
        OSError: this user may not write there.
        RuntimeError: another process holds the folder.
    """
    run = choose()
    while True:
        _lock(Path(run.folder), environ)
        again = choose() if run.ckpt_path is None else run
        if again.folder == run.folder:
            return again
        release(Path(run.folder))
        run = again


def _lock(folder: Path, environ: Mapping[str, str]) -> None:
    check_writable(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    # A moment, in which another one that has just taken it writes who it is.
    lock = SoftFileLock(folder / LOCK, timeout=0.5, thread_local=False)
    job, restarts = environ.get("SLURM_JOB_ID"), int(environ.get("SLURM_RESTART_COUNT") or 0)
    try:
        if job and _text(folder / LOCK_JOB) in {f"{job} {n}" for n in range(restarts)}:
            (folder / LOCK).unlink(missing_ok=True)  # a requeued job has ended before it starts
        lock.acquire()
    except Timeout:
        holder = _text(folder / LOCK).splitlines()
        process, host = holder[:2] if len(holder) > 1 else ("unknown", "an unknown host")
        raise RuntimeError(
            f"{folder} is in use: process {process} on {host} trains there, and two runs in one "
            "folder would mix their steps. Wait for it or stop it, or give another "
            f"--trainer.default_root_dir. If that process is gone, remove {folder / LOCK}."
        ) from None
    if job:
        (folder / LOCK_JOB).write_text(f"{job} {restarts}", encoding="utf-8")
    _held[folder] = lock, made


def release(folder: Path) -> None:
    """Gives a run folder free, if this process holds it; one that it made for nothing goes."""
    if folder not in _held:
        return
    lock, made = _held.pop(folder)
    (folder / LOCK_JOB).unlink(missing_ok=True)
    lock.release()
    for path in made:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def run_of(checkpoint: Path) -> Path | None:
    """Returns the run folder that a checkpoint lies in, or None."""
    for folder in checkpoint.parents[:3]:
        if holds_run(folder):
            return folder
    return None


def _is_of(checkpoint: Path, home: Path | None, root: Path) -> bool:
    """Whether a checkpoint lies in the root, or in a later run of that name."""
    is_inside = root.resolve() in checkpoint.resolve().parents
    return is_inside or (home is not None and home.resolve() in _resolved(siblings(root)))


def _resolved(paths: list[Path]) -> set[Path]:
    return {path.resolve() for path in paths}


def settle(
    choose: Callable[[], Run], environ: dict[str, str] | os._Environ[str], claims: Path
) -> Run:
    """Returns the same run on every rank; `choose` runs in one process only.

    Args:
        choose: decides; called by the launching process or by the first rank.
        environ: the environment; children started later inherit the choice through it.
        claims: a folder that all ranks see.
    """
    if HANDED_DOWN in environ and int(environ.get("LOCAL_RANK") or 0) > 0:
        return Run(**json.loads(environ[HANDED_DOWN]))
    claim = claim_path(environ, claims)
    if claim is None:
        run = choose()
    else:
        rank = int(environ.get("RANK") or environ.get("SLURM_PROCID") or environ["NODE_RANK"])
        run = write_claim(claim, choose) if rank == 0 else wait_for_claim(claim)
    environ[HANDED_DOWN] = json.dumps(asdict(run))
    return run


def claim_path(environ: Mapping[str, str], claims: Path) -> Path | None:
    """Returns the claim file of one srun, torchrun or several-node launch, None for others."""
    names: tuple[str, ...]
    parent = ""
    if "TORCHELASTIC_RUN_ID" in environ and int(environ.get("WORLD_SIZE") or 1) > 1:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
        if environ.get("WORLD_SIZE") == environ.get("LOCAL_WORLD_SIZE"):
            parent = str(os.getppid())  # a static launch uses one id and port again and again
    elif "SLURM_STEP_ID" in environ and int(environ.get("SLURM_NTASKS") or 1) > 1:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    elif "NODE_RANK" in environ and "MASTER_ADDR" in environ:
        names = ("MASTER_ADDR", "MASTER_PORT")
    else:
        return None
    launch = "|".join([*(f"{name}={environ.get(name, '')}" for name in names), parent])
    return claims / f".launch-{hashlib.sha256(launch.encode()).hexdigest()[:16]}.json"


def write_claim(claim: Path, choose: Callable[[], Run]) -> Run:
    """Decides and publishes the choice, or the error, in one atomic step."""
    claim.parent.mkdir(parents=True, exist_ok=True)
    try:
        run = choose()
        content: dict[str, Any] = {"run": asdict(run)}
    except Exception as error:
        content = {"error": str(error)}
        raise
    finally:
        temporary = claim.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({**content, "time_s": time.time()}), encoding="utf-8")
        temporary.replace(claim)
    return run


def wait_for_claim(claim: Path, timeout_s: float = CLAIM_TIMEOUT_S) -> Run:
    """Returns the first rank's choice.

    A claim that is older than ten minutes belongs to an earlier launch with the same name.

    Raises:
        RuntimeError: the first rank failed, or did not answer in time.
    """
    begin = time.time()
    while time.time() - begin < timeout_s:
        if claim.exists():
            content = json.loads(claim.read_text(encoding="utf-8"))
            if content["time_s"] > begin - 600:
                if "error" in content:
                    raise RuntimeError(f"the first rank could not start: {content['error']}")
                return Run(**content["run"])
        time.sleep(0.1)
    raise RuntimeError(
        f"the first rank did not choose a run folder within {timeout_s:.0f} s ({claim}). Do all "
        "nodes see the same working folder, and did the first rank start?"
    )


def withdraw(environ: dict[str, str] | os._Environ[str], claims: Path, is_over: bool) -> None:
    """Forgets the choice and gives its folder free: the next command in this process decides anew.

    Args:
        environ: the environment that `settle` wrote to.
        claims: the folder given to `settle`.
        is_over: the run ended well, so no rank can still be waiting for the claim.
    """
    environ.pop(HANDED_DOWN, None)
    for folder in list(_held):
        release(folder)
    claim = claim_path(environ, claims)
    if is_over and claim is not None:
        claim.unlink(missing_ok=True)


class RunFolder(Callback):
    """Gives a training of a script a folder and its lock, as the command's have.

    The folder is the trainer's `default_root_dir`, or the first of NAME-2, NAME-3, … where that
    holds a run; without one given it is runs/SCRIPT. A checkpoint of the run goes on in its folder.

    Raises:
        RuntimeError: on all ranks: another process holds the folder, or it cannot be made.
    """

    def __init__(self) -> None:
        self.run: Run | None = None  # of the first training with this trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run or HANDED_DOWN in os.environ:
            return
        run, fault = None, ""
        if trainer.is_global_zero:
            try:
                run = locked(partial(self._choose, trainer))
            except (OSError, RuntimeError, ValueError) as error:
                fault = str(error)
        run, fault = trainer.strategy.broadcast((run, fault))
        if fault:
            raise RuntimeError(fault)
        if self.run is None and run.notice:
            rank_zero_info(run.notice)
        self.run = run
        trainer._default_root_dir = run.folder  # it has no public setter

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.run is not None and trainer.is_global_zero:
            release(Path(self.run.folder))

    def _choose(self, trainer: Trainer) -> Run:
        root, ckpt_path = Path(trainer.default_root_dir), checkpoint_to_load(trainer)
        if self.run is not None or ckpt_path in WORDS:
            return Run(str(root), ckpt_path)
        if root.resolve() == Path.cwd():
            root = Path("runs") / (Path(sys.argv[0]).stem.strip("-") or "script")
        return decide("fit", root, ckpt_path, newest_checkpoint)
