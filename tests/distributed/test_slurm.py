"""srun on two loopback nodes: the requested world, the run of one device, and the doctor, which
reports once, with one status and no false alarm."""

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


def srun(
    environ: dict[str, str], nodes: int, tasks: int, *command: str, fails: bool = False
) -> str:
    """Run a module of Python under srun, in a job of its own; return the output. If it must fail,
    only task 0's."""
    launcher = ["srun", "-J", "train", f"-N{nodes}", f"--ntasks-per-node={tasks}"]
    launcher.append("--label" if fails else "-K")
    done = subprocess.run(
        [*launcher, sys.executable, "-m", *command],
        **{"cwd": launch.ROOT, "env": environ, "text": True, "timeout": launch.PATIENCE_S},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert bool(done.returncode) == fails, done.stdout
    if not fails:
        return done.stdout
    return "\n".join(line[3:] for line in done.stdout.splitlines() if line.startswith("0: "))


@pytest.fixture(scope="module")
def one_device(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    options = ["--trainer.devices=1", f"--trainer.default_root_dir={folder}"]
    launch.in_world(1, launch.unisono_here, *FIT, *options)
    return folder


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 2), (2, 1)])
def test_srun_makes_the_requested_world(slurm, one_device, tmp_path, nodes, tasks):
    options = [f"--trainer.num_nodes={nodes}", f"--trainer.devices={tasks}"]
    options += ["--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    srun(slurm, nodes, tasks, "lit_models", *FIT, *options)
    facts = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == ("ddp", 2, nodes)
    ranks = [place.split(":")[1:] for place in facts["host_rank_device"]]
    assert ranks == [["0", "cpu"], ["1", "cpu"]]
    assert len(facts["memory"]) == 2
    assert_same_samples(ledger_lines(one_device), ledger_lines(tmp_path / "run"), rel=1e-9)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_the_doctor_on_two_nodes_of_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    printed = srun(slurm, 2, 1, "lit_models", "doctor", "--collectives", f"--folder={tmp_path}")
    # One of two ranks reported, and found the group sound.
    assert re.findall(r"^\d+ ok, \d+ warnings, (\d+) errors$", printed, re.M) == ["0"], printed
    whats = {one["check"]: one["what"] for one in launch.findings(printed)}
    assert whats["group"].startswith("2 ranks by gloo on ")
    assert "the known sum of 64 MiB" in whats["all-reduce"]
    assert whats["launcher"].startswith("srun (SLURM_STEP_ID is set)")


def test_torchrun_in_every_task_is_an_error(slurm, tmp_path) -> None:
    # Each task is a world of its own with its own report.
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    doctor = ["-m", "lit_models", "doctor", f"--folder={tmp_path}"]
    printed = srun(slurm, 2, 1, *torchrun, *doctor, fails=True)
    errors = [one["what"] for one in launch.findings(printed) if one["level"] == "error"]
    assert errors == ["srun started 2 tasks, and torchrun runs in them"]
