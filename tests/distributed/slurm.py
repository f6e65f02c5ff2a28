"""A small SLURM on this machine: two nodes that listen on loopback, started and stopped by a test.

Debian's slurmd can be started several times on one host, one for each node.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("slurm-wlm", "munge")
DAEMONS = ("slurmctld", "slurmd", "munged")
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=5,bf_interval=5
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=15
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=4 RealMemory=1000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=1:00:00 State=UP
"""


def install() -> str | None:
    """Install SLURM unless it is there; return why it cannot be had, else None."""
    if all(shutil.which(name) for name in DAEMONS):
        return None
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return "SLURM is not installed, and this is no root of a Debian"
    if subprocess.run(["apt-get", "update", "-qq"], capture_output=True).returncode:
        return "apt-get update cannot fetch"
    fetch = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    only = subprocess.run([*fetch, "--download-only"], env=environ, capture_output=True, text=True)
    if only.returncode:
        return f"apt-get cannot fetch {' '.join(PACKAGES)}: {only.stderr.strip()[-200:]}"
    subprocess.run(fetch, env=environ, check=True, capture_output=True)
    return None


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start munge, the controller and two nodes; give the environment in which srun finds them.

    Raises:
        RuntimeError: the nodes are not idle within 20 s.
    """
    for name in ("state", "spool.n1", "spool.n2", "log"):
        (folder / name).mkdir(parents=True)
    ports = free_ports(3)
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True).stdout.strip()
    text = CONFIG.format(host=host, folder=folder, port=ports[0], port1=ports[1], port2=ports[2])
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = {
        # Node names resolve nowhere, so ranks would not find the first node by its name.
        **{"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"},
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
    }
    daemons: list[subprocess.Popen] = []
    try:
        start_daemons(folder, environ, daemons)
        yield environ
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the daemons end what is left
            subprocess.run(["scancel", "--user=root"], env=environ, capture_output=True, timeout=20)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(3)
            daemon.kill()
            daemon.wait()


def start_daemons(folder: Path, environ: dict[str, str], daemons: list[subprocess.Popen]) -> None:
    """Start all daemons in the foreground, as children that can be ended and waited for."""
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = [f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munge += [f"--pid-file={folder}/munged.pid"]
    munge += [f"--log-file={folder}/log/munged.log", f"--seed-file={folder}/munge.seed"]
    commands = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D", "-c"],
        ["slurmd", "-D", "-N", "n1"],
        ["slurmd", "-D", "-N", "n2"],
    ]
    for number, command in enumerate(commands):
        log = open(folder / "log" / f"{number}-{command[0]}.txt", "w")  # noqa: SIM115
        daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        log.close()
        if command[0] == "munged":
            wait_until(lambda: (folder / "munge.socket").exists(), "munged does not listen")
    wait_until(lambda: idle_nodes(environ) == 2, "the nodes do not come up", logs=folder / "log")


def idle_nodes(environ: dict[str, str]) -> int:
    asked = ["sinfo", "-h", "-N", "-o", "%T"]
    done = subprocess.run(asked, env=environ, capture_output=True, text=True, timeout=20)
    return done.stdout.split().count("idle")


def wait_until(is_so, message: str, timeout_s: float = 20, logs: Path | None = None) -> None:
    end = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end:
            told = [f"{p.name}: {p.read_text()[-500:]}" for p in logs.iterdir()] if logs else []
            raise RuntimeError("\n".join([message, *told]))
        time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
