"""Any launcher of ranks: one run folder, one checkpoint, and the same run as on one device."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TOY
from tests.distributed.launch import finished, free_port, run_clean, started
from tests.toy import assert_same_samples, ledger_lines

Unisono = Callable[..., tuple[int, str]]
QUIET = ("--data.micro_batch_size=2", "--trainer.logger=false")
EXACT = ("--trainer.precision=64-true", *QUIET)


def command(folder: Path, *options: str) -> list[str]:
    (folder / "toy.yaml").write_text(TOY)
    run = f"--trainer.default_root_dir={folder / 'toy'}"
    return ["fit", "--config", str(folder / "toy.yaml"), run, *options]


def topology(folder: Path) -> dict:
    return json.loads((folder / "topology.json").read_text())


def ranks_of(folder: Path) -> list[list[str]]:
    return [place.split(":")[1:] for place in topology(folder)["host_rank_device"]]


@pytest.mark.slow
def test_ddp_children_resume_in_the_folder_that_their_launcher_chose(tmp_path, unisono):
    for _ in range(2):
        assert unisono(*command(tmp_path))[0] == 0
    two = ("--trainer.devices=2", "--trainer.strategy=ddp", "--data.num_workers=1")
    resume = ("--ckpt_path=auto", "--trainer.max_epochs=2")
    done = run_clean("-m", "lit_models", *command(tmp_path, *two, *resume))
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("--ckpt_path auto resumes from") == 1
    facts = topology(tmp_path / "toy-2")
    assert (facts["strategy"], facts["backend"], facts["world_size"]) == ("ddp", "gloo", 2)
    assert ranks_of(tmp_path / "toy-2") == [["0", "cpu"], ["1", "cpu"]]
    assert facts["plan"]["micro_batch_size"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["toy", "toy-2", "toy.yaml"]


def test_a_launcher_with_another_world_is_refused(toy_config, done, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    output = done("fit", "--config", "toy.yaml", status=2)
    assert "each would train a copy" in " ".join(output.split())


def by_hand(folder: Path, port: int, rank: int) -> tuple[list[str], dict[str, str]]:
    """Return a command and its environment."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    fsdp = ("--config", "hardware/fsdp.yaml", *QUIET)  # whose class rejects float64
    return ["-m", "lit_models", *command(folder, *fsdp)], {**place, "MASTER_PORT": str(port)}


def by_torchrun(folder: Path, port: int, rank: int) -> tuple[list[str], dict[str, str]]:
    place = ("--nnodes=2", f"--node_rank={rank}", f"--master_port={port}")
    torchrun = ("-m", "torch.distributed.run", *place, "--master_addr=127.0.0.1")
    return [*torchrun, "-m", "lit_models", *command(folder, "--trainer.strategy=ddp", *EXACT)], {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "expected", "rel"),
    [(by_hand, ("fsdp", 2, 1), 1e-5), (by_torchrun, ("ddp", 2, 2), 1e-10)],
)
def test_a_launcher_makes_one_world_in_one_folder_whose_steps_one_device_replays(
    toy_config: Path, done: Callable, launch: Callable, expected: tuple, rel: float
) -> None:
    Path("toy").mkdir()
    Path("toy/ledger.jsonl").touch()  # another run's
    port, made = free_port(), Path("toy-2")
    commands = [launch(Path.cwd(), port, rank) for rank in (0, 1)]
    launched = [started(*arguments, **environ) for arguments, environ in commands]
    statuses, outputs = finished(*launched)
    assert statuses == [0, 0], "\n".join(outputs)
    facts = topology(made)
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == expected
    assert ranks_of(made) == [["0", "cpu"], ["1", "cpu"]]
    assert not Path("toy-3").exists()
    one = ("--trainer.default_root_dir=one", "--config", "hardware/cpu.yaml", *EXACT)
    done("fit", "--config", "toy.yaml", *one)
    assert_same_samples(ledger_lines(Path("one")), ledger_lines(made), rel=rel)
    step = ("--step=6", "--advance=true", "--json=step.json", "--trust_checkpoint")
    done("replay", str(made), *step)
    line, found = ledger_lines(made)[5], json.loads(Path("step.json").read_text())
    for name in ("loss", "grad_norm"):
        assert found[name] == pytest.approx(line[name], rel=rel)
