"""`unisono submit` writes scripts as requested and refuses jobs that could not run; stages of a
chain become jobs, each after the one before it."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lit_models.commands.chain import made_from, outputs_digest, read_stages, write_record
from lit_models.engines.jobs import seconds

Done = Callable[..., str]
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


@pytest.fixture(name="submit")
def submit_call(done: Done, toy_config: Path) -> Done:
    """Calls `unisono submit --dry-run` in a folder with a toy config; returns one line."""

    def call(*options: str, status: int = 0) -> str:
        output = done("submit", "--config=toy.yaml", "--dry-run", *options, status=status)
        return " ".join(output.split())

    return call


def directives(script: Path) -> list[str]:
    lines = script.read_text().splitlines()
    return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]


def commands(script: Path) -> str:
    """Return the script as bash reads it, without comments, after checking its syntax."""
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    lines = [line for line in script.read_text().splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace(" \\\n ", "")


def test_a_script_says_what_was_asked_for(submit) -> None:
    activate = ["--activate", "module load cuda", "--activate=source 'my env/bin/activate'"]
    output = submit("--name=mine", *GPUS, *PLACE, *activate, "--trainer.max_epochs=3")
    assert "wrote jobs/mine/job.sh for nodes x GPUs: 2 x 4" in output
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


def test_what_was_not_asked_for_is_not_there(submit) -> None:
    submit()
    asked = " ".join(directives(JOB))
    for absent in ("partition", "account", "nodelist", "gpus", "cpus"):
        assert absent not in asked
    assert "--nodes=1 --ntasks-per-node=1 --time=24:00:00" in asked
    text = commands(JOB)
    assert f"\nsrun --kill-on-bad-exit=1 {sys.executable} -m lit_models fit --config" in text
    assert "\n\n\n" not in JOB.read_text()


def test_the_options_of_a_run_are_handed_on(submit) -> None:
    Path("a b.yaml").write_text("trainer: {max_epochs: 2, accelerator: cpu}\n")
    typed = ["--config", "a b.yaml", "--seed_everything", "4", "--ckpt_path", "auto"]
    root = "--trainer.default_root_dir=runs/toy_12"
    assert submit(*typed, root) == submit(*typed, root)  # submitted again, the scripts are the same
    assert [p.name for p in Path("jobs").iterdir()] == ["toy_12"]
    text = commands(Path("jobs/toy_12/job.sh"))
    assert " '--config=a b.yaml' --seed_everything=4 --ckpt_path=auto" in text
    assert text.count("default_root_dir=runs/toy_12") == 1
    assert "--trainer.accelerator" not in text
    submit(*typed, "--trainer.default_root_dir=runs/my toy, 3")
    assert "default_root_dir=runs/my toy, 3'" in commands(Path("jobs/my-toy-3/job.sh"))
    submit("--name=lines", "--data.predict_output=a\n\n#SBATCH b")
    assert "'--data.predict_output=a\n\n#SBATCH b'" in Path("jobs/lines/job.sh").read_text()


def test_other_scripts_are_never_overwritten(submit) -> None:
    submit()
    before = JOB.read_text()
    JOB.with_name(".job.sh.swp").write_bytes(b"\xff")  # an editor's swap file
    assert "wrote jobs/toy/job.sh" in submit()
    for _ in range(2):
        assert "wrote jobs/toy-2/job.sh" in submit("--time-limit=1:00:00")
    assert JOB.read_text() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--node=2"], "there is no option `--node`. Did you mean --nodes"),
        (["--gpus=2"], "no option `--gpus`. Did you mean --gpus-per-node"),
        (["--trainer.max_epoch=2"], "no option `--trainer.max_epoch`. Did you mean --trainer.max_"),
        (["--nodes=0"], "--nodes must be 1 or more, got 0"),
        (["--gpus-per-node=0"], "--gpus-per-node must be 1 or more, got 0; else leave it out"),
        (["--gpus-per-node=2", "--tasks-per-node=4"], "a GPU has one process; leave --tasks"),
        (["--time-limit=soon"], "--time-limit=soon is no time; write 24:00:00, 90 (minutes)"),
        (["--time-limit=-5"], "--time-limit=-5 is no time; write 24:00:00, 90 (minutes)"),
        (["--time-limit=5"], "--save-ahead-s=300 must be below the time limit 5 (300 s)"),
        (["--trainer.devices=2"], "--trainer.devices=2 is set by --gpus-per-node or --tasks-per"),
        (["--trainer.num_nodes", "2"], "--trainer.num_nodes=2 is set by --nodes: leave it out"),
        (["--ckpt_path=a.ckpt"], "To go on with an earlier run, set --trainer.default_root_dir"),
        (["--name=bash"], "and is none of bash, interactive, in which Lightning does not see"),
        (["--trainer.strategy=dpp"], "there is no strategy `dpp`. Did you mean ddp"),
        (
            ["--trainer.strategy=ddp_spawn", "--tasks-per-node=2"],
            "trainer.strategy=ddp_spawn starts its own processes",
        ),
        (["--tasks-per-node=16"], "data.global_batch_size=8 is smaller than devices x"),
        # No value begins a line of the script.
        (["--partition=fast\ntouch witness"], "must be one word"),
        (["--account=me\ntouch witness"], "must be one word"),
        (["--nodelist=n1 --wrap=x"], "must be one word"),
        (["--time-limit=24:00:00\n"], "must be one word"),
        (["--name=mine\ntouch witness"], "a job's name has letters"),
    ],
)
def test_a_job_that_would_not_run_is_refused_before_it_is_written(submit, options, message):
    assert message in submit(*options, status=2)
    assert not Path("jobs").exists()


@pytest.mark.parametrize(
    ("name", "way_out"),
    [("logs", "a file is in the way; move"), ("jobs", "a part of this path is")],
)
def test_a_file_where_a_folder_is_needed_is_refused(submit, name: str, way_out: str) -> None:
    Path(name).touch()
    output = submit(status=1)
    assert (name in output, way_out in output) == (True, True), output
    assert Path(name).is_file()


def test_a_run_without_a_config_is_one(done: Callable, toy_config: Path) -> None:
    run = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData", "--name=toy"]
    done("submit", "--dry-run", *run, "--model.optimizer=torch.optim.SGD")


def test_times_are_read_as_sbatch_reads_them() -> None:
    times = {"90": 5400, "90:30": 5430, "24:00:00": 86400, "2-12": 216000, "1-02:03:04": 93784}
    assert {text: seconds(text) for text in times} == times


@pytest.fixture(name="chain")
def chain_call(done: Done, toy_config: Path, monkeypatch: pytest.MonkeyPatch) -> Done:
    """Calls `unisono submit` for the chain, with a stand-in for sbatch that accepts three jobs."""
    Path("mine").mkdir()
    Path("mine/chain.yaml").write_text(CHAIN)
    Path("most.txt").write_text("3")
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        Path(name).write_text(text)
        Path(name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")

    def call(*options: str, status: int = 0) -> str:
        output = done("submit", "--config=mine/chain.yaml", *options, status=status)
        return " ".join(output.split())

    return call


def submitted() -> list[str]:
    return [path.read_text().strip() for path in sorted(Path().glob("submitted*"))]


def test_each_stage_is_a_job_after_the_one_before_it(chain) -> None:
    Path("most.txt").write_text("9")
    counts = ["--change.first.devices=2", "--change.second.devices", "8"]
    output = chain(*counts, "--gpus-per-node=4")
    after = "--kill-on-invalid-dep=yes jobs/mine/"
    assert submitted() == [
        "--parsable jobs/mine/1-first.sh",
        f"--parsable --dependency=afterok:70 {after}2-exported.sh",
        f"--parsable --dependency=afterok:71 {after}3-second.sh",
    ]
    assert "submitted job 72: 3-second, logs logs/train_72.out, .err" in output
    asked = [" ".join(directives(path)) for path in sorted(Path("jobs/mine").iterdir())]
    first = "--job-name=mine-first --nodes=1 --ntasks-per-node=2 --gpus-per-node=2 --cpus"
    assert first in asked[0]
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
    assert "stage first is complete: no job" in chain("--seed=3", "--change.first.devices=2")
    assert submitted()[0] == "--parsable jobs/mine/2-exported.sh"
    assert "--only=second --change.second" in commands(Path("jobs/mine/3-second.sh"))
    (folder / "first/checkpoints/last.ckpt").write_text("another")
    output = chain("--seed=3", status=1)
    assert "the files in runs/chain-3/first were changed since" in output


@pytest.mark.parametrize(
    ("options", "second"),
    [
        (["--change.second.devices=2"], "accelerator=cpu"),
        (["--gpus-per-node=1"], "accelerator=gpu"),
        (["--change.second.options.trainer.accelerator=cuda"], "accelerator=cuda"),
    ],
)
def test_the_accelerator_of_a_stage_is_that_of_its_job_unless_it_says_it(chain, options, second):
    Path("silent.yaml").write_text("data: {class_path: tests.toy.ToyData}")  # nor a model
    chain("--dry-run", "--change.second.config=silent.yaml", *options)
    assert commands(Path("jobs/mine/3-second.sh")).count("accelerator") == 1
    assert f"--change.second.options.trainer.{second} " in commands(Path("jobs/mine/3-second.sh"))
    for other in ("1-first.sh", "2-exported.sh"):
        assert "change.first.options" not in commands(Path("jobs/mine", other))


def test_stages_without_a_count_have_one_device_and_a_rehearsal_submits_nothing(chain) -> None:
    output = chain("--dry-run", "--tasks-per-node=2", "--only=second", status=1)
    assert "stage second takes first, which is not complete" in output
    output = chain("--dry-run", "--change.second.devices=3", "--tasks-per-node=3")
    assert "job=$(sbatch --parsable --dependency=afterok:$job" in output
    assert submitted() == []
    assert "--ntasks-per-node=1" in directives(Path("jobs/mine/1-first.sh"))
    assert "--ntasks-per-node=3" in directives(Path("jobs/mine/3-second.sh"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--change.first.devices=auto"], "a job needs a number of devices, got auto"),
        (["--change.exported.devices=2"], "stage exported: export runs on no devices; leave"),
        (["--nodes=2"], "--nodes=2: a stage of a chain takes as many nodes as its devices need"),
        (["--change.first.options.trainer.max_epoch=2"], "trainer.max_epoch`. Did you mean"),
        (["--seed=x"], "argument --seed: invalid int value"),
        (["--sede=2"], "there is no option `--sede`. Did you mean --seed"),
    ],
)
def test_a_chain_that_would_not_run_is_refused(chain, options: list[str], message: str) -> None:
    assert message in chain(*options, status=2)
    assert not Path("jobs").exists()


def test_where_sbatch_refuses_one_job_none_is_left(chain) -> None:
    Path("most.txt").write_text("2")
    output = chain(status=1)
    assert "sbatch ended with status 1: sbatch: error: no such account. Its file is" in output
    assert "The jobs before it are cancelled: 70, 71." in output
    assert Path("cancelled").read_text() == "70 71\n"


def test_without_sbatch_the_way_out_is_named(done, toy_config, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    output = done("submit", "--config", "toy.yaml", status=1)
    assert "there is no sbatch on this machine" in " ".join(output.split())
    assert JOB.exists()
