"""The doctor under srun and under torchrun, on two nodes: one voice, one status, no false alarm."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import ROOT, ended, free_port, started

pytestmark = pytest.mark.slow
DOCTOR = ["-m", "lit_models", "doctor", "--json"]
GROUP = ["--collectives", "--devices=1", "--num_nodes=2"]


def srun(environ: dict[str, str], options: list[str], command: list[str]) -> subprocess.Popen:
    """Start a command of Python under srun."""
    launcher = ["srun", "-J", "train", *options, sys.executable, *command]
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(launcher, cwd=ROOT, env=environ, text=True, **out)


def reports(printed: str) -> list[dict[str, Any]]:
    """Return each report in an output; other lines may stand between them."""
    decoder, found = json.JSONDecoder(), []
    while "{" in printed:
        printed = printed[printed.index("{") :]
        report, end = decoder.raw_decode(printed)
        found.append(report)
        printed = printed[end:]
    return found


def findings(report: dict[str, Any]) -> dict[str, str]:
    return {finding["check"]: finding["what"] for finding in report["findings"]}


def check_group(printed: str) -> None:
    """Of two ranks one spoke, and found the group sound."""
    (report,) = reports(printed)
    assert report["worst"] != "error", printed
    found = findings(report)
    assert found["group"].startswith("2 ranks by gloo on ")
    assert "the known sum of 64 MiB" in found["all-reduce"]


def test_two_nodes_of_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    options = ["-N2", "--ntasks-per-node=1"]
    process = srun(slurm, options, [*DOCTOR, *GROUP, f"--folder={tmp_path}"])
    printed, _ = process.communicate(timeout=150)
    assert process.returncode == 0, printed
    check_group(printed)
    assert findings(reports(printed)[0])["launcher"].startswith("srun (SLURM_STEP_ID is set)")


def test_one_task_for_two_devices_and_torchrun_in_every_task(slurm, tmp_path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    folder = f"--folder={tmp_path}"
    both = [
        srun(slurm, ["-n1"], [*DOCTOR, "--devices=2", folder]),
        # Each task is a world of its own with a report: labels tell their lines apart.
        srun(slurm, ["-N2", "--ntasks-per-node=1", "--label"], [*torchrun, *DOCTOR, folder]),
    ]
    (one, _), (two, _) = [process.communicate(timeout=150) for process in both]
    assert [process.returncode != 0 for process in both] == [True, True], one + two
    assert "SLURM has one task" in findings(reports(one)[0])["world"]
    first = "\n".join(line[3:] for line in two.splitlines() if line.startswith("0: "))
    found = reports(first)[0]["findings"]
    errors = [f["what"] for f in found if f["level"] == "error"]
    assert errors == ["srun started 2 tasks, and torchrun runs in them"]


def test_two_nodes_of_torchrun(tmp_path: Path) -> None:
    place, launched = ["--master_addr=127.0.0.1", f"--master_port={free_port()}"], []
    for rank in (0, 1):
        nodes = ["--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1", *place]
        command = [*nodes, *DOCTOR, *GROUP, f"--folder={tmp_path}"]
        launched.append(started("-m", "torch.distributed.run", *command))
    try:
        outputs = [process.communicate(timeout=150)[0] for process, _ in launched]
    finally:
        for process, mark in launched:
            ended(process, mark)
    assert [process.returncode for process, _ in launched] == [0, 0], "\n".join(outputs)
    check_group(outputs[0])
    assert reports(outputs[1]) == []
