"""The README's way from laptop to cluster, line by line, on SLURM with two loopback nodes."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lit_models.commands.verify import Status
from tests.distributed.launch import ROOT
from tests.distributed.slurm import Environ, facts_of, wait_for_end

README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.split("## From laptop to cluster\n")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def shell(slurm: Environ, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Environ]:
    """A working folder, and an environment that has `unisono` and SLURM."""
    folder = tmp_path_factory.mktemp("user")
    command = folder / "bin" / "unisono"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m lit_models "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return folder, {**slurm, **path}


def lines_of(block: str, shell: tuple[Path, Environ]) -> dict[str, str]:
    """Return line -> its output; shell variables keep their values from line to line."""
    folder, environ = shell
    printed = {}
    so_far = []
    for line in block.strip().splitlines():
        if line.startswith("export "):
            so_far.append(line)
            continue
        done = subprocess.run(
            ["bash", "-c", "\n".join([*so_far, line])],
            **{"cwd": folder, "env": environ, "text": True, "timeout": 150},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        # The run of debug.yaml ends in the middle of its first epoch.
        expected = Status.CUT if line.startswith("unisono verify") else 0
        assert done.returncode == expected, f"{line}\n{done.stdout}"
        printed[line] = done.stdout
    return printed


@pytest.mark.slow
def test_each_line_does_what_the_readme_says(shell: tuple[Path, Environ]) -> None:
    before, after = re.findall(r"```bash\n(.*?)```", SECTION, re.S)
    printed = lines_of(before, shell)
    submitted = next(text for text in printed.values() if "submitted  job" in text)
    (job,) = re.findall(r"^submitted  job (\d+)", submitted, flags=re.MULTILINE)
    wait_for_end(job, shell[1])
    assert facts_of(job, shell[1])["JobState"] == "COMPLETED"
    printed = lines_of(after, shell)
    assert any("samples, each once" in text for text in printed.values())
    run = shell[0] / "runs" / f"occupation_coder-debug_{job}"
    assert "uPlot" in (run / "report.html").read_text(encoding="utf-8")
