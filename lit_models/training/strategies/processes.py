"""What all strategies of several processes share: a group that forms or says why, children that end
with their parent."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lit_models.training.local_ranks import LAUNCHED_BY, end_with_parent, leave_group

BACKENDS = ("gloo", "nccl", "mpi")
TAKEN = ("EADDRINUSE", "address already in use")
HEARD_S = 1.0
GRACE_S = 10.0  # within which a rank that failed says so, or one that heard of it ends
INTERRUPTED_GRACE_S = 2.0
SEED = "PL_GLOBAL_SEED"  # Lightning's name for it


class ManagedProcesses(ParallelStrategy):
    """Mixed into a parallel strategy, before Lightning's class."""

    def _configure_launcher(self) -> None:
        """Refuse a backend before any process starts."""
        check_backend(self._process_group_backend, self.root_device)
        end_with_parent(os.environ)
        super()._configure_launcher()
        if isinstance(self._launcher, _SubprocessScriptLauncher):
            members = (self.cluster_environment, self.num_processes, self.num_nodes)
            self._launcher = NamedLauncher(*members)

    def setup_environment(self) -> None:
        """Form the process group, in which all plan with the seed of rank 0.

        Raises:
            RuntimeError: the port of the rendezvous belongs to another program.
        """
        try:
            super().setup_environment()
        except dist.DistNetworkError as error:
            if not any(text in str(error) for text in TAKEN):
                raise
            raise RuntimeError(port_taken(os.environ)) from error
        # gloo's threads abort a process that ends with its group: one time in three.
        atexit.register(leave_group)
        share_seed(self.broadcast, os.environ)

    def setup(self, trainer: Trainer) -> None:
        """Warn of batch norms: their statistics make a run depend on the number of devices."""
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
        modules = trainer.lightning_module.modules()
        if trainer.state.fn == TrainerFn.FITTING and any(isinstance(m, norms) for m in modules):
            rank_zero_warn(
                "batch norm layers take their statistics from what each device computes at once, "
                "rows that only fill a batch included: the run depends on the number of devices. "
                "On GPUs trainer.sync_batchnorm=true lessens it; LayerNorm or GroupNorm do not "
                "have it."
            )
        super().setup(trainer)

    def ended_children(self) -> str:
        """Return which ranks that this process started are gone or stopped, in words."""
        said: list[str] = []
        children = [
            c for c in getattr(self.launcher, "procs", []) if isinstance(c, subprocess.Popen)
        ]
        end = time.monotonic() + HEARD_S  # its connections end a moment before a process does
        while time.monotonic() < end and all(child.poll() is None for child in children):
            time.sleep(0.05)
        for rank, child in enumerate(children, self.global_rank + 1):
            status = child.poll()
            if status is not None and status < 0:
                said.append(f"rank {rank} was ended by {signal.Signals(-status).name}")
            elif status:
                said.append(f"rank {rank} ended with status {status}")
            elif status is None and is_stopped(child.pid):
                said.append(f"rank {rank} is stopped (kill -CONT {child.pid} lets it go on)")
        return " and ".join(said)

    def unwatch_children(self) -> None:
        """Keep Lightning's observer from killing this process while it says what happened.

        The observer looks at a list every few seconds; the launcher goes on with a copy of it.
        """
        children = getattr(self.launcher, "procs", None)
        if children:
            self.launcher.procs = list(children)  # type: ignore[union-attr]
            children.clear()

    def on_exception(self, exception: BaseException) -> None:
        """End the processes that this one started: they would wait for it."""
        super().on_exception(exception)
        children = getattr(self.launcher, "procs", [])
        # Without a group nobody can have failed elsewhere: the others are still on their way to it.
        has_group = dist.is_initialized() or not all(
            isinstance(c, subprocess.Popen) for c in children
        )
        grace_s = GRACE_S if isinstance(exception, Exception) else INTERRUPTED_GRACE_S
        end_children(children, grace_s if has_group else 0.0)


def is_stopped(pid: int) -> bool:
    """Returns whether a live process is stopped, as by Ctrl-Z or SIGSTOP; Linux tells it."""
    path = Path(f"/proc/{pid}/stat")
    return path.exists() and path.read_text().rpartition(")")[2].split()[0] == "T"


def share_seed(
    broadcast: Callable[[str | None], str | None], environ: MutableMapping[str, str]
) -> None:
    """Takes rank 0's seed of the run, from which a datamodule plans that has none of its own.

    Ranks that drew a seed each would deal out different plans: samples twice, and others never.

    Args:
        broadcast: gives every rank the value of rank 0; a collective.
        environ: the environment.
    """
    seed = broadcast(environ.get(SEED))
    if seed is None:
        environ.pop(SEED, None)
    else:
        environ[SEED] = seed


class NamedLauncher(_SubprocessScriptLauncher):
    """Tells the ranks that it starts which process it is."""

    def _call_children_scripts(self) -> None:
        os.environ[LAUNCHED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[LAUNCHED_BY]


def check_backend(backend: str | None, device: torch.device) -> None:
    """Refuses a backend that this torch or this device does not have.

    Raises:
        ValueError: there is no such backend here.
    """
    if backend is None:
        return
    if backend not in BACKENDS:
        raise ValueError(
            f"process_group_backend must be one of {', '.join(BACKENDS)}, got {backend}; leave it "
            "out and the device decides."
        )
    if backend == "mpi" and not dist.is_mpi_available():
        raise ValueError(
            f"process_group_backend is mpi, but torch {torch.__version__} was built without MPI. "
            "Use gloo (CPU) or nccl (GPU), leave it out and the device decides, or build torch "
            "from source on a machine with MPI."
        )
    if backend == "nccl" and device.type != "cuda":
        raise ValueError(
            f"process_group_backend is nccl, which joins GPUs, but the run is on {device.type}; "
            "use gloo, or leave it out and the device decides."
        )
    if backend == "nccl" and not dist.is_nccl_available():
        raise ValueError(f"torch {torch.__version__} was built without nccl; use gloo.")


def port_taken(environ: os._Environ[str] | dict[str, str]) -> str:
    """Returns what to tell the user whose rendezvous cannot listen."""
    port = environ.get("MASTER_PORT", "?")
    return (
        f"port {port} is taken: another program on this machine listens there, perhaps what an "
        "earlier run left behind. Set MASTER_PORT to a free one on all nodes, or unset it where "
        "there is one node: a free one is then chosen."
    )


def end_children(children: list[Any], grace_s: float) -> None:
    """Ends processes that a launcher started.

    Args:
        children: of `subprocess` or `multiprocessing`.
        grace_s: time for them to end by themselves, in all.
    """
    deadline = time.monotonic() + grace_s
    for child in children:
        left_s = max(0.0, deadline - time.monotonic())
        if isinstance(child, subprocess.Popen):
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(left_s)
            child.kill()  # nothing where it has ended
            child.wait()
        else:
            child.join(left_s)
            child.kill()
            child.join()
