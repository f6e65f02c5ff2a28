"""The stages of a chain become jobs, each after the one before it; sbatch's refusal is shown."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands.chain import (
    check_outputs,
    made_from,
    outputs_digest,
    read_stages,
    write_record,
)
from tests.commands.test_submit import Unisono, commands, directives

CHAIN = """
to: runs/chain-{seed}
stages:
  first:
    verb: fit
    config: toy.yaml
  exported:
    verb: export
    checkpoint: first
  second:
    verb: test
    checkpoint: first
    config: toy.yaml
    options: {data.num_samples: 30}
"""
SBATCH = """#!/bin/bash
n=$(ls submitted* 2>/dev/null | wc -l)
[ "$n" -lt "$(cat most.txt)" ] || { echo 'sbatch: error: no such account' >&2; exit 1; }
echo "$@" > submitted$n
echo $((70 + n))
"""

SCANCEL = '#!/bin/bash\necho "$@" > cancelled\n'


@pytest.fixture(name="chain")
def chain_call(
    unisono: Unisono, toy_config: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Calls `unisono submit` for the chain, where a stand-in for sbatch takes three jobs."""
    Path("mine").mkdir()
    Path("mine/chain.yaml").write_text(CHAIN)
    Path("most.txt").write_text("3")
    for name, text in (
        ("sbatch", SBATCH),
        ("scancel", SCANCEL),
    ):
        Path(name).write_text(text)
        Path(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")

    def call(*options: str) -> tuple[int, str]:
        status, output = unisono("submit", "--config", "mine/chain.yaml", *options)
        return status, " ".join(output.split())

    return call


def submitted() -> list[str]:
    return [path.read_text().strip() for path in sorted(Path().glob("submitted*"))]


def test_each_stage_is_a_job_after_the_one_before_it(chain) -> None:
    Path("most.txt").write_text("9")
    counts = ["--change.first.devices=2", "--change.second.devices", "8"]
    status, output = chain(*counts, "--gpus-per-node=4")
    assert status == 0, output
    after = "--kill-on-invalid-dep=yes jobs/mine/"
    assert submitted() == [
        "--parsable jobs/mine/1-first.sh",
        f"--parsable --dependency=afterok:70 {after}2-exported.sh",
        f"--parsable --dependency=afterok:71 {after}3-second.sh",
    ]
    assert "submitted job 72: 3-second, logs logs/train_72.out, .err" in output
    asked = [" ".join(directives(path)) for path in sorted(Path("jobs/mine").iterdir())]
    assert (
        "--job-name=mine-first --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --cpus" in asked[0]
    )
    assert "pus" not in asked[1]
    assert "--nodes=2 --ntasks-per-node=4 --gpus-per-node=4 --cpus" in asked[2]
    assert (
        "-m lit_models chain --config=mine/chain.yaml --change.first.devices=2 "
        "--change.second.devices=8 --only=second --change.second.devices=4 "
        "--change.second.options.trainer.num_nodes=2 "
        "--launcher='srun --kill-on-bad-exit=1 --cpus-per-task=4' &\n"
    ) in commands(Path("jobs/mine/3-second.sh"))


def test_a_stage_that_is_complete_gets_no_job(chain) -> None:
    stages = read_stages({"first": {"verb": "fit", "config": "toy.yaml"}})
    folder = Path("runs/chain-3")
    (folder / "first/checkpoints").mkdir(parents=True)
    (folder / "first/checkpoints/last.ckpt").write_text("sound")
    digest = outputs_digest(stages[0], folder)
    write_record(folder, "first", made_from(stages[0], folder, 3, {}), digest)
    status, output = chain("--seed=3", "--change.first.devices=2")
    assert (status, "stage first is complete: no job" in output) == (0, True), output
    assert submitted()[0] == "--parsable jobs/mine/2-exported.sh"
    assert "--only=second --change.second" in commands(Path("jobs/mine/3-second.sh"))
    (folder / "first/checkpoints/last.ckpt").write_text("another")
    status, output = chain("--seed=3")
    assert (status, "the files in runs/chain-3/first were changed since" in output) == (1, True)


@pytest.mark.parametrize(
    ("options", "second"),
    [
        (["--change.second.devices=2"], "accelerator=cpu"),
        (["--gpus-per-node=1"], "accelerator=gpu"),
        (["--change.second.options.trainer.accelerator=cuda"], "accelerator=cuda"),
    ],
)
def test_the_accelerator_of_a_stage_is_that_of_its_job_unless_it_says_it(
    chain, options: list[str], second: str
) -> None:
    text = Path("toy.yaml").read_text()  # its accelerator is cpu
    Path("silent.yaml").write_text(text.replace("  accelerator: cpu\n", ""))
    path = Path("mine/chain.yaml")
    said, silent = path.read_text().split("  second:")
    path.write_text(f"{said}  second:{silent.replace('toy.yaml', 'silent.yaml')}")
    assert chain("--dry-run", *options)[0] == 0
    assert commands(Path("jobs/mine/3-second.sh")).count("accelerator") == 1
    assert f"--change.second.options.trainer.{second} " in commands(Path("jobs/mine/3-second.sh"))
    for other in ("1-first.sh", "2-exported.sh"):
        assert "change.first.options" not in commands(Path("jobs/mine", other))


def test_the_place_of_a_stage_makes_no_other_stage(toy_config: Path) -> None:
    values = {"verb": "fit", "config": "toy.yaml"}
    stages = read_stages({"first": values})
    folder = Path("runs")
    write_record(folder, "first", made_from(stages[0], folder, 1, {}))
    (folder / "first").mkdir()
    (folder / "first/part").touch()
    place = {"trainer.num_nodes": 2, "trainer.accelerator": "cpu"}
    wider = read_stages({"first": {**values, "options": place}})
    assert check_outputs(wider, wider, folder, 1) == {"first": "begun"}


def test_stages_without_a_count_have_one_device_and_a_rehearsal_submits_nothing(chain) -> None:
    status, output = chain("--dry-run", "--tasks-per-node=2", "--only=second")
    assert status == 1
    assert "stage second takes first, which is not complete" in output
    status, output = chain("--dry-run", "--change.second.devices=3", "--tasks-per-node=3")
    assert "job=$(sbatch --parsable --dependency=afterok:$job" in output
    assert submitted() == []
    assert "--ntasks-per-node=1" in directives(Path("jobs/mine/1-first.sh"))
    assert "--ntasks-per-node=3" in directives(Path("jobs/mine/3-second.sh"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--change.frist.devices=2"], "--change.frist: there is no such stage. Did you mean fir"),
        (["--change.first.devices=auto"], "a job needs a number of devices, got auto"),
        (["--change.exported.devices=2"], "stage exported: export runs on no devices; leave"),
        (["--nodes=2"], "--nodes=2: a stage of a chain takes as many nodes as its devices need"),
        (["--verb=test"], "--verb=test: the stages of a chain have verbs of their own"),
        (["--launcher=x"], "--launcher is set by the job; leave it out"),
        (["--change.first.options.trainer.max_epoch=2"], "trainer.max_epoch`. Did you mean"),
        (["--seed=x"], "argument --seed: invalid int value"),
        (["--sede=2"], "there is no option `--sede`. Did you mean --seed"),
        (["--only=frist"], "--only=frist: there is no such stage. Did you mean first"),
    ],
)
def test_a_chain_that_would_not_run_is_refused(chain, options: list[str], message: str) -> None:
    status, output = chain(*options)
    assert status == 2
    assert message in output
    assert not Path("jobs").exists()


def test_where_sbatch_refuses_one_job_none_is_left(chain) -> None:
    Path("most.txt").write_text("2")
    status, output = chain()
    assert status == 1
    assert "sbatch refuses the job: sbatch: error: no such account. The script is" in output
    assert "The jobs before it are taken back: 70, 71." in output
    assert Path("cancelled").read_text() == "70 71\n"


def test_without_sbatch_the_way_out_is_named(
    unisono: Unisono, toy_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    status, output = unisono("submit", "--config", "toy.yaml")
    assert status == 1
    assert "there is no sbatch on this machine" in " ".join(output.split())
    assert Path("jobs/toy/torchrun.sh").exists()
