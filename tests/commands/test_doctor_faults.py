"""Faults planted in the system itself, around one process: the doctor names each, with its fix."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import LAUNCHERS, ROOT

# Mounted in a namespace of their own: the machine keeps its /dev/shm and its /etc/hosts.
SCRIPT = """
set -e
mount -t tmpfs -o size=65m tmpfs /dev/shm
head -c 64M /dev/zero > /dev/shm/full
mount -t tmpfs -o ro tmpfs {runs}
mount --bind {hosts} /etc/hosts
exec {python} -m lit_models doctor --json --devices=2 --folder={runs}
"""
STALE = "192.0.2.7"  # of the block that is kept for documentation: no machine has it


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Return check -> finding of a doctor with seven faults around it."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    folder = tmp_path_factory.mktemp("faults")
    (folder / "runs").mkdir()
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{STALE} {socket.gethostname()}\n")
    metadata = folder / "site" / "lightning-2.6.3.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.6.3\n")
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        report = _report(folder, str(other.getsockname()[1]))
    faults = [finding for finding in report["findings"] if finding["level"] == "error"]
    return {finding["check"]: finding for finding in faults}


def _report(folder: Path, taken_port: str) -> dict:
    inherited = {k: v for k, v in os.environ.items() if k not in LAUNCHERS}
    environ = {
        **inherited,
        "PYTHONPATH": f"{folder / 'site'}:{ROOT}",
        "PYTHONWARNINGS": "ignore",
        "MASTER_ADDR": "node7.invalid",
        "MASTER_PORT": taken_port,
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "1",
    }
    places = {"runs": folder / "runs", "hosts": folder / "hosts", "python": sys.executable}
    script = SCRIPT.format(**{name: shlex.quote(str(path)) for name, path in places.items()})
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script],
        **{"cwd": ROOT, "env": environ, "text": True, "timeout": 150},
        capture_output=True,
    )
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("check", "what", "todo"),
    [
        ("shared memory", "MiB free in /dev/shm", "--shm-size"),
        ("run folder", "cannot be written (Read-only file system)", "mounted read-only"),
        ("packages", "lightning 2.6.3 is installed", "change every secret"),
        ("host name", f"resolves to {STALE}, which is no address", "/etc/hosts"),
        ("rank 0", "MASTER_ADDR=node7.invalid resolves to nothing", "scontrol show hostnames"),
        ("port", "cannot be listened on (Address already in use)", "another MASTER_PORT"),
        ("world", "SLURM has one task", "--ntasks-per-node"),
    ],
)
def test_each_fault_is_named_with_its_fix(found, check, what, todo):
    assert what in found[check]["what"]
    assert found[check]["means"]
    assert todo in found[check]["todo"]


def test_nothing_else_is_called_an_error(found):
    assert len(found) == 7
