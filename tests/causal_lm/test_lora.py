"""Low-rank adapters beside layers that stand still, and freezing by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lit_models.causal_lm.adapters import (
    LoraLinear,
    LoraOptions,
    adapter_files,
    add_lora,
    freeze,
    lora_recipe,
    merged_weights,
    target_layers,
)
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.pretrained import load_network
from tests.causal_lm.folders import packed_logits, saved

CONFIG = DecoderConfig(vocab_size=11, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1)
IDS = torch.tensor([[1, 2, 3, 4]])


def decoder() -> Decoder:
    torch.manual_seed(1)
    return Decoder(CONFIG)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    shape = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**shape, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, intermediate_size=16, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM(config).eval()


def outputs(network: nn.Module) -> Tensor:
    if isinstance(network, Decoder):
        return network(IDS, torch.arange(4)[None], torch.zeros_like(IDS))
    return network(IDS).logits


def with_lora(network: nn.Module, **options: object) -> nn.Module:
    add_lora(network, lora_recipe(network, LoraOptions(**{"targets": ["*"], **options})))
    return network


def trained(network: nn.Module) -> nn.Module:
    """Give the adapters some values, as a training would."""
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
            assert name.endswith(("lora_A", "lora_B"))
    return network


def written(folder: Path, network: nn.Module, **options: object) -> Path:
    """Write the adapters of a network in PEFT's layout."""
    recipe = lora_recipe(network, LoraOptions(rank=2, alpha=6.0, **options))
    add_lora(network, recipe)
    names = {name: name for name in recipe["layers"]}
    config, weights = adapter_files(network, recipe, trained(network).state_dict(), names)
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("make", "targets"),
    [(gpt2, ["c_attn", "mlp.c_proj"]), (llama, ["[qv]_proj", "down_proj"])],
)
def test_peft_computes_the_same(make, targets, tmp_path):
    peft = pytest.importorskip("peft", reason="extra: peft")
    network = make()
    written(tmp_path / "ours", network, targets=targets)
    theirs = peft.PeftModel.from_pretrained(make(), str(tmp_path / "ours")).eval()
    torch.testing.assert_close(outputs(theirs), outputs(network), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_base_of_any_kind_keeps_its_output_and_no_input(kind):
    from transformers.pytorch_utils import Conv1D

    base = nn.Linear(24, 16) if kind == "linear" else Conv1D(16, 24)
    base.requires_grad_(False)
    layer, kept = LoraLinear(base, rank=2, alpha=4.0, dropout=0.0), []
    x = torch.randn(70, 24, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        output = layer(x)
    torch.testing.assert_close(output, base(x), rtol=1e-5, atol=1e-5)
    of_inputs = [t for t in kept if tuple(t.shape) == (70, 24)]
    assert len(of_inputs) == 1  # of the adapter alone
    (gradient,) = torch.autograd.grad(output.sum(), [x])
    (expected,) = torch.autograd.grad(base(x).sum(), [x])
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [decoder, gpt2])
def test_new_adapters_change_nothing_and_only_they_learn(make):
    plain, adapted = make(), with_lora(make())
    assert torch.equal(outputs(adapted), outputs(plain))
    names = {name for name, _ in plain.named_parameters()}
    more = {n for n, _ in adapted.named_parameters()} - names
    assert {n for n, p in adapted.named_parameters() if p.requires_grad} == more
    outputs(adapted).square().sum().backward()
    assert all(p.grad is not None for n, p in adapted.named_parameters() if n in more)
    adapted.load_state_dict(plain.state_dict(), strict=False)  # under the names of the base
    layers = [m for m in adapted.modules() if isinstance(m, LoraLinear)]
    assert len(layers) == {decoder: 14, gpt2: 8}[make]
    for layer in layers:
        bound = layer.lora_A.shape[1] ** -0.5  # of PEFT: Kaiming's with a = sqrt(5)
        assert 0.5 * bound < layer.lora_A.abs().max() <= bound
        assert layer.lora_B.eq(0).all()


@pytest.mark.parametrize("make", [decoder, gpt2])
def test_the_merged_network_computes_the_same(make):
    adapted = trained(with_lora(make(), rank=3, alpha=5.0, dropout=0.5)).eval()
    plain = make()
    assert (outputs(adapted) - outputs(plain)).abs().max() > 0.01
    with torch.device("meta"):
        shape = with_lora(make(), rank=3, alpha=5.0)
    plain.load_state_dict(merged_weights(shape, adapted.state_dict()))
    torch.testing.assert_close(outputs(adapted), outputs(plain), rtol=1e-5, atol=1e-6)


def test_a_hand_worked_layer():
    base = nn.Linear(2, 1)
    layer = LoraLinear(base, rank=1, alpha=3.0, dropout=0.0)
    for parameter, values in (
        (base.weight, [[1.0, 2.0]]),
        (base.bias, [0.5]),
        (layer.lora_A, [[1.0, -1.0]]),
        (layer.lora_B, [[2.0]]),
    ):
        parameter.data = torch.tensor(values)
    # 1 * 3 + 2 * 4 + 0.5, and 3 * 2 * (3 - 4) beside it
    assert layer(torch.tensor([[3.0, 4.0]])).tolist() == [[5.5]]


def test_dropout_hits_the_adapter_alone():
    adapted = trained(with_lora(decoder(), dropout=0.5))
    adapted.train()
    assert not torch.equal(outputs(adapted), outputs(adapted))
    adapted.eval()
    assert torch.equal(outputs(adapted), outputs(adapted))
    assert {type(m) for m in adapted.modules() if isinstance(m, nn.Dropout)} == {nn.Dropout}


def test_a_base_in_bfloat16_has_adapters_in_float32():
    adapted = with_lora(decoder(), base_dtype="bfloat16")
    kinds = {n.rpartition(".")[2]: p.dtype for n, p in adapted.named_parameters()}
    assert kinds == {
        "weight": torch.bfloat16,
        "lora_A": torch.float32,
        "lora_B": torch.float32,
    }
    assert adapted.head.weight is adapted.embedding.weight
    assert outputs(adapted).dtype == torch.bfloat16
    outputs(adapted).sum().backward()
    merged = merged_weights(adapted, adapted.state_dict())
    assert {t.dtype for t in merged.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("kind", "stored"), [("GPT2", "float16"), ("Llama", "bfloat16"), ("Qwen2", "bfloat16")]
)
def test_a_base_read_in_its_own_precision_is_that_of_the_way_by_float32(tmp_path, kind, stored):
    saved(tmp_path, kind).to(getattr(torch, stored)).save_pretrained(tmp_path)
    found = []
    for dtype in (None, torch.float32):
        network = load_network(tmp_path, dtype)
        torch.manual_seed(1)
        found.append(with_lora(network, rank=2, base_dtype="bfloat16"))
    for (name, one), other in zip(found[0].named_parameters(), found[1].parameters(), strict=True):
        assert one.dtype == other.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        assert torch.equal(one, other), name
    logits = [packed_logits(each) for each in found]
    assert all(torch.equal(*pair) for pair in zip(*logits, strict=True))


def test_targets_are_ends_of_names_or_patterns_and_never_the_head():
    network = decoder()
    assert target_layers(network, ["q_proj", "1.feed_forward.*"]) == [
        "layers.0.attention.q_proj",
        "layers.1.attention.q_proj",
        "layers.1.feed_forward.up_proj",
        "layers.1.feed_forward.down_proj",
        "layers.1.feed_forward.gate_proj",
    ]
    assert not any("head" in name for name in target_layers(network, ["*"]))
    assert not any("head" in name for name in target_layers(gpt2(), ["*"]))
    for wrong in ("query", "head", "proj"):
        message = f'lora.targets names "{wrong}", which fits no linear layer.*down_proj.*v_proj'
        with pytest.raises(ValueError, match=message):
            target_layers(network, [wrong])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": []}, "lora.targets names no layer"),
        ({"rank": 0}, "lora.rank must be at least 1 .* got 0 and 16.0"),
        ({"alpha": 0.0}, "lora.alpha above 0, got 8 and 0.0"),
        ({"dropout": 1.0}, "lora.dropout must be 0 to below 1, got 1.0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LoraOptions(**{"targets": ["q_proj"], **options})


@pytest.mark.parametrize(
    ("make", "pattern", "kept", "frozen"),
    [
        (
            decoder,
            "layers.0.*",
            "layers.1.attention.q_proj.weight",
            "layers.0.attention_norm.weight",
        ),
        (decoder, "head.weight", "norm.weight", "embedding.weight"),  # tied: by either of its names
        (gpt2, "transformer.wte.*", "transformer.wpe.weight", "lm_head.weight"),
    ],
)
def test_names_that_fit_a_pattern_are_frozen(make, pattern, kept, frozen):
    network = make()
    freeze(network, [pattern])
    assert network.get_parameter(kept).requires_grad
    assert not network.get_parameter(frozen).requires_grad
    with pytest.raises(ValueError, match='"layer.0.*", which fits no parameter; names are such as'):
        freeze(network, ["layer.0.*"])
