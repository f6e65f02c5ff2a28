"""Which layers a tensor group shares: the plan against a plain reference, and what is refused."""

import copy
from dataclasses import replace

import pytest
import torch
from jsonargparse import Namespace
from torch import nn

from lit_models.causal_lm.attention import Documents
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.lora import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.network import Decoder
from lit_models.training import rules
from lit_models.training.callbacks.topology import print_banner
from lit_models.training.ledger import without_samples
from lit_models.training.rules import Machine, Settings, check
from lit_models.training.sharding import Split, check_tensor_plan, planned_layers
from lit_models.training.strategies import FullyShardedStrategy, check_groups
from tests.toy import LitToy
from tests.training.test_progress import FACTS

LLAMA = DecoderConfig(vocab_size=11, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2)
GPT2 = replace(LLAMA, norm="layer", positions="learned", activation="gelu", bias=True, tied=False)


def part_of(network: Decoder, rank: int, size: int) -> Decoder:
    """Return what one device of a group has, cut by hand."""
    part = copy.deepcopy(network)
    for _, layer, split in planned_layers(part, part.tensor_plan()):
        if split.style == "input":
            continue
        axis = {"columns": 0, "rows": 1}[split.style]
        layer.weight = nn.Parameter(layer.weight.chunk(size, axis)[rank])
        if layer.bias is not None and split.style == "columns":
            layer.bias = nn.Parameter(layer.bias.chunk(size)[rank])
        elif layer.bias is not None and rank:
            nn.init.zeros_(layer.bias)  # it is added once
    return part


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_the_parts_of_all_devices_add_up_to_the_whole(config):
    torch.manual_seed(0)
    network = Decoder(config).double()
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    hidden = torch.randn(2, 5, 16, dtype=torch.float64)
    parts = [part_of(network, rank, 2) for rank in range(2)]
    arguments = (hidden, None, Documents())
    whole = network.layers[0].attention(*arguments)
    added = sum(part.layers[0].attention(*arguments) for part in parts)
    torch.testing.assert_close(added, whole, rtol=1e-12, atol=1e-12)
    whole = network.layers[0].feed_forward(hidden)
    added = sum(part.layers[0].feed_forward(hidden) for part in parts)
    torch.testing.assert_close(added, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_every_matrix_of_a_block_is_split(config):
    network = Decoder(config)
    plan = network.tensor_plan()
    check_tensor_plan(network, plan, 2)
    split = {id(layer) for _, layer, how in planned_layers(network, plan) if how.style != "input"}
    assert split == {id(m) for m in network.layers.modules() if isinstance(m, nn.Linear)}


def test_a_size_that_cuts_heads_is_refused_with_those_that_do_not():
    network = Decoder(replace(LLAMA, num_heads=8, num_kv_heads=4))
    with pytest.raises(ValueError, match="8 does not divide num_kv_heads 4; sizes .*: 1, 2, 4"):
        check_tensor_plan(network, network.tensor_plan(), 8)


def test_a_module_without_a_plan_is_told_who_has_one():
    module = LitToy()
    with pytest.raises(ValueError, match=r"LitToy has no tensor_plan\(\).*LitCausalLM"):
        check_tensor_plan(module, module.tensor_plan(), 2)


def test_adapters_are_refused():
    network = Decoder(LLAMA)
    add_lora(network, lora_recipe(network, LoraOptions(["q_proj"], rank=2)))
    with pytest.raises(ValueError, match="only plain linear layers can be split. Leave out"):
        check_tensor_plan(network, network.tensor_plan(), 2)


def test_compiled_blocks_are_refused():
    network = Decoder(LLAMA)
    network.compile_blocks(backend="eager")
    with pytest.raises(ValueError, match=r"blocks are compiled.*computation\.compile to false"):
        check_tensor_plan(network, network.tensor_plan(), 2)


def test_a_pattern_that_fits_nothing_is_an_error():
    with pytest.raises(ValueError, match=r"layers\.\*\.mlp fits no layer of Decoder"):
        check_tensor_plan(Decoder(LLAMA), {"layers.*.mlp": Split("input")}, 2)


def test_groups_that_do_not_make_up_the_world_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        FullyShardedStrategy(tensor_parallel_size=0)
    with pytest.raises(ValueError, match="tensor_parallel_size is 4, which does not divide .* = 6"):
        check_groups(6, 1, 4)
    with pytest.raises(ValueError, match="replicate_size 4 does not divide the 6 devices;"):
        check_groups(6, 4, 1)
    with pytest.raises(ValueError, match="replicate_size 4 does not divide the 12 devices / 2 of"):
        check_groups(12, 4, 2)
    check_groups(8, 2, 2)


def test_the_check_of_batches_knows_that_a_group_shares_its_samples():
    given = Namespace(class_path="FullyShardedStrategy", init_args={"tensor_parallel_size": 2})
    size = rules.strategy_of(given)[1]["tensor_parallel_size"]
    four = Settings(
        accelerator="cpu", devices=4, strategy=None, global_batch_size=2, tensor_parallel_size=size
    )
    machine = Machine(num_cpus=4, num_gpus=0)
    assert check(four, machine, {}, []).world_size == 4
    with pytest.raises(ValueError, match="fewer than|smaller than"):
        check(replace(four, tensor_parallel_size=1), machine, {}, [])
    with pytest.raises(ValueError, match="tensor_parallel_size is 3, which does not divide"):
        check(replace(four, tensor_parallel_size=3), machine, {}, [])


def test_a_rank_that_repeats_samples_keeps_its_wishes():
    vector = torch.arange(1.0, 10.0, dtype=torch.float64)
    assert without_samples(vector).tolist() == [1.0, 2.0, 3.0, 0, 0, 0, 0, 0, 0]


def test_the_banner_counts_groups_not_devices(capsys):
    facts = {**FACTS, "tensor_parallel_size": 2, "world_size": 4}
    print_banner(facts, "runs/demo")
    shown = capsys.readouterr().out
    assert "4 (ddp, tensor parallel 2, gloo" in shown
    assert "= 2 tensor groups x 8 x 4 accumulated" in shown
