"""Ranks started by hand and by torchrun on two nodes: one world, one run, that of one device."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TOY
from tests.distributed.launch import ended, free_port, started
from tests.toy import ledger_lines

pytestmark = pytest.mark.slow


def launch(name: str, port: int, rank: int) -> tuple[list[str], list[str], dict[str, str]]:
    """Return what stands before the command, its options, and the environment."""
    if name == "by hand":
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        return [], ["--config", "hardware/fsdp.yaml"], {**place, "MASTER_PORT": str(port)}
    nodes = ["--nnodes=2", f"--node_rank={rank}", "--nproc_per_node=1"]
    rendezvous = ["--master_addr=127.0.0.1", f"--master_port={port}"]
    overlay = ["--config", "hardware/multi_node.yaml", "--trainer.devices=1"]
    return ["-m", "torch.distributed.run", *nodes, *rendezvous], overlay, {}


def run_two(tmp_path: Path, name: str) -> dict[str, Any]:
    """Run two launches at the same time; return topology.json of the run that they make."""
    port, launched = free_port(), []
    for rank in (0, 1):
        before, options, environ = launch(name, port, rank)
        fit = ["-m", "lit_models", "fit", "--config", str(tmp_path / "toy.yaml"), *options]
        folder = f"--trainer.default_root_dir={tmp_path / 'run'}"
        launched.append(started(*before, *fit, folder, **environ))
    try:
        outputs = [process.communicate(timeout=100)[0] for process, _ in launched]
    finally:
        for process, mark in launched:
            ended(process, mark)
    assert [process.returncode for process, _ in launched] == [0, 0], "\n".join(outputs)
    return json.loads((tmp_path / "run" / "topology.json").read_text())


@pytest.mark.parametrize(
    ("name", "strategy", "num_nodes"), [("by hand", "fsdp", 1), ("torchrun", "ddp", 2)]
)
def test_a_launcher_makes_one_world_with_the_run_of_one_device(
    tmp_path: Path, unisono: Callable[..., tuple[int, str]], name, strategy, num_nodes
) -> None:
    (tmp_path / "toy.yaml").write_text(TOY)
    facts = run_two(tmp_path, name)
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == (strategy, 2, num_nodes)
    ranks = [place.split(":")[1:] for place in facts["host_rank_device"]]
    assert ranks == [["0", "cpu"], ["1", "cpu"]]
    one = (f"--trainer.default_root_dir={tmp_path / 'one'}", "--config", "hardware/cpu.yaml")
    status, output = unisono("fit", "--config", str(tmp_path / "toy.yaml"), *one)
    assert status == 0, output
    lines = zip(ledger_lines(tmp_path / "one"), ledger_lines(tmp_path / "run"), strict=True)
    for left, right in lines:
        assert left["digest"] == right["digest"]
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-5)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one", "run", "toy.yaml"]
