"""Whoever starts the ranks: one run folder, one checkpoint, one run, that of one device."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands.verify import Status, verify_run
from tests.conftest import TOY
from tests.distributed.launch import finished, free_port, run, run_clean, started
from tests.toy import assert_same_samples, ledger_lines

Unisono = Callable[..., tuple[int, str]]


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


@pytest.mark.slow
def test_two_commands_at_once_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    slow = ("--trainer.callbacks+=tests.distributed.breaks.Slow", "--trainer.callbacks.seconds=0.4")
    for epochs, resume in ((1, ()), (2, ("--ckpt_path=auto",))):
        arguments = command(tmp_path, f"--trainer.max_epochs={epochs}", *slow, *resume)
        statuses, outputs = finished(*(started("-m", "lit_models", *arguments) for _ in range(2)))
        # The second one of new runs that comes a moment later has a folder of its own.
        is_apart = not resume and (tmp_path / "toy-2").exists()
        assert sorted(statuses) == ([0, 0] if is_apart else [0, 1]), outputs
        assert is_apart or "is in use: process" in " ".join(" ".join(outputs).split())
        for folder in tmp_path.glob("toy*/"):
            assert verify_run(folder).status == Status.PROVEN
    # Whoever resumes takes the newest: that of the second command, if it was apart.
    newest = next(f for f in (tmp_path / "toy-2", tmp_path / "toy") if f.exists())
    lines = (newest / "ledger.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["attempt"] for row in rows if "resumed_from_step" in row] == [1, 2]


@pytest.mark.slow
def test_ranks_of_torchrun_agree_on_the_folder_and_one_device_replays_their_step(tmp_path, unisono):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "ledger.jsonl").write_text("")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    options = ("--trainer.devices=auto", "--trainer.strategy=ddp", "--trainer.logger=false")
    exact = ("--trainer.precision=64", "--data.micro_batch_size=2")
    done = run(*torchrun, "-m", "lit_models", *command(tmp_path, *options, *exact))
    assert done.returncode == 0, done.stdout
    made = tmp_path / "toy-2"
    assert topology(made)["world_size"] == 2
    assert not (tmp_path / "toy-3").exists()
    step = ("--step=6", "--advance=true", f"--json={tmp_path / 'step.json'}")
    status, output = unisono("replay", str(made), *step, "--trust_checkpoint")
    assert status == 0, output
    line, found = ledger_lines(made)[5], json.loads((tmp_path / "step.json").read_text())
    assert found["loss"] == pytest.approx(line["loss"], rel=1e-10)
    assert found["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-10)


def test_a_launcher_with_another_world_is_refused(toy_config, unisono, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, output = unisono("fit", "--config", "toy.yaml")
    assert status == 2
    assert "each would train a copy" in " ".join(output.split())


def by_hand(folder: Path, port: int, rank: int) -> tuple[list[str], dict[str, str]]:
    """Return a command and its environment."""
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    fsdp = ("--config", "hardware/fsdp.yaml")
    return ["-m", "lit_models", *command(folder, *fsdp)], {**place, "MASTER_PORT": str(port)}


def by_torchrun(folder: Path, port: int, rank: int) -> tuple[list[str], dict[str, str]]:
    place = ("--nnodes=2", f"--node_rank={rank}", f"--master_port={port}")
    torchrun = ("-m", "torch.distributed.run", *place, "--master_addr=127.0.0.1")
    return [*torchrun, "-m", "lit_models", *command(folder, "--trainer.strategy=ddp")], {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launch", "expected"), [(by_hand, ("fsdp", 2, 1)), (by_torchrun, ("ddp", 2, 2))]
)
def test_a_launcher_makes_one_world_with_the_run_of_one_device(
    toy_config: Path, unisono: Unisono, launch: Callable, expected: tuple
) -> None:
    port = free_port()
    commands = [launch(Path.cwd(), port, rank) for rank in (0, 1)]
    launched = [started(*arguments, **environ) for arguments, environ in commands]
    statuses, outputs = finished(*launched)
    assert statuses == [0, 0], "\n".join(outputs)
    facts = topology(Path("toy"))
    assert (facts["strategy"], facts["world_size"], facts["num_nodes"]) == expected
    assert ranks_of(Path("toy")) == [["0", "cpu"], ["1", "cpu"]]
    assert not list(Path().glob("toy-*"))
    one = ("--trainer.default_root_dir=one", "--config", "hardware/cpu.yaml")
    status, output = unisono("fit", "--config", "toy.yaml", *one)
    assert status == 0, output
    assert_same_samples(ledger_lines(Path("one")), ledger_lines(Path("toy")), rel=1e-5)
