"""`unisono submit` for each kind of cluster: what its file says, and what it refuses."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Submit = Callable[..., tuple[int, str]]


@pytest.fixture(name="submit")
def submit_call(unisono: Callable[..., tuple[int, str]], toy_config: Path) -> Submit:
    """Calls `unisono submit` in a folder with a toy config; one line of output."""

    def call(target: str, *options: str) -> tuple[int, str]:
        words = ["submit", "--config=toy.yaml", f"--target={target}", *options]
        status, output = unisono(*words)
        return status, " ".join(output.split())

    return call


def shell_of(text: str) -> str:
    """The text without its comments and line breaks, as bash reads it, which finds no fault."""
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace(" \\\n", "").replace("  ", " ")


def test_torchrun_starts_an_elastic_run_that_goes_on_in_its_folder(submit) -> None:
    nodes = ["--nodes=1:4", "--gpus-per-node=2", "--rendezvous=n1:29400"]
    status, output = submit("torchrun", *nodes, "--max-restarts=3", "--activate=source a/b")
    assert status == 0, output
    assert "start it bash jobs/toy/job.sh, on each machine" in output
    text = shell_of(Path("jobs/toy/job.sh").read_text())
    assert text.startswith("\nsource a/b\npython -c 'import lit_models'")
    assert "\nrun=runs/toy #" in text
    assert (
        "\nexec python -m torch.distributed.run --nnodes=1:4 --nproc_per_node=2 --max_restarts=3 "
        "--rdzv_backend=c10d --rdzv_id=toy --rdzv_endpoint=n1:29400 --rdzv_conf=read_timeout=600 "
        "-m lit_models fit --config=toy.yaml "
        '--trainer.default_root_dir="$run" --ckpt_path=auto'
    ) in text


def test_a_run_folder_of_another_run_is_not_gone_on_with(submit) -> None:
    Path("runs/toy").mkdir(parents=True)
    assert "bash jobs/toy-2/job.sh" in submit("torchrun")[1]
    Path("runs/toy-2").mkdir()  # that of this very job
    assert "bash jobs/toy-2/job.sh" in submit("torchrun")[1]
    assert "\nrun=runs/toy-2 #" in Path("jobs/toy-2/job.sh").read_text()


@pytest.mark.parametrize(
    ("target", "option", "message"),
    [
        ("sge", "--nodes=1", "--target=sge must be one of slurm, torchrun"),
        ("torchrun", "--time-limit=90", "--time-limit has no effect on a job for torchrun, but"),
        ("torchrun", "--dry-run", "--dry-run has no effect on a job for torchrun"),
        ("slurm", "--max-restarts=3", "--max-restarts has no effect on a job for slurm, but for"),
        ("slurm", "--nodes=1:4", "--nodes=1:4: --target=slurm starts as many nodes as it is told"),
        ("torchrun", "--nodes=2", "name it with --rendezvous=HOST:29400"),
        ("torchrun", "--nodes=4:1", "--nodes must be 1 or more, got 4:1"),
        ("torchrun", "--tasks-per-node=16", "data.global_batch_size=8 is smaller than devices x"),
    ],
)
def test_what_a_target_cannot_do_is_refused(submit, target, option, message) -> None:
    status, output = submit(target, option)
    assert status == 2
    assert message in output
    assert not Path("jobs").exists()
