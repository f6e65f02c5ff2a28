"""Whoever starts the ranks: one run folder, one checkpoint, one error, nothing left behind."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TOY
from tests.distributed.launch import ended, run, started


def fit(tmp_path: Path, *options: str, launcher: tuple[str, ...] = ()) -> tuple[int, str]:
    config = tmp_path / "toy.yaml"
    config.write_text(TOY)
    done = run(
        *launcher, "-m", "lit_models", "fit", "--config", str(config), "--trainer.devices=2",
        f"--trainer.default_root_dir={tmp_path / 'toy'}", *options,
    )  # fmt: skip
    return done.returncode, done.stdout


def topology(folder: Path) -> dict:
    return json.loads((folder / "topology.json").read_text())


@pytest.mark.slow
def test_ddp_children_resume_in_the_folder_that_their_launcher_chose(
    tmp_path: Path, unisono: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "toy.yaml").write_text(TOY)
    one_device = ("--config", f"{tmp_path}/toy.yaml", f"--trainer.default_root_dir={tmp_path}/toy")
    assert unisono("fit", *one_device)[0] == 0
    assert unisono("fit", *one_device)[0] == 0
    status, output = fit(
        tmp_path, "--trainer.strategy=ddp", "--ckpt_path=auto", "--trainer.max_epochs=2"
    )
    assert status == 0, output
    assert output.count("--ckpt_path auto resumes from") == 1
    facts = topology(tmp_path / "toy-2")
    assert (facts["strategy"], facts["backend"], facts["world_size"]) == ("ddp", "gloo", 2)
    places = [place.split(":")[1:] for place in facts["host_rank_device"]]
    assert places == [["0", "cpu"], ["1", "cpu"]]
    assert facts["plan"]["micro_batch_size"] == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["toy", "toy-2", "toy.yaml"]


@pytest.mark.slow
def test_two_commands_at_once_in_one_folder_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "toy.yaml").write_text(TOY)
    command = ("-m", "lit_models", "fit", "--config", f"{tmp_path}/toy.yaml")
    command += (f"--trainer.default_root_dir={tmp_path}/toy", "--trainer.devices=1")
    for epochs, resume in ((150, ()), (300, ("--ckpt_path=auto",))):
        both = [started(*command, f"--trainer.max_epochs={epochs}", *resume) for _ in range(2)]
        outputs = [process.communicate(timeout=150)[0] for process, _ in both]
        for process, mark in both:
            ended(process, mark)
        statuses = [process.returncode for process, _ in both]
        # The second one of new runs that comes a moment later has a folder of its own.
        is_apart = not resume and (tmp_path / "toy-2").exists()
        assert sorted(statuses) == ([0, 0] if is_apart else [0, 1]), outputs
        assert is_apart or "is in use: process" in " ".join(" ".join(outputs).split())
        for folder in tmp_path.glob("toy*/"):
            assert run("-m", "lit_models", "verify", str(folder)).returncode == 0
    # Whoever resumes takes the newest: that of the second command, if it was apart.
    newest = next(f for f in (tmp_path / "toy-2", tmp_path / "toy") if f.exists())
    lines = (newest / "ledger.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["attempt"] for row in rows if "resumed_from_step" in row] == [1, 2]


@pytest.mark.slow
def test_ranks_of_torchrun_agree_on_the_folder(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "ledger.jsonl").write_text("")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    status, output = fit(tmp_path, "--trainer.strategy=ddp", launcher=torchrun)
    assert status == 0, output
    assert topology(tmp_path / "toy-2")["world_size"] == 2
    assert not (tmp_path / "toy-3").exists()


def test_a_launcher_with_another_world_is_refused(
    toy_config: Path, unisono: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, output = unisono("fit", "--config", "toy.yaml")
    assert status == 2
    assert "each would train a copy" in " ".join(output.split())


@pytest.mark.slow
def test_an_error_in_a_spawned_process_is_one_screen_too(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    schedule = "--model.lr_scheduler=lit_models.training.optim.WarmupDecay"
    too_long = "--model.lr_scheduler.warmup=5000"  # known to the processes that have the plan
    status, output = fit(tmp_path, "--trainer.strategy=ddp_spawn", schedule, too_long)
    assert status == 1
    assert "warmup is 5000 steps, but the run has" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_spawned_processes_train_and_test(tmp_path: Path) -> None:
    status, output = fit(tmp_path, "--trainer.strategy=ddp_spawn", "--test_after_fit=true")
    assert status == 0, output
    assert re.search(r"^test/count +21$", output, re.M), output
    assert "deprecated" not in output
    assert (tmp_path / "toy" / "errors-test.csv").exists()
