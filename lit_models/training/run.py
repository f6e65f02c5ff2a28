"""Run folder: its choice and lock, the facts of a run, banner, loggers and progress.

Every rank of a command chooses the folder by what is on the disk; the first one locks it. No step
is written before all ranks have joined, and they go on only if all have chosen the same.
"""

from __future__ import annotations

import csv
import errno
import functools
import io
import json
import os
import platform
import re
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from filelock import SoftFileLock, Timeout
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from datamodules.core.planned import PlannedDataModule
from datamodules.core.store import content_digest, digest_of, remove, write_whole
from lit_models.config_files import stated_root
from lit_models.run_files import LEDGER, damaged_file
from lit_models.training.checkpoints import SAVES
from lit_models.training.ledger import agree, ledger_of, of_all_ranks
from lit_models.training.progress import budgeted_steps
from lit_models.training.strategies import strategy_name

LOCK, LOCK_JOB = ".lock", ".lock-job"  # process id and host; the launcher's ids of the run
_held: dict[Path, tuple[SoftFileLock, list[Path]]] = {}  # locks, and folders created for them


@dataclass(frozen=True)
class Run:
    """Folder of a run, checkpoint to start from, line for the user, digest of config and code."""

    folder: str
    ckpt_path: str | None = None
    notice: str = ""
    digest: str = ""


def decide(
    verb: str,
    root: Path,
    ckpt_path: str | None,
    newest: Callable[[Path], Path | None],
    is_asked: bool = False,
    own: Path | None = None,
) -> Run:
    """Return the run that a command line refers to; reads the disk, writes nothing.

    Args:
        root: trainer.default_root_dir, such as runs/demo.
        ckpt_path: a path, "auto" or `None`.
        newest: returns the sound checkpoint of a run folder that `auto` takes, or `None`.
        is_asked: the root is given on the command line, not in a file; an evaluation then writes
            there, wherever its checkpoint is.
        own: folder of the run whose config an evaluation takes: it refers to that run, wherever it
            was moved, not to a later run of its name.

    Raises:
        FileNotFoundError: the checkpoint does not exist, or `auto` finds none for an evaluation.
        ValueError: the root is a file.
    """
    nearest = next((p for p in (root, *root.parents) if p.exists()), None)
    if nearest is not None and not nearest.is_dir():
        raise ValueError(f"trainer.default_root_dir {root}: {nearest} is a file; name a folder.")
    is_fit, notices = verb == "fit", []
    root = own or root
    if ckpt_path == "auto":
        for folder in [own] if own else reversed(siblings(root)):
            checkpoint = newest(folder)
            if checkpoint is not None:
                does = "resumes from" if is_fit else "uses"
                return Run(str(folder), str(checkpoint), f"--ckpt_path auto {does} {checkpoint}")
        if not is_fit:
            raise FileNotFoundError(
                f"--ckpt_path auto: no sound checkpoint in {root}"
                f"{'' if own else ' or a later run of that name'}. Train first with "
                "`unisono fit`, or name a file: --ckpt_path runs/NAME/checkpoints/last.ckpt"
            )
        attempts = [folder for folder in siblings(root) if (folder / LEDGER).exists()]
        if attempts and not any((attempts[-1] / "checkpoints").glob("*.ckpt")):
            # Killed before its first checkpoint: the same run begins again, in the same ledger.
            return Run(str(attempts[-1]), None, f"--ckpt_path auto: {attempts[-1]} begins again")
        ckpt_path = None
        notices.append("--ckpt_path auto found no sound checkpoint: a fresh start")
    elif ckpt_path is not None:
        path = Path(ckpt_path)
        if not path.exists():
            raise FileNotFoundError(
                f"--ckpt_path {ckpt_path}: there is no such checkpoint. --ckpt_path auto takes the "
                f"newest of {root}, if there is one."
            )
        home = next((folder for folder in path.parents[:3] if holds_run(folder)), None)
        is_own = home is not None and home.resolve() in [p.resolve() for p in siblings(root)]
        if home is not None and (is_own if is_fit else is_own or not is_asked):
            return Run(str(home), ckpt_path)
    if not is_fit:
        return Run(str(root), ckpt_path)
    folder, number = root, 1
    while holds_run(folder):
        number += 1
        folder = root.with_name(f"{root.name}-{number}")
    if number > 1:
        notices.append(f"{root} holds a run already: this one writes to {folder}")
    return Run(str(folder), ckpt_path, "; ".join(notices))


def siblings(root: Path) -> list[Path]:
    """Return a root's run folders <name>, <name>-2, …, oldest first, but no other root's runs."""
    numbered = [(1, root)] if root.is_dir() else []
    for path in root.parent.glob("*-*/"):
        name, _, number = path.name.rpartition("-")
        if name == root.name and number.isdecimal() and int(number) > 1:
            command = json.loads(_text(path / "topology.json") or "{}").get("command", "")
            stated = stated_root(command)
            if path.name not in (stated.name, f"{stated.parent.name}-{stated.name}"):
                numbered.append((int(number), path))
    return [path for _, path in sorted(numbered)]


def holds_run(folder: Path) -> bool:
    """Return whether a run has begun in a folder; plain Lightning writes checkpoints, no ledger."""
    return (folder / LEDGER).exists() or any((folder / "checkpoints").glob("*.ckpt"))


def check_writable(folder: Path) -> None:
    """Raise PermissionError unless files can be created in a folder, which need not exist yet."""
    nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def locked(choose: Callable[[], Run], environ: Mapping[str, str] = os.environ) -> Run:
    """Return the chosen run; no other process writes its folder until `release`.

    A lock is taken over if its process on this host is gone, or if it is held by an earlier start
    of the same SLURM job or an earlier world of the same elastic run, on any host. For a new run
    `choose` is called again under the lock, as another run may have begun meanwhile.

    Raises:
        OSError: this user may not write to the folder.
        RuntimeError: another process holds its lock.
    """
    job, restarts = environ.get("SLURM_JOB_ID"), int(environ.get("SLURM_RESTART_COUNT") or 0)
    ids, earlier = [f"{job} {restarts}"] if job else [], {f"{job} {n}" for n in range(restarts)}
    if (elastic := environ.get("TORCHELASTIC_RUN_ID", "none")) != "none":  # torchrun's default
        ids, earlier = [*ids, elastic], {*earlier, elastic}
    run = choose()
    while True:
        folder = Path(run.folder)
        check_writable(folder)
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        # Wait a moment, so that a process that has just taken the lock can write who it is.
        lock = SoftFileLock(folder / LOCK, timeout=0.5, thread_local=False)
        try:
            if earlier & {*_text(folder / LOCK_JOB).splitlines()}:
                (folder / LOCK).unlink(missing_ok=True)  # that start has ended
            lock.acquire()
        except Timeout:
            holder = _text(folder / LOCK).splitlines()
            process, host = holder[:2] if len(holder) > 1 else ("unknown", "an unknown host")
            host, _, _ = host.partition("?")  # a suffix tells containers apart
            raise RuntimeError(
                f"{folder} is in use: process {process} on {host} trains there, and two runs in "
                "one folder would mix their steps. Wait for it or stop it, or give another "
                f"--trainer.default_root_dir. If that process is gone, remove {folder / LOCK}."
            ) from None
        if ids:
            (folder / LOCK_JOB).write_text("\n".join(ids), encoding="utf-8")
        _held[folder] = lock, created
        for path in (folder / "checkpoints").glob(".*.unfinished*"):  # of killed saves on any host
            remove(path)
        again = choose() if run.ckpt_path is None else run
        if again.folder == run.folder:
            return again
        release(folder)
        run = again


def release(folder: Path) -> None:
    """Release this process's lock on a run folder; remove folders it created that are empty."""
    if folder not in _held:
        return
    lock, created = _held.pop(folder)
    (folder / LOCK_JOB).unlink(missing_ok=True)
    lock.release()
    if folder in created and [*folder.iterdir()] == [folder / "tensorboard"]:  # refused
        remove(folder / "tensorboard")
    for path in created:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


class RunFolder(Callback):
    """Keeps all ranks in one run folder: the one that the command chose or, in a script, the
    trainer's `default_root_dir`, which it locks during `fit`. A checkpoint path passed to one call
    of the trainer does not carry over to the next.

    Args:
        chosen: run that the command chose on this rank, locked by the first; `None` in a script.

    Raises:
        RuntimeError: on all ranks, if they have different runs or data, or if a script's folder is
            in use, holds checkpoints of another run, or cannot be created.
    """

    def __init__(self, chosen: Run | None = None) -> None:
        self.chosen = chosen
        self._names_checkpoint = True  # whether the trainer had a ckpt_path before the call

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._names_checkpoint = trainer.ckpt_path is not None
        if (run := self.chosen) is not None:
            # With auto only the first rank has compared checksums; all ranks load its choice.
            is_auto = run.ckpt_path and run.notice.startswith("--ckpt_path auto")
            start = "the newest checkpoint" if is_auto else run.ckpt_path
            own = f"{run.folder}, from {start}, by config, code, torch, strategy and precision "
            agree("runs", own + run.digest, "start again, or name the checkpoint with --ckpt_path")
        data = getattr(trainer, "datamodule", None)
        if isinstance(data, PlannedDataModule):  # other plans would use a sample twice, or never
            plans = [(name, data.request(name)) for name in data.datasets]
            own = ", ".join(f"{n} {p.num_samples:,} samples, plan {p.digest()}" for n, p in plans)
            agree("data", own, "copy those of the data again")

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lock a script's folder: its checkpoint has been read, and nothing written yet."""
        if self.chosen is not None or trainer.fast_dev_run:
            return
        folder, fault = Path(trainer.default_root_dir), ""
        parents = [] if trainer.ckpt_path is None else Path(trainer.ckpt_path).resolve().parents
        if trainer.is_global_zero:
            try:
                locked(lambda: Run(str(folder)))
            except (OSError, RuntimeError) as error:
                fault = str(error)
            # A second fit of the same trainer would continue its steps with new optimizer moments.
            is_taken = trainer.global_step > 0 or any((folder / "checkpoints").glob("*.ckpt"))
            if is_taken and folder.resolve() not in parents:
                fault = fault or (
                    f"{folder} holds a run already: fit(ckpt_path=…) one of its checkpoints to go "
                    "on, or give another Trainer a default_root_dir of its own."
                )
        if fault := trainer.strategy.broadcast(fault):
            raise RuntimeError(fault)

    def on_train_end(self, *_: Any) -> None:
        """Wait for the last save before any other callback records that the run has ended."""
        SAVES.folder = None
        SAVES.settle()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: Any) -> None:
        try:
            self.on_train_end()
        except Exception as error:  # in on_exception, whose own error is `stage`
            stage.add_note(f"Besides, {error}")
        if not self._names_checkpoint:
            trainer.ckpt_path = None
        self._names_checkpoint = True
        if self.chosen is None and trainer.is_global_zero:
            release(Path(trainer.default_root_dir))

    on_exception = teardown


def status(trainer: Trainer) -> dict[str, Any]:
    """Return what a trainer runs on, and its peak memory so far.

    Call it on every rank, in a callback or after a fit: in a process group it is a collective.
    After `ddp_spawn` the calling process has no group and reports itself only. All values are
    plain. `memory` holds the peak bytes of each rank: of the process in host memory, including its
    libraries, of tensors on a GPU and of torch's allocator there.
    """
    device, strategy = trainer.strategy.root_device, trainer.strategy
    is_gpu = device.type == "cuda"
    # Not from `getrusage`, which reports at least what the parent process had held.
    most = re.search(r"VmHWM:\s+(\d+) kB", _text(Path("/proc/self/status")))  # only on Linux
    memory = {
        "resident_bytes": None if most is None else int(most[1]) * 1024,
        "allocated_bytes": torch.cuda.max_memory_allocated(device) if is_gpu else None,
        "reserved_bytes": torch.cuda.max_memory_reserved(device) if is_gpu else None,
    }
    ranks = of_all_ranks((f"{socket.gethostname()}:{trainer.global_rank}:{device}", memory))
    backend = rendezvous = None
    if dist.is_available() and dist.is_initialized():
        backend = dist.get_backend()
        rendezvous = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    exactness: dict[str, Any] = {"level": "gradient", "exact_dropout": False}
    for callback in trainer.callbacks:
        exactness |= getattr(callback, "exactness_facts", {})
    data: Any = getattr(trainer, "datamodule", None)
    return {
        "strategy": strategy_name(strategy),
        "backend": backend,
        "rendezvous": rendezvous,
        "world_size": trainer.world_size,
        "tensor_parallel_size": getattr(strategy, "tensor_parallel_size", 1),
        "num_nodes": trainer.num_nodes,
        "host_rank_device": [place for place, _ in ranks],
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "memory": [used for _, used in ranks],
        "precision": str(trainer.precision),
        "takes_tf32": is_gpu and torch.get_float32_matmul_precision() == "high",
        "learning_rates": [g["lr"] for o in trainer.optimizers for g in o.param_groups],
        "plan": data.plan_facts if "train" in getattr(data, "datasets", {}) else {},
        "exactness": exactness,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "lightning": lightning.__version__,
        },
    }


def command_line() -> str:
    """Return the command line of this process as a user would type it."""
    program = Path(sys.argv[0])
    is_own = program.name == "unisono" or program.parts[-2:] == ("lit_models", "__main__.py")
    return shlex.join([*(["unisono"] if is_own else ["python", str(program)]), *sys.argv[1:]])


@functools.cache  # a process runs the code it started with, even if files change
def code_facts() -> dict[str, str]:
    """Return the version of the package, and a digest of its source files' names and bytes."""
    root = Path(__file__).resolve().parents[2]
    paths = [p for name in ("datamodules", "lit_models") for p in (root / name).rglob("*.py")]
    sources = [[p.relative_to(root).as_posix(), content_digest(p)] for p in sorted(paths)]
    try:
        number = version("unisono")
    except PackageNotFoundError:  # run from a checkout that was never installed
        number = "of unknown version"
    return {"version": number, "digest": digest_of(sources)[:16]}


class Topology(Callback):
    """Writes `topology.json` and prints the start banner: the devices, then the plan.

    Args:
        warnings: lines from the check of the settings in `training/rules.py`.
        takes_tf32: float32 products on CUDA may round their factors to TF32.
    """

    def __init__(self, warnings: list[str] | None = None, takes_tf32: bool = False) -> None:
        self.warnings, self.takes_tf32 = warnings or [], takes_tf32

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.takes_tf32 and trainer.strategy.root_device.type == "cuda":
            torch.set_float32_matmul_precision("high")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        watching = [c for c in trainer.checkpoint_callbacks if getattr(c, "monitor", None)]
        monitor = {"name": watching[0].monitor, "mode": watching[0].mode} if watching else None
        parameters = list(pl_module.parameters())
        self.facts = {
            **status(trainer),
            "warnings": self.warnings,
            "command": command_line(),
            "code": code_facts(),
            "monitor": monitor,
            "num_parameters": sum(p.numel() for p in parameters),
            "num_trained": sum(p.numel() for p in parameters if p.requires_grad),
            "is_over": False,
        }
        self._write(trainer)
        if trainer.is_global_zero:
            print_banner(self.facts, trainer.default_root_dir)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the file again, now with the run's peak memory and the fact that it ended."""
        self.facts |= {"memory": status(trainer)["memory"], "is_over": True}
        self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "topology.json"
            write_whole(path, json.dumps(self.facts, indent=1) + "\n")


def print_banner(facts: dict[str, Any], folder: str) -> None:
    """Print the devices and then the plan, one fact per line."""
    world, plan, exactness = facts["world_size"], facts["plan"], facts["exactness"]
    size = facts["tensor_parallel_size"]
    kind = [facts["strategy"], f"tensor parallel {size}" if size > 1 else "", facts["backend"]]
    kind += [facts["precision"], "TF32" if facts["takes_tf32"] else ""]
    number, trained = facts["num_parameters"], facts["num_trained"]
    learn = "all of them learn" if trained == number else f"{trained:,} learn"
    lines = [
        ("run", folder),
        ("devices", f"{world} ({', '.join(filter(None, kind))})"),
        ("host:rank:device", ", ".join(facts["host_rank_device"][:4]) + " …" * (world > 4)),
        ("rendezvous", facts["rendezvous"]),
        ("visible GPUs", facts["visible_devices"]),
        ("parameters", f"{number:,}, {learn}"),
    ]
    if plan:
        trial = plan.get("rehearsal") or {}
        measured = " (auto, {peak_gib:.2f}/{memory_gib:.2f} GiB)".format(**trial) if trial else ""
        noun = "device" if size == 1 else "tensor group"
        replicas = f"{plan['num_replicas']} {noun}{'s' * (plan['num_replicas'] > 1)}"
        parts = f"{plan['micro_batch_size']} x {plan['accumulate_grad_batches']} accumulated"
        batch = f"{plan['global_batch_size']} = {replicas} x {parts}{measured}"
        steps, samples = f"{plan['steps_per_epoch']:,}", f"{plan['samples_per_epoch']:,}"
        if plan["steps_per_epoch"] < plan["planned_steps"]:  # limits of the run
            steps = f"{steps} of {plan['planned_steps']:,}"
            samples = f"{samples} of {plan['num_samples']:,}"
        epoch = f"{steps} steps, {samples} samples, plan {plan['plan_digest'][:12]}"
        lines += [("global batch", batch), ("epoch", epoch)]
    if exactness["level"] == "bitwise":
        chunks, copies = exactness["num_chunks"], exactness["gradient_copies"]
        lines.append(("exactness", f"bitwise: {chunks} chunks a step, {copies} x the gradients"))
    if exactness["exact_dropout"]:
        lines.append(("dropout", "keyed by seed, epoch and sample"))
    rates = [f"{rate:.3g}" for rate in sorted(set(facts["learning_rates"]), reverse=True)[:3]]
    lines.append(("learning rate", f"{', '.join(rates)} at this step"))
    print("\n".join(f"{label:<16}  {value}" for label, value in lines if value), flush=True)


class AppendingCSVLogger(Logger):
    """Appends rows of metrics to `metrics.csv`, which Lightning's CSVLogger deletes on reopening. A
    resumed run drops the rows of steps after its checkpoint: it runs these steps again."""

    name = version = ""

    def __init__(self, folder: str, resumed_step: int | None = None) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.resumed_step = resumed_step
        self._columns: list[str] = []
        self._newest: dict[str, Any] = {}

    @rank_zero_only
    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Does nothing: config.yaml holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Append one row; a new metric becomes a new column."""
        row: dict[str, Any] = {"step": "" if step is None else step, **metrics}
        if row == self._newest:  # LearningRateMonitor logs it in every micro-batch of a step
            return
        self._newest = row
        if not self._columns or set(row) - set(self._columns):
            # Rewrite it: a kill may have cut off its last row, another process added columns.
            rows = self._read()
            if not self._columns and self.resumed_step is not None:
                # Also drop a validation's row if it runs again, as a kill cut off what followed.
                again = str(row["step"]), {name for name in row if row[name] != ""}
                rows = [r for r in rows if not self._runs_again(r)]
                rows = [r for r in rows if (r["step"], {n for n in r if r[n]}) != again]
            self._columns = list(rows[0]) if rows else ["step", "epoch"]
            self._columns += sorted(set(row) - set(self._columns))
            text = io.StringIO()
            writer = csv.DictWriter(text, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
            write_whole(self.path, text.getvalue())
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _runs_again(self, row: dict[str, str]) -> bool:
        """Whether the resumed run will write this row again; false for a test's. Ledger and
        Throughput number steps from 1, Lightning numbers the rows of an evaluation from 0."""
        is_test = any(value for name, value in row.items() if str(name).startswith("test/"))
        if self.resumed_step is None or is_test or not row["step"].isdigit():
            return False
        is_of_done_step = row.get("train/loss") or row.get("throughput/seconds")
        return int(row["step"]) >= self.resumed_step + bool(is_of_done_step)

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        try:
            with self.path.open(newline="", encoding="utf-8") as file:
                reader = csv.DictReader(file, restval="")
                if "step" not in (reader.fieldnames or ["step"]):
                    raise ValueError("no column step")
                return list(reader)
        except (ValueError, csv.Error) as error:
            raise damaged_file(self.path, error) from error


def default_loggers(folder: str, resumed_step: int | None = None) -> list[Logger]:
    """Return the loggers of a run folder: metrics.csv and tensorboard/. Rows after `resumed_step`,
    the checkpoint's step, are replaced."""
    purge = {} if resumed_step is None else {"purge_step": resumed_step + 1}
    board = TensorBoardLogger(folder, name="tensorboard", version="", **purge)
    return [AppendingCSVLogger(folder, resumed_step), board]


class ProgressLine(ProgressBar):
    """Writes `epoch 1/3  step 40/939  loss 2.31  812 rows/s  0:01:42 left`.

    Metrics are read only when a line is written, so that not every step waits for a GPU.
    """

    interval_s = 10.0  # between lines; on a terminal the line is replaced twice a second
    _is_enabled = True
    _begin = _last = 0.0
    _first_step = _batches = _width = 0
    _validated = ""

    def disable(self) -> None:
        self._is_enabled = False

    def enable(self) -> None:
        self._is_enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin = self._last = time.monotonic()
        self._first_step = trainer.global_step

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._is_due():
            self._write(self._train_line(trainer))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(self._train_line(trainer), is_last=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._batches = 0
        self._last = self._last or time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the newest value of the monitored metric."""
        name = getattr(pl_module, "monitor", "val/loss")
        if name in trainer.callback_metrics and not trainer.sanity_checking:
            self._validated = f"{name} {float(trainer.callback_metrics[name]):.4g}"

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._batches += 1
        if self._is_due():
            stage: Any = trainer.state.stage
            totals = {"test": trainer.num_test_batches, "predict": trainer.num_predict_batches}
            total = sum(totals.get(stage.value, trainer.num_val_batches))
            self._write(f"{stage.value} batch {self._batches}/{total:.0f}")

    on_test_start = on_predict_start = on_validation_start
    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def _train_line(self, trainer: Trainer) -> str:
        step, total = trainer.global_step, budgeted_steps(trainer)
        seconds = max(time.monotonic() - self._begin, 1e-9)
        done = step - self._first_step
        epochs = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
        # Not `current_epoch`, which Lightning counts up before training has ended.
        epoch = max(1, trainer.fit_loop.epoch_progress.current.started)
        parts = [f"epoch {epoch}{epochs}", f"step {step}{f'/{total}' if total else ''}"]
        logged = getattr(ledger_of(trainer), "latest", {})
        loss = logged.get("loss", trainer.callback_metrics.get("train/loss"))
        if loss is not None:
            parts.append(f"loss {float(loss):.4g}")
        if self._validated:
            parts.append(self._validated)
        if done > 0:
            batching = getattr(getattr(trainer, "datamodule", None), "batching", None)
            rows = getattr(batching, "global_batch_size", 1)
            parts.append(f"{done * rows / seconds:,.0f} rows/s")
        if done > 0 and total:
            left = timedelta(seconds=round((total - step) * seconds / done))
            took = timedelta(seconds=round(seconds))
            parts.append(f"{left} left" if step < total else f"took {took}")
        return "  ".join(parts)

    def _is_due(self) -> bool:
        interval_s = 0.5 if sys.stdout.isatty() else self.interval_s
        return self._is_enabled and time.monotonic() - self._last >= interval_s

    def _write(self, line: str, is_last: bool = False) -> None:
        if not self._is_enabled:
            return
        self._last = time.monotonic()
        if sys.stdout.isatty():
            print("\r" + line.ljust(self._width), end="\n" if is_last else "", flush=True)
            self._width = len(line)
        else:
            print(line, flush=True)
