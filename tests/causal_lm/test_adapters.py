"""Adapters in PEFT's layout: written, read, translated, and refused where they do not belong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_models.causal_lm.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapted_recipe,
    adapter_files,
    adapter_of,
    load_adapter,
    read_adapter,
)
from lit_models.causal_lm.lora import LoraOptions, add_lora, lora_recipe, merged_weights
from lit_models.causal_lm.network import Decoder, DecoderConfig
from tests.causal_lm.test_lora import gpt2, outputs, trained

SIZES = {"vocab_size": 11, "hidden_size": 8, "num_layers": 2, "num_heads": 2}
OWN_GPT2 = {"norm": "layer", "positions": "learned", "activation": "gelu", "bias": True}
OWN_GPT2 |= {"max_positions": 8}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, intermediate_size=16, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM(config).eval()


def own(**shape: Any) -> Decoder:
    torch.manual_seed(1)
    return Decoder(DecoderConfig(**SIZES, **shape)).eval()


def own_gpt2() -> Decoder:
    return own(**OWN_GPT2)


def own_llama() -> Decoder:
    return own(num_kv_heads=1, feed_forward=16)


def adapt(network: nn.Module, targets: list[str], **options: Any) -> dict[str, Any]:
    """Add trained adapters; return the recipe."""
    recipe = lora_recipe(network, LoraOptions(targets, rank=2, alpha=6.0, **options))
    add_lora(network, recipe)
    trained(network)
    return recipe


def write(
    folder: Path, network: nn.Module, recipe: dict[str, Any], base: str | None = "models/tiny"
) -> Path:
    adapter = adapter_of(network, {**recipe, "base": base}, network.state_dict())
    config, weights = adapter_files(network, adapter)
    folder.mkdir(exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(weights, folder / ADAPTER_WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (gpt2, ["c_attn", "mlp.c_proj"]),
        (llama, ["q_proj", "down_proj"]),
        (own_llama, ["q_proj", "v_proj", "feed_forward.*"]),
        (own_gpt2, ["q_proj", "v_proj", "o_proj"]),
        (own_gpt2, ["*"]),
    ],
)
def test_an_adapter_that_was_written_is_read_as_it_was(make, targets, tmp_path):
    first = make()
    folder = write(tmp_path / "a", first, adapt(first, targets))
    second = make()
    options = LoraOptions(targets, rank=2, alpha=6.0)
    recipe = adapted_recipe(second, lora_recipe(second, options, "elsewhere/tiny"), folder)
    assert all(size == [2, 6.0] for size in recipe["layers"].values())
    add_lora(second, recipe)
    load_adapter(second, recipe, folder)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )
    assert torch.equal(outputs(second), outputs(first))


def deltas(folder: Path) -> dict[str, Tensor]:
    """What each module of transformers adds to its weight [outputs, inputs]."""
    layers = read_adapter(folder).layers
    return {n: (layer.alpha / len(layer.a)) * layer.b @ layer.a for n, layer in layers.items()}


def test_the_names_are_those_of_transformers(tmp_path):
    network = own_llama()
    folder = write(tmp_path / "a", network, adapt(network, ["*"]))
    theirs = dict(llama().named_modules())
    for name, delta in deltas(folder).items():
        assert delta.shape == theirs[name].weight.shape
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in load_file(
        folder / ADAPTER_WEIGHTS
    )


def test_three_own_layers_become_one_of_three_times_the_rank(tmp_path):
    network = own_gpt2()
    recipe = adapt(network, ["q_proj", "v_proj", "up_proj"])
    folder = write(tmp_path / "a", network, recipe)
    config = json.loads((folder / ADAPTER_CONFIG).read_text())
    fused = "transformer.h.1.attn.c_attn"
    assert config["rank_pattern"] == {fused: 6, fused.replace("1", "0"): 6}
    assert config["alpha_pattern"] == {fused: 18.0, fused.replace("1", "0"): 18.0}
    assert config["fan_in_fan_out"]
    theirs = dict(gpt2().named_modules())
    found = deltas(folder)
    before, after = own_gpt2().state_dict(), merged_weights(network, network.state_dict())
    for block in range(2):
        change = {n: after[n] - before[n] for n in before if n.startswith(f"layers.{block}.")}
        parts = [change[f"layers.{block}.attention.{p}_proj.weight"] for p in "qkv"]
        expected = torch.cat(parts)
        delta = found[f"transformer.h.{block}.attn.c_attn"]
        torch.testing.assert_close(delta, expected, rtol=1e-5, atol=1e-6)
        assert delta.T.shape == theirs[f"transformer.h.{block}.attn.c_attn"].weight.shape
        assert parts[1].eq(0).all()
        up = change[f"layers.{block}.feed_forward.up_proj.weight"]
        torch.testing.assert_close(
            found[f"transformer.h.{block}.mlp.c_fc"], up, rtol=1e-5, atol=1e-6
        )


def test_one_layer_of_transformers_becomes_three_that_share_a(tmp_path):
    theirs = gpt2()
    folder = write(tmp_path / "a", theirs, adapt(theirs, ["c_attn"]))
    network, options = own_gpt2(), LoraOptions(["[qkv]_proj"], rank=2, alpha=6.0)
    recipe = adapted_recipe(network, lora_recipe(network, options), folder)
    before = {n: t.clone() for n, t in network.state_dict().items()}
    add_lora(network, recipe)
    load_adapter(network, recipe, folder)
    merged = merged_weights(network, network.state_dict())
    for block in range(2):
        names = [f"layers.{block}.attention.{part}_proj.weight" for part in "qkv"]
        change = torch.cat([merged[name] - before[name] for name in names])
        delta = deltas(folder)[f"transformer.h.{block}.attn.c_attn"]
        torch.testing.assert_close(change, delta, rtol=1e-5, atol=1e-6)
    again = deltas(write(tmp_path / "b", network, recipe))
    for name, delta in deltas(folder).items():
        torch.testing.assert_close(again[name], delta, rtol=1e-6, atol=1e-7)


def asked(network: nn.Module, folder: Path, base: str | None = None, **options: Any) -> None:
    given = LoraOptions(**{"targets": ["q_proj"], "rank": 2, "alpha": 6.0, **options})
    adapted_recipe(network, lora_recipe(network, given, base), folder)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    network = own_llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"]))
    with pytest.raises(ValueError, match="is of the base models/tiny, but the model is models/big"):
        asked(own_llama(), folder, "models/big")
    wider = Decoder(DecoderConfig(**{**SIZES, "hidden_size": 16}))
    with pytest.raises(ValueError, match="another base: it adapts layers.0.*from 8 to 8.*16 to 16"):
        asked(wider, folder)
    with pytest.raises(ValueError, match="another base: .*model.layers.0.*no such layer.*tiny"):
        asked(own_gpt2(), folder)
    with pytest.raises(ValueError, match="another base: .*no such layer"):
        asked(gpt2(), folder, targets=["c_attn"])


def test_other_values_than_the_adapters_are_refused(tmp_path):
    network = own_llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"]))
    for options in ({"rank": 4}, {"alpha": 1.0}, {"targets": ["q_proj", "v_proj"]}):
        with pytest.raises(ValueError, match=r"has rank 2, alpha 6 on 2 layers \(q_proj\), but"):
            asked(own_llama(), folder, **options)


@pytest.mark.parametrize(
    ("name", "harm", "message"),
    [
        (ADAPTER_CONFIG, None, "holds no adapter_config.json; name the folder"),
        (ADAPTER_WEIGHTS, None, "lacks adapter_model.safetensors"),
        (ADAPTER_CONFIG, lambda b: b[:9], "adapter_config.json is damaged"),
        (ADAPTER_WEIGHTS, lambda b: b[:9], "adapter_model.safetensors is damaged"),
        (ADAPTER_CONFIG, lambda b: b.replace(b"LORA", b"IA3"), "of kind IA3; only LORA"),
        (
            ADAPTER_CONFIG,
            lambda b: b.replace(b'"bias"', b'"use_rslora": true, "bias"'),
            "uses use_rslora, which is beyond LoRA and DoRA",
        ),
        (ADAPTER_WEIGHTS, lambda b: b.replace(b"lora_A", b"lora_X"), "is no LoRA of linear"),
    ],
)
def test_a_damaged_adapter_is_named(name, harm, message, tmp_path):
    network = own_llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"]))
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if harm is not None:
        (folder / name).write_bytes(harm(content))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_adapter(folder)
