"""Faults planted one by one: the doctor names each, and says what to do."""

import json
import os
import socket
from importlib.metadata import version
from pathlib import Path

import pytest

from lit_models.doctoring import environment, gpus, launchers, machine, meeting
from lit_models.doctoring.findings import worst
from lit_models.doctoring.gpus import Gpu
from tests.distributed.launch import ended, free_port, run, started

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}


def errors(findings):
    return {f.check: f"{f.what} {f.means} {f.todo}" for f in findings if f.level == "error"}


def test_a_clean_machine_has_no_error(tmp_path):
    found = [*environment.check(), *machine.check(tmp_path), *gpus.check(), *launchers.check({})]
    assert errors(found) == {}
    assert worst(found) in ("ok", "warning")


def test_a_malicious_version_is_named():
    found = errors(environment.check(lambda n: "2.6.3" if n == "lightning" else version(n)))
    assert "2.6.3" in found["packages"]
    assert "secret" in found["packages"]


def test_one_task_with_two_devices_is_an_error():
    found = errors(launchers.check({**SRUN, "SLURM_NTASKS": "1"}, devices=2))
    assert "--ntasks-per-node" in found["world"]
    assert "train alone" in found["world"]


def test_more_tasks_than_devices_is_an_error():
    assert "copy of its own" in errors(launchers.check(SRUN, devices=1))["world"]


def test_two_launchers_at_once_are_an_error():
    assert "torchrun wins" in errors(launchers.check({**SRUN, **TORCHRUN}))["launcher"]


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_job_name_that_hides_slurm_is_an_error(name):
    found = errors(launchers.check({**SRUN, "SLURM_JOB_NAME": name}))
    assert "srun -J train" in found["launcher"]


def test_a_taken_port_is_an_error():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        found = errors(launchers.check({**TORCHRUN, "MASTER_PORT": str(port)}))
    assert str(port) in found["port"]
    assert "another MASTER_PORT" in found["port"]
    freed = launchers.check({**TORCHRUN, "MASTER_PORT": str(port)})
    assert "port" not in errors(freed)


def test_a_stale_host_name_is_an_error():
    found = errors(launchers.check({**TORCHRUN, "MASTER_ADDR": "gone.invalid"}))
    assert "gone.invalid" in found["rank 0"]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "runs", Path("/proc/runs")):
        assert "run folder" in errors(machine.check(folder))


def test_unequal_gpus_are_a_warning():
    found = gpus.check([Gpu("A", 80 << 30, 0, "9.0"), Gpu("B", 40 << 30, 30 << 30, "8.0")])
    assert [f.level for f in found] == ["warning", "warning"]
    assert "1 x A (80 GiB), 1 x B (40 GiB)" in found[0].what
    assert "GPU 1: 30.0 of 40.0 GiB" in found[1].what


def test_a_disk_whose_clock_is_off_is_an_error(tmp_path, monkeypatch):
    now = machine.time.time
    monkeypatch.setattr(machine.time, "time", lambda: now() + 3600)
    assert "3600" in errors(machine.check(tmp_path))["clock"]


def test_collectives_of_two_processes_give_the_known_answers(tmp_path):
    command = ["-m", "lit_models", "doctor", "--collectives", "--devices=2", "--json"]
    done = run(*command, f"--folder={tmp_path}")
    assert done.returncode == 0, done.stdout
    report = json.loads(done.stdout)
    found = {f["check"]: f for f in report["findings"]}
    assert report["worst"] != "error"
    assert "known results" in found["answers"]["what"]
    assert "64 MiB" in found["all-reduce"]["what"]
    assert found["group"]["what"].startswith("2 ranks by gloo")


def test_a_rank_that_does_not_find_rank_0_says_so_itself(tmp_path):
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    command = ["-m", "lit_models", "doctor", "--collectives", "--timeout_s=1", "--json"]
    done = run(*command, f"--folder={tmp_path}", **environ, MASTER_PORT=str(free_port()))
    assert done.returncode == 1, done.stdout
    found = {f["check"]: f for f in json.loads(done.stdout[done.stdout.index("{") :])["findings"]}
    assert "rank 1 on" in found["group"]["what"]
    assert "did not reach rank 0 at 127.0.0.1" in found["group"]["what"]
    assert "firewall" in found["group"]["todo"]


def test_a_rank_0_that_cannot_listen_says_so_instead_of_a_traceback():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        found = meeting.meet(place, timeout_s=1)
    assert (found.level, f"cannot listen at 127.0.0.1:{port}" in found.what) == ("error", True)


@pytest.mark.slow
def test_a_missing_rank_is_named_once_and_all_end_with_an_error(tmp_path):
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = ["-m", "lit_models", "doctor", "--collectives", "--timeout_s=8", "--json"]
    command.append(f"--folder={tmp_path}")
    ranks = [started(*command, **place, RANK=rank) for rank in ("0", "1")]
    try:
        printed = [process.communicate(timeout=150)[0] for process, _ in ranks]
    finally:
        for process, mark in ranks:
            ended(process, mark)
    assert [process.returncode for process, _ in ranks] == [1, 1], "\n".join(printed)
    found = {f["check"]: f["what"] for f in json.loads(printed[0])["findings"]}
    assert "rank 2 of 3 did not come within 8 s" in found["group"]
    assert printed[1] == ""


def test_the_environment_is_left_as_it_was(tmp_path):
    before = dict(os.environ)
    machine.check(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert dict(os.environ) == before
