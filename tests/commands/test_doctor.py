"""`unisono doctor`: each planted fault, and faults around one process, are named with a way out."""

import ctypes
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lit_models.commands import run_command
from lit_models.commands.doctor import (
    Diagnosis,
    check_gpus,
    check_launcher,
    check_machine,
    check_packages,
    worst,
)
from lit_models.errors import run_guarded
from tests.distributed.launch import findings, finished, free_port, in_world, started, unisono_here

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


def errors(findings):
    """Return check -> what and todo of each error among the findings, or of their printed lines."""
    plain = [f if isinstance(f, dict) else vars(f) for f in findings]
    return {f["check"]: f"{f['what']} {f['todo']}" for f in plain if f["level"] == "error"}


def test_a_clean_machine_has_no_error_and_is_left_as_it_was(tmp_path):
    for _ in range(2):  # the first import sets environment variables of torch
        before = dict(os.environ)
        checks = [*check_packages(), *check_machine(tmp_path), *check_gpus(), *check_launcher({})]
    assert errors(checks) == {}
    assert worst(checks) in ("ok", "warning")
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({**SRUN, **TORCHRUN}, "start torchrun once per machine"),
        ({**SRUN, "SLURM_JOB_NAME": "bash"}, "srun -J train"),
        ({**SRUN, "SLURM_JOB_NAME": "interactive"}, "srun -J train"),
        ({**TORCHRUN, "MASTER_ADDR": "gone.invalid"}, "gone.invalid"),
    ],
)
def test_launchers_that_contradict_each_other_are_errors(environ, says):
    assert says in errors(check_launcher(environ))["launcher"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "runs", Path("/proc/runs")):
        assert "run folder" in errors(check_machine(folder))


def test_unequal_and_busy_gpus_are_a_warning(monkeypatch):
    memory = [(80 << 30, 80 << 30), (10 << 30, 40 << 30)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", "AB".__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory.__getitem__)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    checks = check_gpus()
    assert [f.level for f in checks] == ["warning", "warning"]
    assert "1 x A (80 GiB), 1 x B (40 GiB)" in checks[0].what
    assert "NCCL_P2P_DISABLE=1" in checks[0].what
    assert "GPU 1: 30.0 of 40.0 GiB" in checks[1].what


def test_it_counts_in_words_and_no_line_is_wider_than_the_screen(capsys, monkeypatch):
    many = Diagnosis("disk", "error", " ".join(["far too little"] * 9), " ".join(["go on"] * 30))
    monkeypatch.setattr("lit_models.commands.doctor.check_machine", lambda _: [many])
    assert run_command("doctor", []) == 1
    printed = capsys.readouterr().out
    assert printed.endswith(", 1 error\n")
    assert max(map(len, printed.splitlines())) <= 80
    assert vars(many) in findings(printed)


def doctor(environ, *options):
    """Run the doctor in this process, with a rank's environment."""
    os.environ.update(environ)
    return unisono_here("doctor", *options)


@pytest.mark.slow
def test_collectives_of_two_processes_give_the_known_answers(tmp_path):
    output = in_world(2, doctor, {}, "--collectives", f"--folder={tmp_path}")
    by_check = {f["check"]: f for f in findings(output)}
    assert len(by_check) == len(findings(output))  # only one rank reports
    assert not errors(by_check.values())
    assert "the known sum of 64 MiB" in by_check["all-reduce"]["what"]
    assert by_check["group"]["what"].startswith("2 ranks by gloo")


def test_a_rank_0_that_cannot_listen_says_so_instead_of_a_traceback(capsys, monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in place.items():
            monkeypatch.setenv(name, value)
        options = ["--collectives=true", "--timeout_s=1"]
        assert run_guarded(lambda: run_command("doctor", options)) == 1
        monkeypatch.delenv("MASTER_PORT")
        assert run_guarded(lambda: run_command("doctor", options)) == 2
    (group,) = (f["what"] for f in findings(capsys.readouterr().out) if f["check"] == "group")
    assert f"found no group at 127.0.0.1:{port} (The server socket has failed to listen" in group


@pytest.mark.slow
def test_a_missing_rank_is_an_error_of_all_others(tmp_path):
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["-m", "lit_models", "doctor", "--collectives", "--timeout_s=4"]
    command.append(f"--folder={tmp_path}")
    statuses, printed = finished(*[started(*command, **place, RANK=rank) for rank in ("0", "1")])
    assert statuses == [1, 1], "\n".join(printed)
    reasons = ("2/3 clients joined", "wait timeout after 4000ms")
    for rank, (text, reason) in enumerate(zip(printed, reasons, strict=True)):
        by_check = {f["check"]: f["what"] for f in findings(text)}
        assert f"rank {rank} of 3 on" in by_check["group"]
        assert reason in by_check["group"]
        assert "firewall" in text


NEW_MOUNTS = 0x20000  # CLONE_NEWNS of unshare(2)
# In a mount namespace of its own, so that the machine keeps its /dev/shm.
MOUNTS = """
mount --make-rprivate /
mount --bind {folder} /mnt
mount -t tmpfs -o size=65m tmpfs /dev/shm
head -c 64M /dev/zero > /dev/shm/full
mount -t tmpfs -o ro tmpfs /mnt/runs
"""


def doctor_of_a_faulty_machine(folder):
    assert ctypes.CDLL(None).unshare(NEW_MOUNTS) == 0
    mounts = MOUNTS.format(folder=shlex.quote(str(folder)))  # the folder may be in /dev/shm
    subprocess.run(["sh", "-ec", mounts], check=True)
    sys.path.insert(0, "/mnt/site")
    return doctor({}, "--folder=/mnt/runs")


def test_each_fault_around_a_doctor_is_named_with_its_fix(tmp_path):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    (tmp_path / "runs").mkdir()
    metadata = tmp_path / "site" / "lightning-2.6.3.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning\nVersion: 2.6.3\n")
    seen = findings(in_world(1, doctor_of_a_faulty_machine, tmp_path, status=1, method="fork"))
    (shared,) = (f for f in seen if f["check"] == "shared memory")
    assert (shared["level"], "--shm-size" in shared["todo"]) == ("warning", True)
    faults = errors(seen)
    for check, what, todo in (
        ("run folder", "cannot be written (Read-only file system)", "--trainer.default_root_dir"),
        ("packages", "lightning 2.6.3 is outside of", "unisono was never run with it"),
    ):
        assert what in faults[check]
        assert todo in faults[check]
    assert len(faults) == 2
