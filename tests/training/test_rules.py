"""Impossible runs are refused before data is read; nothing falls back silently."""

from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only

from lit_models.cli import GPUOfTask
from lit_models.training.rules import check, check_world, resolve_devices, strategy_of


def trainer_of(**given: Any) -> Namespace:
    """Return a parsed `trainer` key: the given options and Lightning's defaults."""
    defaults = {"accelerator": "auto", "devices": "auto", "num_nodes": 1, "strategy": "auto"}
    return Namespace(**{**defaults, **given})


@pytest.fixture(params=[0, 2])
def num_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of GPUs that torch reports; a test may set it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param > 0)
    return request.param


@pytest.mark.parametrize(
    ("num_gpus", "given", "accelerator", "devices", "warning"),
    [
        (
            *(0, {}, "cpu", 1),
            "devices: auto found no GPU, the run uses 1 CPU process; --trainer.devices=2 uses two",
        ),
        (2, {}, "gpu", [0, 1], None),
        (2, {"devices": [0, 1]}, "gpu", [0, 1], None),
        (2, {"devices": "1,"}, "gpu", [1], None),
        (2, {"accelerator": "cpu", "devices": 4}, "cpu", 4, None),
    ],
    indirect=["num_gpus"],
)
def test_devices_are_those_that_are_there_and_a_warning_says_what_was_meant(
    num_gpus: int, given: dict[str, Any], accelerator: str, devices: Any, warning: str | None
) -> None:
    got = resolve_devices(trainer_of(**given), {})
    assert (got.accelerator, got.devices) == (accelerator, devices)
    assert got.world_size == (devices if isinstance(devices, int) else len(devices))
    assert got.warnings == ([] if warning is None else [warning])


@pytest.mark.parametrize(
    ("num_gpus", "given", "message"),
    [
        (2, {"devices": 3}, r"requested gpu: \[0, 1, 2\]\n.*only has: \[0, 1\]"),
        (2, {"devices": "0,2"}, r"requested gpu: \[0, 2\]"),
        (2, {"devices": 0}, "got 0: it names none"),
        (0, {"accelerator": "gpu"}, "GPUs requested but none are available"),
        (0, {"devices": 0}, "should be an int > 0"),
        (0, {"devices": [2, 3]}, "should be an int > 0"),
    ],
    indirect=["num_gpus"],
)
def test_devices_that_are_not_there_are_refused(num_gpus, given, message):
    with pytest.raises(ValueError, match=message):
        resolve_devices(trainer_of(**given), {})


@pytest.mark.parametrize("num_gpus", [1], indirect=True)
def test_where_each_task_sees_one_gpu_the_devices_are_the_tasks(
    num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 0)  # a strategy sets it for the whole process
    of_srun = {"JOB_NAME": "train", "STEP_ID": "0", "NTASKS": "8", "NTASKS_PER_NODE": "4"}
    of_srun |= {"PROCID": "7", "LOCALID": "3", "NODEID": "1"}
    srun = {f"SLURM_{n}": value for n, value in of_srun.items()} | {"CUDA_VISIBLE_DEVICES": "0"}
    for name, value in srun.items():
        monkeypatch.setenv(name, value)
    for devices in ("auto", 4):
        verdict = resolve_devices(trainer_of(devices=devices, num_nodes=2), srun)
        assert (verdict.devices, verdict.world_size) == ([0] * 4, 8)
        assert check_world(verdict.world_size, "ddp", srun) == []
    strategy = Trainer(GPUOfTask(), devices=verdict.devices, num_nodes=2).strategy
    assert (strategy.local_rank, strategy.root_device) == (3, torch.device("cuda:0"))
    assert (strategy.num_processes, strategy.world_size) == (4, 8)
    with pytest.raises(ValueError, match="8 processes .* is 4"):
        check_world(resolve_devices(trainer_of(devices=4), srun).world_size, "ddp", srun)
    del srun["CUDA_VISIBLE_DEVICES"]  # this machine has one GPU, which two ranks cannot share
    assert resolve_devices(trainer_of(), srun).devices == [0]


def test_a_strategy_class_is_known_by_its_name_or_its_options() -> None:
    lightnings = Namespace(class_path="lightning.pytorch.strategies.DeepSpeedStrategy")
    assert strategy_of(lightnings)[0] == "DeepSpeedStrategy"
    given = Namespace(class_path="ReplicatedStrategy", init_args={"start_method": "spawn"})
    assert strategy_of(given)[0] == "ddp_spawn"
    assert strategy_of(Namespace(class_path="ReplicatedStrategy"))[0] is None
    assert strategy_of("fsdp") == ("fsdp", {})


def test_nodes_multiply_the_world() -> None:
    trainer = trainer_of(accelerator="cpu", devices=2, num_nodes=3)
    assert resolve_devices(trainer, {}).world_size == 6
    with pytest.raises(ValueError, match="num_nodes is 3, but no launcher started this process"):
        check(Namespace(trainer=trainer), {}, [])


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "WORLD_SIZE=2"),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}, "SLURM_NTASKS=2"),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS=2"),
    ],
)
def test_a_launched_world_of_another_size_is_refused(environ, variable):
    with pytest.raises(ValueError, match=f"{variable}.*each would train a copy of its own"):
        check_world(1, "auto", environ)
    check_world(2, "ddp", environ)
    with pytest.raises(ValueError, match="starts its own processes"):
        check_world(2, "ddp_spawn", environ)


def test_torchrun_wins_over_slurm_and_a_shell_may_start_what_it_likes() -> None:
    check_world(4, "ddp", {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": "2"})
    check_world(1, "auto", {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"})


@pytest.mark.parametrize("step", [{"SLURM_STEP_ID": "0"}, {}])
def test_one_task_of_slurm_for_two_devices_is_refused_and_two_without_srun_warned_of(
    step: dict[str, str],
) -> None:
    one = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train", **step}
    with pytest.raises(ValueError, match=r"one task .* is 2: rank 0 would train alone"):
        check_world(2, "ddp", one)
    check_world(1, "auto", one)
    check_world(2, "ddp", {**one, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"})
    check_world(2, "ddp", {**one, "SLURM_JOB_NAME": "bash"})
    (warning,) = check_world(2, "ddp", {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    assert "no `srun`" in warning
