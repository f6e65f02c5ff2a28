"""Ranks started by hand, and torchrun.sh of `unisono submit` on two machines: one world, one run,
that of one device."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import ROOT, ended, free_port, started
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow


BASH = "import os, sys; os.chdir(sys.argv[1]); os.execvp('bash', ['bash', *sys.argv[2:]])"


def launch(name: str, port: int, rank: int) -> tuple[list[str], dict[str, str]]:
    """Return a command and its environment."""
    if name == "torchrun.sh":
        script = [str(Path.cwd()), "jobs/toy/torchrun.sh", "127.0.0.1", str(port)]
        return ["-c", BASH, *script], {"PYTHONPATH": str(ROOT)}
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    fit = ["-m", "lit_models", "fit", "--config", str(Path("toy.yaml").absolute())]
    fit += [
        "--config",
        "hardware/fsdp.yaml",
        f"--trainer.default_root_dir={Path('run').absolute()}",
    ]
    return fit, {**place, "MASTER_PORT": str(port)}


@pytest.mark.parametrize(
    ("name", "run", "expected"),
    [("by hand", "run", ("fsdp", 2, 1)), ("torchrun.sh", "runs/toy_torchrun", ("ddp", 2, 2))],
)
def test_a_launcher_makes_one_world_with_the_run_of_one_device(
    toy_config: Path, unisono: Callable[..., tuple[int, str]], name, run, expected
) -> None:
    status, output = unisono("submit", "--config", "toy.yaml", "--nodes=2", "--dry-run")
    assert status == 0, output
    port = free_port()
    commands = [launch(name, port, rank) for rank in (0, 1)]
    launched = [started(*command, **environ) for command, environ in commands]
    try:
        outputs = [process.communicate(timeout=100)[0] for process, _ in launched]
    finally:
        for process, mark in launched:
            ended(process, mark)
    assert [process.returncode for process, _ in launched] == [0, 0], "\n".join(outputs)
    facts = json.loads(Path(run, "topology.json").read_text())
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == expected
    ranks = [place.split(":")[1:] for place in facts["host_rank_device"]]
    assert ranks == [["0", "cpu"], ["1", "cpu"]]
    assert not list(Path().glob(f"{run}-*"))
    one = ("--trainer.default_root_dir=one", "--config", "hardware/cpu.yaml")
    status, output = unisono("fit", "--config", "toy.yaml", *one)
    assert status == 0, output
    for left, right in zip(ledger_lines(Path("one")), ledger_lines(Path(run)), strict=True):
        assert left["digest"] == right["digest"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
