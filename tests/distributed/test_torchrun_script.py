"""torchrun.sh of `unisono submit`: the same command on each machine makes one run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, ended, free_port, started

pytestmark = pytest.mark.slow
BASH = "import os, sys; os.chdir(sys.argv[1]); os.execvp('bash', ['bash', *sys.argv[2:]])"


def test_two_machines_make_one_run(
    toy_config: Path, unisono: Callable[..., tuple[int, str]]
) -> None:
    status, output = unisono("submit", "--config", "toy.yaml", "--nodes=2", "--dry-run")
    assert status == 0, output
    script = ["jobs/toy/torchrun.sh", "127.0.0.1", str(free_port())]
    place = {"PYTHONPATH": str(ROOT)}
    launched = [started("-c", BASH, str(toy_config.parent), *script, **place) for _ in range(2)]
    try:
        outputs = [process.communicate(timeout=100)[0] for process, _ in launched]
    finally:
        for process, mark in launched:
            ended(process, mark)
    assert [process.returncode for process, _ in launched] == [0, 0], "\n".join(outputs)
    run = Path("runs/toy_torchrun")
    facts = json.loads((run / "topology.json").read_text())
    assert (facts["world_size"], facts["num_nodes"], facts["strategy"]) == (2, 2, "ddp")
    assert [path.name for path in Path("runs").iterdir()] == [run.name]
