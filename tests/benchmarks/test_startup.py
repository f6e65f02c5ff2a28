"""Start-up time of a command, beside `import lightning` on the same machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.figures import Aim, Figures
from tests.distributed.launch import ROOT

ROUNDS = 3
PEER = "import lightning"
AIMS = {"unisono --help": Aim(0.5), "to step 1": Aim(1.3)}
FAMILIES = ("causal_lm/debug", "occupation_coder/debug")
# A run ends as soon as its first step begins.
FIRST_STEP = """
import os, sys
from lit_models.__main__ import run
import lightning.pytorch as pl
def stop(*_): os._exit(0)
pl.Callback.on_train_batch_start = stop
sys.exit(run(sys.argv[1:]))
"""


def seconds(command: list[str], cache: Path) -> tuple[float, float]:
    """Return the wall-clock and the CPU time of one process and what it starts."""
    environ = {**os.environ, "UNISONO_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    words, before, start = [sys.executable, *command], os.times(), time.perf_counter()
    subprocess.run(words, cwd=ROOT, env=environ, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, os.times()
    user = after.children_user - before.children_user
    return wall, user + after.children_system - before.children_system


@pytest.mark.benchmark
def test_starting_beside_importing_lightning(tmp_path: Path, figures: Figures) -> None:
    commands = {PEER: ["-c", PEER], "unisono --help": ["-m", "lit_models", "--help"]}
    for name in FAMILIES:
        options = [f"--config=configs/{name}.yaml", f"--trainer.default_root_dir={tmp_path}"]
        commands[f"to step 1: {name}"] = ["-c", FIRST_STEP, "fit", *options]
    for command in commands.values():  # compiles bytecode, and makes the demo data
        seconds(command, tmp_path / "cache")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
    for _ in range(ROUNDS):
        for name, command in commands.items():
            taken[name].append(seconds(command, tmp_path / "cache"))
    for name in commands:
        if name == PEER:
            continue
        wall, cpu = ([[both[i] for both in taken[n]] for n in (name, PEER)] for i in (0, 1))
        aim = AIMS.get(name.partition(":")[0])
        figures.add("start-up", f"{name}, processor time", "s", cpu[0], PEER, cpu[1], aim)
        figures.add("start-up", f"{name}, wall clock", "s", wall[0], PEER, wall[1], aim)
