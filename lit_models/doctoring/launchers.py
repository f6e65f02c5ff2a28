"""Which launcher started this process, why that is believed, and what contradicts it."""

import os
import socket
from collections.abc import Mapping

from lit_models.doctoring.findings import Finding, ok
from lit_models.training.launched_world import check_world, launched_worlds

SHELL_JOBS = ("bash", "interactive")
TORCHRUN, SLURM, BY_HAND = "TORCHELASTIC_RUN_ID", "SLURM_NTASKS", "RANK"


def check(
    environ: Mapping[str, str], devices: int | None = None, num_nodes: int | None = None
) -> list[Finding]:
    """Return findings on the launcher.

    Args:
        environ: the environment, in which launchers leave their variables.
        devices: processes per machine of the run that is meant; none asks nothing.
        num_nodes: machines of that run; none is one.
    """
    findings = [_launcher(environ), *_both(environ), *_detection(environ)]
    if devices is not None:
        findings += _world(environ, devices, num_nodes or 1)
    return [*findings, *_master(environ)]


def world_size(environ: Mapping[str, str]) -> int:
    """Return how many processes a launcher started; 1 without one."""
    return max([1, *launched_worlds(environ).values()])


def _launcher(environ: Mapping[str, str]) -> Finding:
    if TORCHRUN in environ:
        what = f"torchrun ({TORCHRUN} is set): rank {environ.get('RANK')} of "
        return ok("launcher", f"{what}{environ.get('WORLD_SIZE')}")
    if environ.get(SLURM):
        if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
            what = f"srun (SLURM_STEP_ID is set): task {environ['SLURM_PROCID']} of "
            return ok("launcher", f"{what}{environ[SLURM]}")
        return ok("launcher", f"none, inside of SLURM job {environ.get('SLURM_JOB_ID', '?')}")
    if BY_HAND in environ:
        what = "ranks started by hand (RANK is set, and no launcher's own variable): rank "
        return ok("launcher", f"{what}{environ[BY_HAND]} of {environ.get('WORLD_SIZE', '?')}")
    return ok("launcher", "none: unisono starts its own processes on this machine")


def _both(environ: Mapping[str, str]) -> list[Finding]:
    if TORCHRUN not in environ or int(environ.get(SLURM) or 1) < 2:
        return []
    if "SLURM_STEP_ID" not in environ:
        return []
    return [
        Finding(
            "launcher",
            "error",
            f"srun started {environ[SLURM]} tasks, and torchrun runs in them",
            "torchrun wins: each task starts a world of its own, and all train the same",
            "start torchrun once per machine (srun --ntasks-per-node=1), or leave it out: srun "
            "unisono fit … is enough",
        )
    ]


def _detection(environ: Mapping[str, str]) -> list[Finding]:
    """Return where Lightning does not see SLURM although srun started several tasks."""
    name = environ.get("SLURM_JOB_NAME")
    if name not in SHELL_JOBS or int(environ.get(SLURM) or 1) < 2:
        return []
    if "SLURM_STEP_ID" not in environ or TORCHRUN in environ:
        return []
    return [
        Finding(
            "launcher",
            "error",
            f'srun started {environ[SLURM]} tasks in a job called "{name}"',
            "Lightning takes that for a shell and ignores SLURM: each task trains a copy",
            "give the job or the step another name: srun -J train …, sbatch -J train",
        )
    ]


def _world(environ: Mapping[str, str], devices: int, num_nodes: int) -> list[Finding]:
    warnings: list[str] = []
    try:
        check_world(devices * num_nodes, None, environ, warnings)
    except ValueError as error:
        what, _, means = str(error).partition(": ")
        means, _, todo = means.partition(". ")
        return [Finding("world", "error", what, means, todo.rstrip("."))]
    findings = [
        Finding("world", "warning", line, "it never begins", "srun before the command")
        for line in warnings
    ]
    return findings or [ok("world", f"{devices} x {num_nodes} processes, as the launcher has them")]


def _master(environ: Mapping[str, str]) -> list[Finding]:
    """Return whether rank 0 can be found, and whether its port is free."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT")
    findings = [_own_name()]
    if address:
        findings.append(_resolves(address))
    if port and port.isdigit() and _is_first(environ) and not has_agent_store(environ):
        findings.append(_port(int(port)))
    return findings


def has_agent_store(environ: Mapping[str, str]) -> bool:
    """Return whether torchrun itself listens on MASTER_PORT for its ranks."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def _is_first(environ: Mapping[str, str]) -> bool:
    return environ.get("RANK", environ.get("SLURM_PROCID", "0")) == "0"


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return Finding(
            "host name",
            "warning",
            f"{name}, which resolves to nothing ({error.strerror or error})",
            "other machines are told this name, and do not find it",
            "add it to /etc/hosts, or set MASTER_ADDR to an address of rank 0's machine",
        )
    try:
        with socket.socket() as probe:
            probe.bind((address, 0))
    except OSError:
        return Finding(
            "host name",
            "error",
            f"{name} resolves to {address}, which is no address of this machine",
            "ranks connect to a machine that is not the one they are told",
            "mend /etc/hosts or DNS, or set MASTER_ADDR to an address of rank 0's machine",
        )
    return ok("host name", f"{name} ({address})")


def _resolves(address: str) -> Finding:
    try:
        return ok("rank 0", f"{address} ({socket.gethostbyname(address)})")
    except OSError as error:
        return Finding(
            "rank 0",
            "error",
            f"MASTER_ADDR={address} resolves to nothing ({error.strerror or error})",
            "no rank finds rank 0: all wait, and end after the time limit of the process group",
            "export MASTER_ADDR=$(scontrol show hostnames $SLURM_NODELIST | head -n 1), or the "
            "address of rank 0's machine",
        )


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError as error:
            return Finding(
                "port",
                "error",
                f"MASTER_PORT={port} cannot be listened on ({os.strerror(error.errno or 0)})",
                "another program, or a run that was not ended, has it: rank 0 cannot begin",
                f"end that program (ss -ltnp 'sport = :{port}'), or export another MASTER_PORT",
            )
    return ok("port", f"{port} is free")
