"""Adapters in PEFT's layout: written, read, translated, and refused where they do not belong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lit_models.causal_lm.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    LoraOptions,
    adapted_recipe,
    adapter_files,
    add_lora,
    load_adapter,
    lora_recipe,
    read_adapter,
)
from tests.causal_lm.test_lora import gpt2, outputs, trained


def llama(hidden_size: int = 8) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = {"hidden_size": hidden_size, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=11, intermediate_size=16, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM(config).eval()


def adapt(network: nn.Module, targets: list[str], **options: Any) -> dict[str, Any]:
    """Add trained adapters; return the recipe."""
    recipe = lora_recipe(network, LoraOptions(targets, rank=2, alpha=6.0, **options))
    add_lora(network, recipe)
    trained(network)
    return recipe


def write(
    folder: Path, network: nn.Module, recipe: dict[str, Any], base: str | None = "models/tiny"
) -> Path:
    names = {name: name for name in recipe["layers"]}
    config, weights = adapter_files(network, {**recipe, "base": base}, network.state_dict(), names)
    folder.mkdir(exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config))
    save_file(weights, folder / ADAPTER_WEIGHTS)
    return folder


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (gpt2, ["c_attn", "mlp.c_proj"]),
        (llama, ["q_proj", "down_proj"]),
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


def asked(network: nn.Module, folder: Path, base: str | None = None, **options: Any) -> None:
    given = LoraOptions(**{"targets": ["q_proj"], "rank": 2, "alpha": 6.0, **options})
    adapted_recipe(network, lora_recipe(network, given, base), folder)


def test_an_adapter_of_another_base_is_refused(tmp_path):
    network = llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"]))
    with pytest.raises(ValueError, match="is of the base models/tiny, but the model is models/big"):
        asked(llama(), folder, "models/big")
    with pytest.raises(ValueError, match="base: it adapts model.layers.0.*from 8 to 8.*16 to"):
        asked(llama(16), folder)
    with pytest.raises(ValueError, match="another base: .*model.layers.0.*no such layer.*tiny"):
        asked(gpt2(), folder, targets=["c_attn"])


def test_other_values_than_the_adapters_are_refused(tmp_path):
    network = llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"]))
    for options in ({"rank": 4}, {"alpha": 1.0}, {"targets": ["q_proj", "v_proj"]}):
        with pytest.raises(ValueError, match=r"has rank 2, alpha 6 on 2 layers \(q_proj\), but"):
            asked(llama(), folder, **options)


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
    network = llama()
    folder = write(tmp_path / "a", network, adapt(network, ["q_proj"]))
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if harm is not None:
        (folder / name).write_bytes(harm(content))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        read_adapter(folder)
