"""Strategies in a single process: names, options, tensor groups, and refused combinations."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from datamodules.core.plan import PlanRequest
from lit_models.causal_lm.adapters import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.network import Decoder, DecoderConfig, compile_blocks
from lit_models.cli import ParsedCLI
from lit_models.commands.replay import LedgerStep, follow_one_device
from lit_models.config_files import expand_configs
from lit_models.engines import complete_rendezvous
from lit_models.training import AveragedWeights, FailureReport, default_callbacks, sharding, status
from lit_models.training.rules import STRATEGY_CLASSES, check
from lit_models.training.sharding import TensorSplit, check_tensor_plan, planned_layers
from lit_models.training.strategies import (
    FullyShardedStrategy,
    ReplicatedStrategy,
    replicated,
    strategy_name,
)
from tests.toy import LitToy, ToyData, toy_trainer


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
    assert strategy._ddp_kwargs["find_unused_parameters"] == finds
    assert strategy.timeout == timedelta(minutes=10)
    # In scripts, the name keeps Lightning's meaning.
    assert type(StrategyRegistry.get(name)) is DDPStrategy
    assert [replicated(other) for other in ("fsdp", "auto", "ddp_find", None)] == [None] * 4


def test_a_place_outside_its_world_is_refused():
    place = {"RANK": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with pytest.raises(ValueError, match=r"each of 1 node\(s\); got RANK=4 WORLD_SIZE=4"):
        complete_rendezvous(place, num_nodes=1)


def test_the_status_of_a_plain_trainer_is_one_dictionary(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    trainer = toy_trainer(tmp_path, max_epochs=1)
    trainer.fit(LitToy(), ToyData())
    facts = status(trainer)
    assert (facts["strategy"], facts["backend"]) == ("single_device", None)
    assert (facts["world_size"], len(facts["host_rank_device"])) == (1, 1)
    assert facts["visible_devices"] == "2,3"
    assert facts["plan"]["steps_per_epoch"] == 7
    (used,) = facts["memory"]
    assert used["resident_bytes"] > 2**20
    assert used["allocated_bytes"] is None
    json.dumps(facts)  # plain values only


def test_shards_in_the_memory_of_the_host_have_a_group_there(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    both, given = FullyShardedStrategy(cpu_offload=True), {"process_group_backend": "gloo"}
    assert both.process_group_backend == "cpu:gloo,cuda:nccl"
    assert FullyShardedStrategy(cpu_offload=True, **given).process_group_backend == "gloo"
    assert FullyShardedStrategy().process_group_backend is None


def test_shards_in_the_memory_of_the_host_stay_there_and_metrics_go_to_the_gpu(monkeypatch) -> None:
    """The device "meta" stands in for the GPU; torch rejects shards that have been there."""
    monkeypatch.setattr(FullyShardedStrategy, "root_device", torch.device("meta"))
    strategy, module = FullyShardedStrategy(cpu_offload=True), LitToy()
    module.configure_model()
    strategy.model = module
    strategy._fill(module)
    strategy.model_to_device()  # as Lightning does
    assert (module.device.type, module.val_loss.total.device.type) == ("meta", "meta")
    assert {weight.device.type for weight in module.parameters()} == {"cpu"}


@pytest.mark.slow
def test_a_script_s_fsdp_evaluates_beside_nccl_too(tmp_path, own_environment, monkeypatch) -> None:
    """With gloo, Lightning itself turns inference mode off."""
    is_grouped = "lightning.pytorch.loops.utilities._distributed_is_initialized"
    monkeypatch.setattr(is_grouped, lambda: False)
    callbacks = [AveragedWeights(), *default_callbacks()]
    trainer = toy_trainer(tmp_path, strategy="fsdp", callbacks=callbacks, max_steps=1)
    assert strategy_name(trainer.strategy) == "fsdp"
    module, data = LitToy(), ToyData(predict_output=str(tmp_path / "toy.csv"))
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    trainer.predict(module, data, return_predictions=False)
    assert (tmp_path / "toy.csv").exists()


OPTION = "--trainer.strategy.tensor_parallel_size=2"
NAMED = "--trainer.strategy=fsdp"


@pytest.mark.parametrize(
    ("in_file", "given"),
    [("ddp", [NAMED, OPTION]), (None, [OPTION, NAMED]), ("fsdp", [OPTION])],
    ids=["name first", "option first", "name in a file"],
)
def test_the_parsed_strategy_has_the_option(in_file, given, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"trainer: {{max_epochs: 3, strategy: {in_file or 'auto'}}}\n")
    parts = ["--model=tests.toy.LitToy", "--data=tests.toy.ToyData"]
    trainer = ParsedCLI(["fit", "--config", str(path), *given, *parts]).options.trainer
    assert trainer.strategy.class_path == STRATEGY_CLASSES["fsdp"]
    assert trainer.strategy.init_args.tensor_parallel_size == 2
    assert trainer.max_epochs == 3


def test_options_of_a_name_without_a_class_are_an_error_with_the_way_out(tmp_path):
    option = "--trainer.strategy.bucket_cap_mb=50"
    words = "the strategy `ddp_spawn` takes no options.*start_method=spawn"
    with pytest.raises(ValueError, match=words):
        expand_configs(["--trainer.strategy=ddp_spawn", option])
    path = tmp_path / "run.yaml"
    path.write_text("trainer: {strategy: ddp_spawn}\n")
    with pytest.raises(ValueError, match=words):
        expand_configs(["--config", str(path), option])


CPU = torch.device("cpu")


def test_dropout_that_a_group_draws_apart_is_refused():
    strategy = FullyShardedStrategy(tensor_parallel_size=2)
    strategy.connect(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    state = SimpleNamespace(fn=TrainerFn.FITTING)
    words = "tensor_parallel_size is 2, .*dropout 0.1, whose masks.*exact_dropout to true.*or drop"
    with pytest.raises(ValueError, match=words):
        strategy.setup(SimpleNamespace(callbacks=[], strategy=strategy, state=state))


def test_a_replay_has_the_micro_batch_of_a_group(tmp_path):
    request = vars(PlanRequest("x", 101, 16, 3, 2))
    plan = {"request": request, "repeats_first_epoch": False}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    data = SimpleNamespace(micro_batch_size="auto", global_batch_size=None)
    found = LedgerStep(tmp_path, {}, {"world_size": 4, "num_replicas": 2})
    follow_one_device(data, found, {"accumulate_grad_batches": 2})
    assert (data.global_batch_size, data.micro_batch_size) == (16, 4)


LLAMA = DecoderConfig(vocab_size=11, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2)
GPT2 = replace(LLAMA, norm="layer", positions="learned", activation="gelu", bias=True, tied=False)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_matrix_of_a_block_is_split_and_a_pattern_that_fits_nothing_is_refused(config):
    network = Decoder(config)
    plan = network.tensor_plan()
    check_tensor_plan(network, plan, 2)
    split = {id(layer) for _, layer, how in planned_layers(network, plan) if how.style != "input"}
    assert split == {id(m) for m in network.layers.modules() if isinstance(m, nn.Linear)}
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp fits no layer of Decoder"):
        check_tensor_plan(network, {"layers.*.mlp": TensorSplit("input")}, 2)


def with_lora() -> Decoder:
    network = Decoder(LLAMA)
    add_lora(network, lora_recipe(network, LoraOptions(["q_proj"], rank=2)))
    return network


def compiled() -> Decoder:
    network = Decoder(LLAMA)
    compile_blocks(network, "eager")
    return network


def with_heads() -> Decoder:
    return Decoder(replace(LLAMA, num_heads=8, num_kv_heads=4))


@pytest.mark.parametrize(
    ("make", "size", "message"),
    [
        (with_heads, 8, "is 8, but it does not divide num_kv_heads 4; change"),
        (with_lora, 2, r"no plain linear layer \(model.lora\?\); change that, or leave"),
        (compiled, 2, r"blocks are compiled \(model\.computation\.compile\); change"),
        (LitToy, 2, r"LitToy has no tensor_plan\(\), as own decoders.*leave"),
    ],
)
def test_a_network_that_cannot_be_split_is_refused(make, size, message):
    network = make()
    with pytest.raises(ValueError, match=message):
        check_tensor_plan(network, network.tensor_plan(), size)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((2, 1, 0), "tensor_parallel_size is 0, which does not divide"),
        ((6, 1, 4), "tensor_parallel_size is 4, which does not divide .* = 6"),
        ((6, 4, 1), "replicate_size 4 does not divide the 6 devices;"),
        ((12, 4, 2), "replicate_size 4 does not divide the 12 devices / 2 of"),
    ],
)
def test_groups_that_do_not_make_up_the_world_are_refused(groups, message):
    devices, copies, size = groups
    strategy = FullyShardedStrategy(replicate_size=copies, tensor_parallel_size=size)
    strategy.parallel_devices = [CPU] * devices
    with pytest.raises(ValueError, match=message):
        strategy.setup_environment()


@pytest.mark.parametrize(
    ("size", "message"),
    [(2, None), (1, "fewer than|smaller than"), (3, "is 3, which does not divide")],
)
def test_the_check_of_batches_knows_that_a_group_shares_its_samples(size, message):
    options = {"tensor_parallel_size": size}
    strategy = Namespace(class_path="FullyShardedStrategy", init_args=options)
    trainer = Namespace(
        accelerator="cpu", devices=4, num_nodes=1, strategy=strategy, accumulate_grad_batches=1
    )
    four = Namespace(trainer=trainer, data={"init_args": {"global_batch_size": 2}})
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        assert check(four, {}, []).world_size == 4


@mock.patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "7"})
def test_processes_on_gpus_keep_their_last_exchanges_for_the_run_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(ReplicatedStrategy, "root_device", torch.device("cuda", 0))
    monkeypatch.setattr(DDPStrategy, "setup_environment", lambda self: None)
    strategy = ReplicatedStrategy()
    strategy.setup_environment()
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"  # the user's value
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    facts = {"global_rank": 0, "world_size": 2, "default_root_dir": tmp_path}
    FailureReport().setup(SimpleNamespace(strategy=strategy, **facts), LitToy(), "fit")
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/stacks/nccl/rank_"
    assert (tmp_path / "stacks" / "nccl").is_dir()


def test_a_shard_is_that_of_torch_and_is_cut_where_the_whole_lies(own_environment):
    dist.init_process_group("fake", rank=5, world_size=6, store=FakeStore())
    mesh, whole = init_device_mesh("cpu", (2, 3)), torch.arange(70.0).view(7, 10)
    for placements in ([Replicate(), Shard(0)], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        like, expected = (
            distribute_tensor(x, mesh, placements, src_data_rank=None) for x in (-whole, whole)
        )
        found = sharding.sharded_like(whole, like).to_local()
        assert torch.equal(found, expected.to_local())
        elsewhere = sharding.sharded_like(whole.to("meta"), like).to_local()  # no values to send
        assert (elsewhere.is_meta, elsewhere.shape) == (True, found.shape)
