"""What cannot run is refused before any data is read, and nothing falls back silently."""

import re
from typing import Any

import pytest
from jsonargparse import Namespace

from lit_models.training.rules import (
    Machine,
    Settings,
    Verdict,
    check,
    check_world,
    resolve_devices,
    strategy_of,
)

STRATEGIES = ["ddp", "ddp_spawn", "ddp_fork", "ddp_notebook", "fsdp"]
NO_GPU, TWO_GPUS = Machine(num_cpus=2, num_gpus=0), Machine(num_cpus=8, num_gpus=2)


def verdict(machine: Machine, **settings: Any) -> Verdict:
    return resolve_devices(Settings(**settings), machine)


def test_auto_without_a_gpu_is_one_cpu_and_says_so() -> None:
    got = verdict(NO_GPU)
    assert (got.accelerator, got.devices) == ("cpu", 1)
    assert got.warnings[0].startswith("devices: auto found no GPU, the run uses 1 CPU process")


def test_auto_takes_all_gpus() -> None:
    got = verdict(TWO_GPUS)
    assert (got.accelerator, got.devices, got.warnings) == ("gpu", 2, [])


@pytest.mark.parametrize("devices", [3, "3", [0, 2], "0,2"])
def test_more_gpus_than_there_are_is_an_error(devices: Any) -> None:
    with pytest.raises(ValueError, match=r"it has 2 GPUs\. Use --trainer\.devices=2"):
        verdict(TWO_GPUS, devices=devices)


def test_gpus_without_any_point_to_the_cpu() -> None:
    with pytest.raises(ValueError, match="it has 0 GPUs. Use --trainer.accelerator=cpu"):
        verdict(NO_GPU, accelerator="gpu", devices=2)
    with pytest.raises(ValueError, match="trainer.devices=all asks for GPUs"):
        verdict(NO_GPU, accelerator="gpu")


def test_fallback_warns_and_is_recorded() -> None:
    got = verdict(NO_GPU, accelerator="gpu", devices=4, on_missing_devices="fallback")
    assert (got.accelerator, got.devices, got.world_size) == ("cpu", 1, 1)
    assert got.fallback == got.warnings[0]
    assert "trainer.devices=4" in got.fallback
    assert verdict(TWO_GPUS, devices=4, on_missing_devices="fallback").devices == 2


def test_more_cpu_processes_than_cores_is_only_a_warning() -> None:
    got = verdict(NO_GPU, accelerator="cpu", devices=4)
    assert got.devices == 4
    assert got.warnings == [
        "4 processes share 2 CPU cores: right, but slower than --trainer.devices=2"
    ]


def test_named_gpus_are_those_that_are_used() -> None:
    eight = Machine(num_cpus=8, num_gpus=8)
    got = verdict(eight, devices=[2, 3])
    assert (got.accelerator, got.devices, got.world_size) == ("gpu", [2, 3], 2)
    on_cpu = verdict(NO_GPU, accelerator="cpu", devices=[2, 3])
    assert on_cpu.world_size == 2
    assert "names GPUs; on the CPU it means 2 processes" in on_cpu.warnings[0]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("dp", "`dp` is gone; `ddp` or `ddp_spawn` does it, and `fsdp` shards"),
        ("data_parallel", "`data_parallel` is gone"),
        ("fdsp", "no strategy `fdsp`. Did you mean fsdp"),
    ],
)
def test_a_strategy_of_other_times_names_its_successor(name: str, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        check(Settings(strategy=name), NO_GPU, {}, STRATEGIES)


@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_stage_2", "DeepSpeedStrategy", "zero3"])
def test_deepspeed_is_told_what_its_stages_are_under_fsdp(name: str) -> None:
    known = [*STRATEGIES, "deepspeed", "deepspeed_stage_2"]
    told = f"`{name}` is called fsdp here.*ZeRO 3 .*ZeRO 1 and 2 .*_forward=false.*cpu_offload"
    with pytest.raises(ValueError, match=told):
        check(Settings(strategy=name), NO_GPU, {}, known)


def test_lightnings_class_of_deepspeed_is_known_by_its_name() -> None:
    lightnings = Namespace(class_path="lightning.pytorch.strategies.DeepSpeedStrategy")
    assert strategy_of(lightnings)[0] == "DeepSpeedStrategy"


def test_a_strategy_class_that_starts_its_own_processes_is_known_by_its_option() -> None:
    given = Namespace(class_path="ReplicatedStrategy", init_args={"start_method": "spawn"})
    assert strategy_of(given)[0] == "ddp_spawn"
    assert strategy_of(Namespace(class_path="ReplicatedStrategy"))[0] is None
    assert strategy_of("fsdp") == ("fsdp", {})


def test_nodes_multiply_the_world() -> None:
    assert verdict(TWO_GPUS, devices=2, num_nodes=3).world_size == 6
    with pytest.raises(ValueError, match="num_nodes is 3, but no launcher started this process"):
        check(Settings(devices=2, num_nodes=3), TWO_GPUS, {}, [])
    with pytest.raises(ValueError, match="num_nodes must be at least 1, got 0"):
        verdict(NO_GPU, num_nodes=0)
    with pytest.raises(ValueError, match="devices must be a number, auto, .* got 0"):
        verdict(NO_GPU, devices=0)


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
        check_world(1, "auto", environ, [])
    check_world(2, "ddp", environ, [])
    with pytest.raises(ValueError, match="starts its own processes"):
        check_world(2, "ddp_spawn", environ, [])


def test_a_shell_of_an_interactive_allocation_may_start_what_it_likes() -> None:
    check_world(1, "auto", {"SLURM_NTASKS": "2", "SLURM_JOB_NAME": "interactive"}, [])


@pytest.mark.parametrize("step", [{"SLURM_STEP_ID": "0"}, {}])
def test_one_task_of_slurm_for_two_devices_is_refused(step: dict[str, str]) -> None:
    one = {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train", **step}
    with pytest.raises(ValueError, match=r"one task .* is 2: rank 0 would train alone"):
        check_world(2, "ddp", one, [])
    check_world(1, "auto", one, [])
    check_world(2, "ddp", {**one, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"}, [])
    check_world(2, "ddp", {**one, "SLURM_JOB_NAME": "bash"}, [])


def test_torchrun_wins_over_slurm() -> None:
    environ = {"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x", "SLURM_NTASKS": "2"}
    check_world(4, "ddp", environ, [])


def test_a_batch_script_without_srun_is_warned_of() -> None:
    warnings: list[str] = []
    check_world(2, "ddp", {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, warnings)
    assert "no `srun`" in warnings[0]


def test_batch_sizes_must_make_the_global_batch() -> None:
    good = Settings("cpu", 2, global_batch_size=64, micro_batch_size=8)
    assert check(good, NO_GPU, {}, STRATEGIES).world_size == 2
    bad = Settings("cpu", 2, global_batch_size=64, micro_batch_size=8, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="2 devices x micro_batch_size 8 x"):
        check(bad, NO_GPU, {}, STRATEGIES)
    idle = Settings("cpu", 2, global_batch_size=1)
    with pytest.raises(ValueError, match="some would have nothing to do"):
        check(idle, NO_GPU, {}, STRATEGIES)
