"""`unisono submit` writes scripts that say what was asked for, and refuses what would not run."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands.submit import Resources, seconds

Unisono = Callable[..., tuple[int, str]]
JOB = Path("jobs/toy/job.sh")
GPUS = ["--nodes=2", "--gpus-per-node=4", "--cpus-per-task=6"]
PLACE = ["--partition=fast", "--account=me", "--nodelist=n1,n2", "--time-limit=2-12"]
DIRECTIVES = """\
--job-name=mine
--partition=fast
--account=me
--nodes=2
--nodelist=n1,n2
--ntasks-per-node=4
--gpus-per-node=4
--cpus-per-task=6
--time=2-12
--signal=B:USR1@300
--requeue
--open-mode=append
--output=logs/train_%j.out
--error=logs/train_%j.err
""".splitlines()


@pytest.fixture(name="submit")
def submit_call(unisono: Unisono, toy_config: Path) -> Callable[..., tuple[int, str]]:
    """Calls `unisono submit --dry-run` in a folder with a toy config; one line of output."""

    def call(*options: str, config: str = "toy.yaml") -> tuple[int, str]:
        status, output = unisono("submit", "--config", config, "--dry-run", *options)
        return status, " ".join(output.split())

    return call


def directives(script: Path) -> list[str]:
    lines = script.read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def commands(script: Path) -> str:
    """The script without its comments, as bash would read it; it is checked for its syntax."""
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace(" \\\n ", "")


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--partition=fast\ntouch witness", "--partition='fast.*' must be one word"),
        ("--account=me\ntouch witness", "--account='me.*' must be one word"),
        ("--nodelist=n1 --wrap=x", "--nodelist='n1 .*' must be one word"),
        ("--name=mine\ntouch witness", "a job's name has letters"),
        ("--time-limit=24:00:00\n", "--time-limit=.* must be one word"),
    ],
)
def test_no_value_begins_a_line_of_the_script(submit, option: str, message: str) -> None:
    status, output = submit(option)
    assert status != 0
    assert re.search(message, output), output
    assert not list(Path().rglob("*.sh"))


def test_a_line_break_in_an_option_of_the_run_is_kept_quoted(submit) -> None:
    status, output = submit(
        "--trainer.fast_dev_run=false", "--data.predict_output=a\n\n\n#SBATCH b"
    )
    assert status == 0, output
    assert "'--data.predict_output=a\n\n\n#SBATCH b'" in commands(JOB) + JOB.read_text()


def test_a_script_says_what_was_asked_for(submit) -> None:
    activate = ["--activate", "module load cuda", "--activate=source 'my env/bin/activate'"]
    status, output = submit("--name=mine", *GPUS, *PLACE, *activate, "--trainer.max_epochs=3")
    assert status == 0, output
    assert "wrote jobs/mine/torchrun.sh for 2 nodes x 4 GPUs" in output
    assert "sbatch --parsable jobs/mine/job.sh" in output
    assert directives(Path("jobs/mine/job.sh")) == DIRECTIVES
    text = commands(Path("jobs/mine/job.sh"))
    assert "\nmodule load cuda\nsource 'my env/bin/activate'\n" in text
    assert "\nrun=runs/mine_$SLURM_JOB_ID #" in text
    assert (
        "\nsrun --kill-on-bad-exit=1 --cpus-per-task=6 python -m lit_models fit --config=toy.yaml "
        "--trainer.max_epochs=3 --trainer.devices=4 --trainer.num_nodes=2 "
        '--trainer.default_root_dir="$run" --ckpt_path=auto &\n'
    ) in text
    assert Path("logs").is_dir()
    assert (
        "\npython -m torch.distributed.run --max-restarts=3 --nproc-per-node=4 --nnodes=2 "
        '--rdzv-backend=c10d --rdzv-id=mine --rdzv-endpoint="$first:$port" -m lit_models fit '
        "--config=toy.yaml"
    ) in commands(Path("jobs/mine/torchrun.sh"))


def test_what_was_not_asked_for_is_not_there(submit) -> None:
    assert submit()[0] == 0
    asked = " ".join(directives(JOB))
    for absent in ("partition", "account", "nodelist", "gpus", "cpus"):
        assert absent not in asked
    assert "--nodes=1 --ntasks-per-node=1 --time=24:00:00" in asked
    text = commands(JOB)
    assert f"\nsrun --kill-on-bad-exit=1 {sys.executable} -m lit_models fit --config" in text
    assert "\n\n\n" not in JOB.read_text()
    assert "--standalone -m lit_models fit" in commands(Path("jobs/toy/torchrun.sh"))


def test_the_options_of_a_run_are_handed_on(submit) -> None:
    Path("a b.yaml").write_text("trainer: {max_epochs: 2, accelerator: cpu}\n")
    typed = ["--config", "a b.yaml", "--seed_everything", "4", "--ckpt_path", "auto"]
    root = "--trainer.default_root_dir=runs/toy_12"
    assert submit(*typed, root) == submit(*typed, root)  # the same scripts are no others
    assert [p.name for p in Path("jobs").iterdir()] == ["toy_12"]
    text = commands(Path("jobs/toy_12/job.sh"))
    assert " '--config=a b.yaml' --seed_everything=4 --ckpt_path=auto" in text
    assert (text.count("default_root_dir=runs/toy_12"), text.count("--trainer.accelerator")) == (
        1,
        0,
    )


def test_a_prediction_has_the_run_folder_of_its_options(submit) -> None:
    assert submit("--verb=predict", "--ckpt_path=runs/toy_1/checkpoints/best.ckpt")[0] == 0
    text = commands(JOB)
    assert " predict --config=toy.yaml --ckpt_path=runs/toy_1/checkpoints/best.ckpt" in text
    assert ('default_root_dir="$run"' in text, "ckpt_path=auto" in text) == (False, False)


def test_other_scripts_are_never_overwritten(submit) -> None:
    assert submit()[0] == 0
    before = JOB.read_text()
    assert "wrote jobs/toy-2/job.sh" in submit("--time-limit=1:00:00")[1]
    assert "wrote jobs/toy-2/job.sh" in submit("--time-limit=1:00:00")[1]
    assert JOB.read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node=2"], "there is no option `--node`. Did you mean --nodes"),
        (["--gpus=2"], "no option `--gpus`. Did you mean --gpus-per-node"),
        (["--trainer.max_epoch=2"], "no option `--trainer.max_epoch`. Did you mean --trainer.max_"),
        (["--nodes=0"], "--nodes must be 1 or more, got 0"),
        (["--gpus-per-node=0"], "--gpus-per-node must be 1 or more, got 0; leave it out"),
        (["--gpus-per-node=2", "--tasks-per-node=4"], "a GPU has one process; leave --tasks"),
        (["--time-limit=soon"], "--time-limit=soon is no time; write 24:00:00, 90 (minutes)"),
        (["--time-limit=-5"], "--time-limit=-5 is no time; write 24:00:00, 90 (minutes)"),
        (["--time-limit=5"], "--save-ahead-s=300 must be below the time limit 5 (300 s)"),
        (["--trainer.devices=2"], "--trainer.devices=2 is set by the job: use --gpus-per-node"),
        (["--trainer.num_nodes", "2"], "--trainer.num_nodes=2 is set by the job: use --nodes"),
        (["--ckpt_path=a.ckpt"], "To go on with an earlier run, set --trainer.default_root_dir"),
        (["--trainer.accelerator=gpu"], "trainer.accelerator=gpu in a job without GPUs: add --gpu"),
        (["--name=bash"], "and is none of bash, interactive, in which Lightning does not see"),
        (["--verb=train"], "--verb: invalid choice: 'train' (choose from 'fit', 'validate',"),
        (["--trainer.strategy=dpp"], "there is no strategy `dpp`. Did you mean ddp"),
        (
            ["--trainer.strategy=ddp_spawn", "--tasks-per-node=2"],
            "trainer.strategy=ddp_spawn starts its own processes",
        ),
        (["--tasks-per-node=16"], "data.global_batch_size=8 is smaller than devices x"),
    ],
)
def test_a_job_that_would_not_run_is_refused_before_it_is_written(
    submit, options: list[str], message: str
) -> None:
    status, output = submit(*options)
    assert status == 2
    assert message in output
    assert not Path("jobs").exists()


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("logs", "a file is in the way; move"), ("jobs", "a part of this path is")],
)
def test_a_file_where_a_folder_is_needed_is_refused(submit, name: str, way_out: str) -> None:
    Path(name).touch()
    status, output = submit()
    assert (status, name in output, way_out in output) == (1, True, True), output
    assert Path(name).is_file()


@pytest.mark.parametrize("options", [["--dry-run"], ["--trainer.max_epochs=3"]])
def test_without_a_run_the_way_out_is_named(
    unisono: Unisono, toy_config: Path, options: list[str]
) -> None:
    status, output = unisono("submit", *options)
    assert status == 2
    assert "required: fit.data, fit.model; give the config of a run with --config" in " ".join(
        output.split()
    )


def test_a_run_without_a_config_is_one(unisono: Unisono, toy_config: Path) -> None:
    run = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData", "--name=toy"]
    optimizer = "--model.optimizer=torch.optim.SGD"
    status, output = unisono("submit", "--dry-run", *run, optimizer)
    assert status == 0, output


def test_times_are_read_as_sbatch_reads_them() -> None:
    times = {"90": 5400, "90:30": 5430, "24:00:00": 86400, "2-12": 216000, "1-02:03:04": 93784}
    assert {text: seconds(text) for text in times} == times
    with pytest.raises(ValueError, match="--time-limit=0:30 is 30 s, and SLURM counts whole min"):
        seconds("0:30")
    with pytest.raises(ValueError, match="--save-ahead-s=70000 must be .* at most 65535"):
        Resources(save_ahead_s=70000)
