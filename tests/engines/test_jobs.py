"""`unisono submit` for each kind of cluster, and what the launcher of a world fills in."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from lit_models.engines import in_launched_world

SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "3"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2"}
NODES, DEVICES = "--trainer.num_nodes", "--trainer.devices"


@pytest.fixture(name="submit")
def submit_call(done, toy_config):
    """Calls `unisono submit` in a folder with a toy config; returns one line of output."""

    def call(target: str, *options: str, status: int = 0) -> str:
        options = ("--config=toy.yaml", f"--target={target}", *options)
        return " ".join(done("submit", *options, status=status).split())

    return call


def shell_of(text: str) -> str:
    """The text as bash reads it, without comments and line breaks; bash finds no syntax error."""
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return "\n".join(lines).replace(" \\\n", "").replace("  ", " ")


def test_torchrun_starts_an_elastic_run_that_goes_on_in_its_folder(submit) -> None:
    nodes = ["--nodes=1:4", "--gpus-per-node=2", "--rendezvous=n1:29400"]
    output = submit("torchrun", *nodes, "--max-restarts=3", "--activate=source a/b")
    assert "start it bash jobs/toy/job.sh, on each machine" in output
    text = shell_of(Path("jobs/toy/job.sh").read_text())
    assert text.startswith("\nsource a/b\npython -c 'import lit_models'")
    assert (
        "\nexec python -m torch.distributed.run --nnodes=1:4 --nproc_per_node=2 --max_restarts=3 "
        "--rdzv_backend=c10d --rdzv_id=toy --rdzv_endpoint=n1:29400 --rdzv_conf=read_timeout=600 "
        '-m lit_models fit --config=toy.yaml --trainer.default_root_dir="$run" --ckpt_path=auto '
        "--trainer.num_nodes=auto --trainer.devices=auto"
    ) in text


def test_ray_gets_the_folder_and_a_script_with_the_command(submit) -> None:
    options = ["--nodes=1:4", "--gpus-per-node=2", "--address=http://h:8265", "--dry-run"]
    root = "--trainer.default_root_dir=/shared/a b"
    output = submit("ray", "--name=job", *options, root)
    assert "submit it ray job submit --no-wait --working-dir=. " in output
    assert output.endswith(" --address=http://h:8265 -- bash jobs/job/job.sh")
    assert (
        "\nexec python -m lit_models fit --engine=ray --engine.address=auto "
        "--engine.workers=2:8 --engine.max_failures=9 --config=toy.yaml "
        "'--trainer.default_root_dir=/shared/a b' --ckpt_path=auto"
    ) in shell_of(Path("jobs/job/job.sh").read_text())


def test_skypilot_starts_torchrun_on_each_machine(submit) -> None:
    machines = ["--nodes=2", "--gpus-per-node=4", "--gpu=H100", "--storage=mine:/data"]
    output = submit("skypilot", *machines, "--dry-run", "--seed_everything=3")
    assert "submit it sky jobs launch --yes jobs/toy/job.yaml" in output
    task = yaml.safe_load(Path("jobs/toy/job.yaml").read_text())
    run = shell_of(task.pop("run"))
    assert shell_of(task.pop("setup")) == "pip install --editable ."
    assert task == {
        **{"name": "unisono-toy", "workdir": ".", "num_nodes": 2, "volumes": {"/data": "mine"}},
        "resources": {"accelerators": "H100:4", "cpus": "16+"},
    }
    assert "\nrun=/data/runs/toy #" in run
    meets = '$first:29400" --rdzv_conf="read_timeout=600,is_host=$((SKYPILOT_NODE_RANK == 0))"'
    assert meets in run
    assert "--nnodes=2 --nproc_per_node=4" in run
    assert "fit --config=toy.yaml --seed_everything=3 --trainer.default_root_dir" in run
    submit("skypilot", "--storage=s3://mine/x:/data", "--name=bucket", "--dry-run")
    task = yaml.safe_load(Path("jobs/bucket/job.yaml").read_text())
    assert task["file_mounts"] == {"/data": {"source": "s3://mine/x", "mode": "MOUNT_CACHED"}}
    assert task["resources"] == {"cpus": "1+"}


def test_kubernetes_replaces_pods_that_find_the_first_by_name(submit, monkeypatch) -> None:
    Path("kubectl").write_text("#!/bin/bash\necho $@ > asked.txt; exit $(cat status.txt)\n")
    Path("kubectl").chmod(0o755)
    Path("status.txt").write_text("0")
    monkeypatch.setenv("PATH", f"{Path.cwd()}:{os.environ['PATH']}")
    options = ["--nodes=1:3", "--gpus-per-node=2", "--image=me/u:1", "--storage=claim:/data"]
    submit("kubernetes", "--name=My_toy", *options, "--data.predict_output=$$(x)")
    assert Path("asked.txt").read_text() == "apply --filename jobs/My_toy/job.yaml\n"
    service, job = yaml.safe_load_all(Path("jobs/My_toy/job.yaml").read_text())
    label = service["metadata"]["name"]
    assert label == service["spec"]["selector"]["job-name"] == "unisono-my-toy"
    assert (job["spec"]["completions"], job["spec"]["parallelism"]) == (3, 3)
    assert job["spec"]["successPolicy"]["rules"] == [{"succeededIndexes": "0"}]
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == label == job["metadata"]["name"]
    container = pod["containers"][0]
    assert container["resources"] == {"requests": {"cpu": 8}, "limits": {"nvidia.com/gpu": 2}}
    text = shell_of(container["args"][0].replace("$$", "$"))  # as Kubernetes passes it on
    assert "--nnodes=1:3 --nproc_per_node=2" in text
    assert f'--rdzv_endpoint="{label}-0.{label}:29400"' in text
    assert "'--data.predict_output=$$(x)'" in text
    Path("status.txt").write_text("4")
    output = submit("kubernetes", "--name=other", *options, status=1)
    assert "kubectl ended with status 4: it says above why" in output


def test_a_run_folder_of_another_run_is_not_gone_on_with(submit) -> None:
    Path("runs/toy").mkdir(parents=True)
    assert "bash jobs/toy-2/job.sh" in submit("torchrun")
    Path("runs/toy-2").mkdir()  # the folder of this very job
    assert "bash jobs/toy-2/job.sh" in submit("torchrun")
    assert "\nrun=runs/toy-2 #" in Path("jobs/toy-2/job.sh").read_text()


def test_a_wrong_name_of_an_engine_is_told_before_what_another_needs(unisono) -> None:
    for word in ("--engine=spark", "--engine.workers=2"):
        assert f"{word}: the only engine is --engine=ray" in unisono("fit", word)[1]


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ("sge", "--nodes=1", "--target=sge must be one of slurm, torchrun"),
        ("torchrun", "--time-limit=90", "--time-limit has no effect for --target=torchrun, only"),
        ("slurm", "--max-restarts=3", "--max-restarts has no effect for --target=slurm, only for"),
        ("slurm", "--nodes=1:4", "--nodes=1:4: --target=slurm starts as many nodes as it is told"),
        ("torchrun", "--nodes=2", "name it with --rendezvous=HOST:29400"),
        ("kubernetes", "--storage=a:/b", "--target=kubernetes needs --image"),
        ("skypilot", "--gpus-per-node=2", "give --gpu=H100 with --gpus-per-node=8, or neither"),
        ("skypilot", "--storage=data", "--storage=data must be a volume and the folder"),
        ("skypilot", "--storage=s3://a:/b --nodes=2", "they would disagree on the newest chec"),
        ("ray", "--config=consistency_lens/demo.yaml", "the stages of a chain wait for each other"),
        ("ray", "--trainer.default_root_dir=runs/a", "--trainer.default_root_dir=runs/a: a job"),
    ],
)
def test_what_a_target_cannot_do_is_refused(submit, target, options, message) -> None:
    assert message in submit(target, *options.split(), status=2)
    assert not Path("jobs").exists()


@pytest.mark.parametrize(
    ("environ", "given", "found"),
    [
        (TORCHRUN, [], [f"{NODES}=3", f"{DEVICES}=2"]),
        (TORCHRUN, [f"{DEVICES}=auto"], [f"{DEVICES}=auto", f"{NODES}=3", f"{DEVICES}=2"]),
        (TORCHRUN, [f"{DEVICES}=4"], [f"{DEVICES}=4", f"{NODES}=3"]),  # rejected later
        (TORCHRUN, [f"{NODES}=3", f"{DEVICES}=2"], [f"{NODES}=3", f"{DEVICES}=2"]),
        (SRUN, [f"{NODES}=auto"], [f"{NODES}=3", f"{DEVICES}=2"]),
        (SRUN, [f"{NODES}=auto", f"{DEVICES}=4"], [f"{DEVICES}=4", f"{NODES}=3"]),
        (SRUN, [], []),
        ({"WORLD_SIZE": "2"}, [f"{NODES}=auto"], [f"{NODES}=1"]),
    ],
)
def test_nodes_and_devices_are_those_of_the_launcher(environ, given, found):
    assert in_launched_world(["fit", *given], environ) == ["fit", *found]


def test_a_config_says_auto_in_a_run_and_where_a_command_reads_it(done, toy_config):
    text = toy_config.read_text()
    toy_config.write_text(text.replace("\ntrainer:\n", "\ntrainer:\n  num_nodes: auto\n"))
    for more in ([], [f"{NODES}=auto"]):
        assert "num_nodes: 1\n" in done("fit", "--config=toy.yaml", *more, "--print_config")
    done("submit", "--config=toy.yaml", "--dry-run", "--nodes=2")
