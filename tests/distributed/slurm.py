"""A small SLURM on this machine, and jobs of `unisono submit` on it.

It has two nodes that listen on loopback, since Debian's slurmd can run several times on one host.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.conftest import TOY
from tests.distributed.launch import ROOT, free_port, in_world, unisono_here

PACKAGES = ("slurm-wlm", "munge")
DAEMONS = ("slurmctld", "slurmd", "munged")
CONFIG = """
ClusterName=loopback
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={first_job}
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
SLOW = """
  log_every_n_steps: 1
  callbacks:
  - class_path: tests.distributed.breaks.Slow
    init_args: {seconds: SECONDS}
"""
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "SIGNALING", "COMPLETING")
Environ = dict[str, str]


def install() -> str | None:
    """Install SLURM if it is missing; return why that is impossible, else `None`."""
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
def cluster(folder: Path) -> Iterator[Environ]:
    """Start munge, the controller and two nodes; yield the environment in which srun finds them.

    Raises:
        AssertionError: the nodes are not idle within 20 s.
    """
    for name in ("state", "spool.n1", "spool.n2", "log"):
        (folder / name).mkdir(parents=True)
    host = subprocess.run(["hostname", "-s"], capture_output=True, text=True).stdout.strip()
    places = {name: free_port() for name in ("port", "port1", "port2")}
    # Lightning derives its port from the job number, so two clusters must not number alike.
    first_job = 1 + 100 * (os.getpid() % 90)
    text = CONFIG.format(host=host, folder=folder, first_job=first_job, **places)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    environ = {
        # Node names do not resolve: ranks would not find the first node by its name.
        **{"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"},
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
    }
    daemons: list[subprocess.Popen] = []
    try:
        start_daemons(folder, environ, daemons)
        yield environ
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # the daemons end the rest
            subprocess.run(["scancel", "--user=root"], env=environ, capture_output=True, timeout=20)
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in reversed(daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(3)
            daemon.kill()
            daemon.wait()


def start_daemons(folder: Path, environ: Environ, daemons: list[subprocess.Popen]) -> None:
    """Start all daemons in the foreground, as children that can be stopped and waited for."""
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
            wait_for(lambda: (folder / "munge.socket").exists(), "munged does not listen", 20)

    def endings() -> str:
        ends = [f"{p.name}: {p.read_text()[-500:]}" for p in (folder / "log").iterdir()]
        return "\n".join(["the nodes do not come up", *ends])

    wait_for(lambda: idle_nodes(environ) == 2, endings, 20)


def idle_nodes(environ: Environ) -> int:
    command = ["sinfo", "-h", "-N", "-o", "%T"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20)
    return done.stdout.split().count("idle")


def write_config(folder: Path, step_s: float, extra: str = "") -> None:
    """Write the config of a toy run with slow steps."""
    (folder / "toy.yaml").write_text(TOY + SLOW.replace("SECONDS", str(step_s)) + extra)


def submitted(folder: Path, environ: Environ, *options: str) -> list[str]:
    """Call `unisono submit` in a folder; return the job numbers."""
    printed = in_world(1, submit, folder, environ, *options)
    return re.findall(r"^submitted  job (\d+)", printed, flags=re.MULTILINE)


def submit(folder: Path, environ: Environ, *options: str) -> int:
    os.chdir(folder)
    os.environ.update(environ, PYTHONPATH=str(ROOT))
    return unisono_here("submit", *options)


def facts_of(job: str, environ: Environ) -> Environ:
    """Return scontrol's facts of a job, such as JobState and ExitCode."""
    shown = slurm_says(environ, "scontrol", "show", "job", "-o", job)
    return dict(word.split("=", 1) for word in shown.split() if "=" in word)


def slurm_says(environ: Environ, *command: str) -> str:
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def wait_for(
    is_there: Callable[[], bool], what: Callable[[], str] | str, timeout_s: float = 150
) -> None:
    """Wait for a condition; `what` names it in the error."""
    end = time.monotonic() + timeout_s
    while not is_there():
        assert time.monotonic() < end, what if isinstance(what, str) else what()
        time.sleep(0.2)


def wait_for_end(
    job: str, environ: Environ, timeout_s: float = 150, folder: Path | None = None
) -> Environ:
    """Wait until a job has ended; return its facts. A requeued job starts soon.

    Args:
        job: its number.
        environ: of the cluster.
        timeout_s: how long to wait.
        folder: of its logs; once the run has stopped and saved, the job gets more time, since on a
            busy machine Python's exit alone may use up the timeout.
    """
    end, restarts = time.monotonic() + timeout_s, "0"
    while True:
        facts = facts_of(job, environ)
        if facts["JobState"] == "PENDING" and facts["Restarts"] != restarts:
            restarts = facts["Restarts"]
            time.sleep(3)  # else SLURM may show both runs of a job that restarts in the same second
            # SLURM would hold a requeued job back for two minutes.
            more_time = ["TimeLimit=30"] if folder and "with status 75" in logs(folder) else []
            slurm_says(environ, "scontrol", "update", f"JobId={job}", "StartTime=now", *more_time)
        elif facts["JobState"] not in UNFINISHED:
            return facts
        assert time.monotonic() < end, facts
        time.sleep(0.5)


def logs(folder: Path) -> str:
    """Return the text of the jobs' logs."""
    return "\n".join(p.read_text() for p in sorted((folder / "logs").glob("train_*")))
