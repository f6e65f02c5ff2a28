"""srun and torchrun on two loopback nodes: the requested world, the run of one device, and the
doctor, which reports once, with one status and no false alarm."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import launch
from tests.toy import assert_same_samples, ledger_lines

pytestmark = pytest.mark.slow
FIT = ["fit", "--config", "occupation_coder/debug.yaml"]
FIT += ["--trainer.accelerator=cpu", "--trainer.precision=64"]
LAYOUTS = {"1 node x 2": (1, 2), "2 nodes x 1": (2, 1)}
DOCTOR = ["-m", "lit_models", "doctor"]
GROUP = ["--collectives"]


def srun(environ: dict[str, str], options: list[str], command: list[str]) -> subprocess.Popen:
    """Run a Python command under srun, in a job of its own."""
    launcher = ["srun", "-J", "train", *options, sys.executable, *command]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(launcher, cwd=launch.ROOT, env=environ, text=True, **out)


def fit(environ: dict[str, str], nodes: int, tasks: int, *options: str) -> tuple[int, str]:
    """Train under srun; return the status and the output."""
    launcher = ["-K", f"-N{nodes}", f"--ntasks-per-node={tasks}"]
    process = srun(environ, launcher, ["-m", "lit_models", *FIT, *options])
    printed, _ = process.communicate(timeout=launch.PATIENCE_S)
    return process.returncode, printed


@pytest.fixture(scope="module")
def one_device(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    options = ["--trainer.devices=1", f"--trainer.default_root_dir={folder}"]
    launch.in_world(1, launch.unisono_here, *FIT, *options)
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_srun_makes_the_world_that_was_asked_for(slurm, one_device, tmp_path, layout):
    nodes, tasks = LAYOUTS[layout]
    options = [f"--trainer.num_nodes={nodes}", f"--trainer.devices={tasks}"]
    folder = f"--trainer.default_root_dir={tmp_path / 'run'}"
    status, printed = fit(slurm, nodes, tasks, *options, "--trainer.strategy=ddp", folder)
    assert status == 0, printed
    facts = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == (
        *("ddp", nodes * tasks, nodes),
    )
    ranks = [place.split(":")[1:] for place in facts["host_rank_device"]]
    assert ranks == [[str(rank), "cpu"] for rank in range(nodes * tasks)]
    assert len(facts["memory"]) == nodes * tasks
    assert_same_samples(ledger_lines(one_device), ledger_lines(tmp_path / "run"), rel=1e-9)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_tasks_that_would_train_copies_are_refused(slurm, tmp_path):
    folder = f"--trainer.default_root_dir={tmp_path / 'run'}"
    status, printed = fit(slurm, 1, 2, "--trainer.devices=1", folder)
    flat = " ".join(printed.split())
    # srun passes on the highest status: 143 if SLURM kills a task before it has ended by itself
    assert status in (2, 143), printed
    assert "SLURM_NTASKS=2" in flat
    assert "Set --trainer.devices to the processes per node" in flat
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


def test_the_doctor_on_two_nodes_of_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    options = ["-N2", "--ntasks-per-node=1"]
    process = srun(slurm, options, [*DOCTOR, *GROUP, f"--folder={tmp_path}"])
    printed, _ = process.communicate(timeout=launch.PATIENCE_S)
    assert process.returncode == 0, printed
    # One of two ranks reported, and found the group sound.
    assert re.findall(r"^\d+ ok, \d+ warnings, (\d+) errors$", printed, re.M) == ["0"], printed
    found = {one["check"]: one["what"] for one in launch.findings(printed)}
    assert found["group"].startswith("2 ranks by gloo on ")
    assert "the known sum of 64 MiB" in found["all-reduce"]
    (launcher,) = (one for one in launch.findings(printed) if one["check"] == "launcher")
    assert launcher["what"].startswith("srun (SLURM_STEP_ID is set)")


def test_torchrun_in_every_task_is_an_error(slurm, tmp_path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    # Each task is a world of its own with its own report; labels tell their lines apart.
    tasks = ["-N2", "--ntasks-per-node=1", "--label"]
    process = srun(slurm, tasks, [*torchrun, *DOCTOR, f"--folder={tmp_path}"])
    printed, _ = process.communicate(timeout=launch.PATIENCE_S)
    assert process.returncode != 0, printed
    first = "\n".join(line[3:] for line in printed.splitlines() if line.startswith("0: "))
    errors = [one["what"] for one in launch.findings(first) if one["level"] == "error"]
    assert errors == ["srun started 2 tasks, and torchrun runs in them"]
