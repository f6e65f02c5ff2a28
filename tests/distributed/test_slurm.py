"""srun on a SLURM of two loopback nodes: the world that was asked for, and one device's run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, run
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow
FIT = ["-m", "lit_models", "fit", "--config", "occupation_coder/debug.yaml"]
FIT += ["--trainer.accelerator=cpu", "--trainer.precision=64"]
LAYOUTS = {"1 node x 2": (1, 2), "2 nodes x 1": (2, 1)}


@pytest.fixture(scope="module")
def one_device(slurm: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one") / "run"
    done = run(*FIT, "--trainer.devices=1", f"--trainer.default_root_dir={folder}")
    assert done.returncode == 0, done.stdout
    return folder


def srun(
    environ: dict[str, str], nodes: int, tasks: int, *options: str
) -> subprocess.CompletedProcess:
    """Run the debug config under srun, in a job of its own."""
    launcher = ["srun", "-J", "unisono", "-K", f"-N{nodes}", f"--ntasks-per-node={tasks}"]
    return subprocess.run(
        [*launcher, sys.executable, *FIT, *options],
        **{"cwd": ROOT, "env": environ, "text": True, "timeout": 120},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_srun_makes_the_world_that_was_asked_for(slurm, one_device, tmp_path, layout):
    nodes, tasks = LAYOUTS[layout]
    options = [f"--trainer.num_nodes={nodes}", f"--trainer.devices={tasks}"]
    folder = f"--trainer.default_root_dir={tmp_path / 'run'}"
    done = srun(slurm, nodes, tasks, *options, "--trainer.strategy=ddp", folder)
    assert done.returncode == 0, done.stdout
    facts = json.loads((tmp_path / "run" / "topology.json").read_text())
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == (
        *("ddp", nodes * tasks, nodes),
    )
    ranks = [place.split(":")[1:] for place in facts["host_rank_device"]]
    assert ranks == [[str(rank), "cpu"] for rank in range(nodes * tasks)]
    assert len(facts["memory"]) == nodes * tasks
    for left, right in zip(ledger_lines(one_device), ledger_lines(tmp_path / "run"), strict=True):
        assert left["digest"] == right["digest"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-9)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_tasks_that_would_train_copies_are_refused(slurm, tmp_path):
    done = srun(
        slurm, 1, 2, "--trainer.devices=1", f"--trainer.default_root_dir={tmp_path / 'run'}"
    )
    flat = " ".join(done.stdout.split())
    # srun passes on the highest status: 143 where SLURM ends a task before it has ended by itself
    assert done.returncode in (2, 143), done.stdout
    assert "SLURM_NTASKS=2" in flat
    assert "Set --trainer.devices to the processes per node" in flat
    assert not (tmp_path / "run" / "ledger.jsonl").exists()
