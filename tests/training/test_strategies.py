"""Options of the strategies that need no second process, and what is refused before one starts."""

import json
import os
import signal
import subprocess
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from lit_models.training import status
from lit_models.training.rules import complete_rendezvous
from lit_models.training.strategies import (
    FullyShardedStrategy,
    ReplicatedStrategy,
    is_stopped,
    replicated,
    strategy_name,
)
from tests.toy import LitToy, ToyData, toy_trainer

KINDS = [ReplicatedStrategy, FullyShardedStrategy]


@pytest.mark.parametrize("kind", KINDS)
def test_mpi_without_mpi_is_refused_before_a_process_starts(kind):
    with pytest.raises(ValueError, match="was built without MPI. Use gloo"):
        Trainer(accelerator="cpu", devices=2, strategy=kind(process_group_backend="mpi"))


@pytest.mark.parametrize("kind", KINDS)
def test_nccl_on_the_cpu_is_refused(kind):
    strategy = kind(process_group_backend="nccl")
    Trainer(accelerator="cpu", devices=1, strategy=strategy)
    with pytest.raises(ValueError, match="nccl, which joins GPUs, but the run is on cpu; use gloo"):
        strategy.setup_environment()


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_backend_is_refused(kind):
    with pytest.raises(ValueError, match="must be one of gloo, nccl, mpi, got gluu"):
        kind(process_group_backend="gluu")
    kind(process_group_backend="gloo")


@pytest.mark.parametrize(
    ("name", "start_method", "finds"),
    [
        ("ddp", "popen", False),
        ("ddp_spawn", "spawn", False),
        ("ddp_notebook", "fork", False),
        ("ddp_find_unused_parameters_true", "popen", True),
        ("ddp_spawn_find_unused_parameters_true", "spawn", True),
    ],
)
def test_the_names_of_ddp_mean_these_options(name, start_method, finds):
    strategy = replicated(name)
    assert strategy_name(strategy) == ("ddp" if start_method == "popen" else f"ddp_{start_method}")
    assert strategy.ddp_options["find_unused_parameters"] == finds
    assert strategy.timeout == timedelta(minutes=10)
    # For scripts the name means what it does to Lightning.
    assert type(StrategyRegistry.get(name)) is DDPStrategy


@pytest.mark.parametrize("name", ["fsdp", "auto", "ddp_find", None])
def test_other_names_are_not_of_ddp(name):
    assert replicated(name) is None


def test_a_script_finds_fsdp_on_a_cpu_by_its_name():
    trainer = Trainer(accelerator="cpu", devices=1, strategy="fsdp", logger=False)
    assert type(trainer.strategy) is FullyShardedStrategy
    assert strategy_name(trainer.strategy) == "fsdp"


def test_a_rank_started_by_hand_gets_the_rest_of_its_place():
    environ = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    complete_rendezvous(environ, num_nodes=2)
    assert (environ["NODE_RANK"], environ["LOCAL_RANK"]) == ("1", "1")
    launched = {"RANK": "3", "LOCAL_RANK": "0"}
    complete_rendezvous(launched, num_nodes=1)
    assert launched == {"RANK": "3", "LOCAL_RANK": "0"}
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    complete_rendezvous(alone, num_nodes=1)
    assert alone == {"RANK": "0", "WORLD_SIZE": "1"}


def test_a_process_that_is_stopped_is_told_from_one_that_runs():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_stopped(child.pid)
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert is_stopped(child.pid)
    finally:
        child.kill()
        child.wait()


def test_half_a_rendezvous_is_refused():
    with pytest.raises(ValueError, match="RANK=0 is set but WORLD_SIZE, MASTER_PORT is not"):
        complete_rendezvous({"RANK": "0", "MASTER_ADDR": "localhost"}, num_nodes=1)
    whole = {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with pytest.raises(ValueError, match="RANK=2 of WORLD_SIZE=2: ranks count from 0"):
        complete_rendezvous(whole, num_nodes=1)
    with pytest.raises(ValueError, match="RANK=5 of WORLD_SIZE=2: ranks count from 0"):
        complete_rendezvous({**whole, "RANK": "5", "LOCAL_RANK": "0"}, num_nodes=1)
    with pytest.raises(ValueError, match="MASTER_ADDR=nowhere.invalid is no machine"):
        complete_rendezvous({**whole, "RANK": "1", "MASTER_ADDR": "nowhere.invalid"}, num_nodes=1)


def test_the_status_of_a_plain_trainer_is_one_dictionary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    trainer = toy_trainer(tmp_path, max_epochs=1)
    trainer.fit(LitToy(), ToyData())
    facts = status(trainer)
    assert (facts["strategy"], facts["backend"]) == ("SingleDeviceStrategy", None)
    assert (facts["world_size"], len(facts["host_rank_device"])) == (1, 1)
    assert facts["visible_devices"] == "2,3"
    assert facts["plan"]["steps_per_epoch"] == 7
    (used,) = facts["memory"]
    assert used["resident_bytes"] > 2**20
    assert used["allocated_bytes"] is None
    json.dumps(facts)  # plain values


OPTIONS = """
trainer:
  devices: 2
  sync_batchnorm: true
  strategy:
    class_path: lit_models.training.strategies.ReplicatedStrategy
    init_args:
      process_group_backend: gloo
      timeout: 0:01:30
      start_method: spawn
      find_unused_parameters: true
      gradient_as_bucket_view: true
      broadcast_buffers: false
      bucket_cap_mb: 10
      static_graph: true
"""


def test_every_option_is_a_key_of_a_yaml(unisono, toy_config: Path) -> None:
    overlay = toy_config.with_name("overlay.yaml")
    overlay.write_text(OPTIONS)
    given = ["--config", "toy.yaml", "--config", "overlay.yaml"]
    status_, output = unisono("fit", *given, "--print_config")
    assert status_ == 0, output
    shown = yaml.safe_load(output.partition("seed_everything")[2].partition("\n")[2])["trainer"]
    expected = yaml.safe_load(OPTIONS)["trainer"]
    assert shown["sync_batchnorm"] is True
    wanted = {**expected["strategy"]["init_args"], "timeout": "0:01:30"}
    assert {**shown["strategy"]["init_args"], "timeout": "0:01:30"} == wanted
    status_, output = unisono("fit", *given, "--trainer.strategy.static_grap=true")
    assert status_ == 2
    assert "Did you mean" in output
    assert "static_graph" in output


def test_deepspeed_with_options_is_told_what_fsdp_does(unisono, toy_config: Path) -> None:
    given = ["--trainer.strategy=deepspeed", "--trainer.strategy.stage=2"]
    status_, output = unisono("fit", "--config", "toy.yaml", *given)
    assert status_ == 2
    assert "`deepspeed` is called fsdp here" in output
