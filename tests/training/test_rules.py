"""What cannot run is refused before any data is read, and nothing falls back silently."""

from typing import Any

import pytest
from jsonargparse import Namespace

from lit_models.training.rules import (
    Machine,
    Settings,
    check,
    check_world,
    resolve_devices,
    strategy_of,
)

STRATEGIES = ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "fsdp"]
NO_GPU, TWO_GPUS = Machine(num_cpus=2, num_gpus=0), Machine(num_cpus=8, num_gpus=2)


@pytest.mark.parametrize(
    ("machine", "given", "accelerator", "devices", "warning"),
    [
        (
            *(NO_GPU, {}, "cpu", 1),
            "devices: auto found no GPU, the run uses 1 CPU process; --trainer.devices=2 uses two",
        ),
        (TWO_GPUS, {}, "gpu", 2, None),
        (TWO_GPUS, {"devices": [0, 1]}, "gpu", [0, 1], None),
        (TWO_GPUS, {"devices": "1,"}, "gpu", [1], None),
        (
            *(NO_GPU, {"accelerator": "cpu", "devices": 4}, "cpu", 4),
            "4 processes share 2 CPU cores: right, but slower than --trainer.devices=2",
        ),
        (NO_GPU, {"accelerator": "cpu", "devices": [2, 3]}, "cpu", 2, None),
    ],
)
def test_devices_are_those_that_are_there_and_a_warning_says_what_was_meant(
    machine: Machine, given: dict[str, Any], accelerator: str, devices: Any, warning: str | None
) -> None:
    got = resolve_devices(Settings(**given), machine)
    assert (got.accelerator, got.devices) == (accelerator, devices)
    assert got.world_size == (devices if isinstance(devices, int) else len(devices))
    assert got.warnings == ([] if warning is None else [warning])


@pytest.mark.parametrize(
    ("machine", "given", "message"),
    [
        (TWO_GPUS, {"devices": 3}, r"=3 asks .* it has 2 GPUs\. Use --trainer\.devices=2; auto"),
        (TWO_GPUS, {"devices": "3"}, "it has 2 GPUs"),
        (TWO_GPUS, {"devices": [0, 2]}, "it has 2 GPUs"),
        (TWO_GPUS, {"devices": "0,2"}, "it has 2 GPUs"),
        (NO_GPU, {"accelerator": "gpu", "devices": 2}, "0 GPUs. Use --trainer.accelerator=cpu"),
        (NO_GPU, {"accelerator": "gpu"}, "trainer.devices=all asks for GPUs"),
        (NO_GPU, {"num_nodes": 0}, "num_nodes must be at least 1, got 0"),
        (NO_GPU, {"devices": 0}, "devices must be a number, auto, .* got 0"),
    ],
)
def test_devices_that_are_not_there_are_refused(
    machine: Machine, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_devices(Settings(**given), machine)


def test_a_strategy_class_is_known_by_its_name_or_its_options() -> None:
    lightnings = Namespace(class_path="lightning.pytorch.strategies.DeepSpeedStrategy")
    assert strategy_of(lightnings)[0] == "DeepSpeedStrategy"
    given = Namespace(class_path="ReplicatedStrategy", init_args={"start_method": "spawn"})
    assert strategy_of(given)[0] == "ddp_spawn"
    assert strategy_of(Namespace(class_path="ReplicatedStrategy"))[0] is None
    assert strategy_of("fsdp") == ("fsdp", {})


def test_nodes_multiply_the_world() -> None:
    assert resolve_devices(Settings(devices=2, num_nodes=3), TWO_GPUS).world_size == 6
    with pytest.raises(ValueError, match="num_nodes is 3, but no launcher started this process"):
        check(Settings(devices=2, num_nodes=3), TWO_GPUS, {}, [])


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}, "WORLD_SIZE=2"),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "train"}, "SLURM_NTASKS=2"),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS=2"),
    ],
)
def test_a_launched_world_of_another_size_is_refused(
    environ: dict[str, str], variable: str
) -> None:
    with pytest.raises(ValueError, match=f"{variable}.*each would train a copy of its own"):
        check_world(1, "auto", environ)
    check_world(2, "ddp", environ)
    with pytest.raises(ValueError, match="starts its own processes"):
        check_world(2, "ddp_spawn", environ)


def test_torchrun_wins_over_slurm_and_a_shell_may_start_what_it_likes() -> None:
    check_world(4, "ddp", {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": "2"})
    check_world(1, "auto", {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"})


@pytest.mark.parametrize("step", [{"SLURM_STEP_ID": "0"}, {}])
def test_one_task_of_slurm_for_two_devices_is_refused(step: dict[str, str]) -> None:
    one = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train", **step}
    with pytest.raises(ValueError, match=r"one task .* is 2: rank 0 would train alone"):
        check_world(2, "ddp", one)
    check_world(1, "auto", one)
    check_world(2, "ddp", {**one, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"})
    check_world(2, "ddp", {**one, "SLURM_JOB_NAME": "bash"})


def test_a_batch_script_without_srun_is_warned_of() -> None:
    (warning,) = check_world(2, "ddp", {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"})
    assert "no `srun`" in warning
