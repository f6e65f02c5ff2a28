"""A language model's checkpoint as a folder of transformers, or its adapter as one of PEFT."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from datamodules.tokenizers.text_tokenizer import TextTokenizer
from datamodules.tokenizers.wanted import TEXT_RECIPE_KEY
from lit_models.causal_lm.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_files,
    adapter_of,
)
from lit_models.causal_lm.layouts import hugging_face_files, read_hugging_face
from lit_models.causal_lm.lora import add_lora, merged_weights
from lit_models.causal_lm.model_folders import CONFIG
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.pretrained import Network, network_from_config
from lit_models.training.export import Layout

NETWORK, MODEL = "network.", "model."  # where LitCausalLM and PretrainedDecoder keep theirs
REPLACED = ("network", "pretrained", "lora", "freeze")  # which the recipe of the folder replaces


def model_layout(
    content: Mapping[str, Any], weights: Mapping[str, Tensor], adapter: bool = False
) -> Layout:
    """Return the files of a folder that transformers reads alone, LoRA merged.

    Args:
        content: of a checkpoint of LitCausalLM.
        weights: of the module.
        adapter: the adapter alone instead, as PEFT reads it.

    Raises:
        ValueError: transformers has no model of the own decoder's shape, or there is no adapter.
    """
    recipe = content[TEXT_RECIPE_KEY]
    network = described_network(recipe)
    own = {n.removeprefix(NETWORK): t for n, t in weights.items() if n.startswith(NETWORK)}
    if adapter:
        return _adapter_layout(network, recipe, own)
    config, stored = _model_files(network, merged_weights(network, own))
    tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
    config |= _special_ids(config, tokenizer)
    return Layout(
        stored,
        {CONFIG: _text(config), **tokenizer.hugging_face_files()},
        values={"extra": {TEXT_RECIPE_KEY: {**recipe, "lora": None}}},
        replaced=REPLACED,
        reader='transformers: AutoModelForCausalLM.from_pretrained("{folder}")',
    )


def restored_weights(
    folder: Path, stored: Mapping[str, Tensor], recipe: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the weights of LitCausalLM from a folder of `model_layout`.

    Args:
        folder: with its config.json.
        stored: its tensors.
        recipe: of the folder.
    """
    network = described_network(recipe)
    if isinstance(network, Decoder):
        _, weights = read_hugging_face(folder, dtype=None)
    else:
        weights = {f"{MODEL}{name}": tensor for name, tensor in stored.items()}
        weights |= {twin: weights[name] for twin, name in _twins(network).items()}
    return {f"{NETWORK}{name}": tensor for name, tensor in weights.items()}


def described_network(recipe: Mapping[str, Any]) -> Network:
    """Return the network of a recipe with its adapters, without values (on the meta device)."""
    with torch.device("meta"):
        network = network_from_config(recipe["network"])
        if recipe.get("lora"):
            add_lora(network, recipe["lora"])
    return network


def _model_files(
    network: Network, weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what config.json and model.safetensors hold."""
    if isinstance(network, Decoder):
        return hugging_face_files(network.config, weights)
    twins = _twins(network)
    stored = {n.removeprefix(MODEL): t for n, t in weights.items() if n not in twins}
    dtype = next(t.dtype for t in stored.values() if t.is_floating_point())
    config = {name: value for name, value in network.content.items() if name != "dtype"}
    config["architectures"] = [type(network.model).__name__]
    return config | {"torch_dtype": str(dtype).removeprefix("torch.")}, stored  # in every version


def _twins(network: Network) -> dict[str, str]:
    """Return name -> name of the weight that it is tied to."""
    first: dict[int, str] = {}
    names = network.named_parameters(remove_duplicate=False)
    pairs = ((name, first.setdefault(id(parameter), name)) for name, parameter in names)
    return {name: original for name, original in pairs if name != original}


def _special_ids(config: Mapping[str, Any], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the ids with which texts of this tokenizer begin and end."""
    ends = config.get("eos_token_id")
    is_one_of_several = isinstance(ends, list) and tokenizer.end_id in ends
    ids = {"eos_token_id": ends if is_one_of_several else tokenizer.end_id}
    padding = dict(tokenizer.special_tokens).get("pad_token")
    return {
        **ids,
        "bos_token_id": tokenizer.begin_id,
        "pad_token_id": None if padding is None else tokenizer.backend.token_to_id(padding),
    }


def _adapter_layout(
    network: Network, recipe: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Layout:
    if not recipe.get("lora"):
        raise ValueError(
            "the checkpoint was trained without LoRA and has no adapter; leave --adapter out to "
            "export the whole model."
        )
    config, stored = adapter_files(network, adapter_of(network, recipe["lora"], weights))
    return Layout(
        stored,
        {ADAPTER_CONFIG: _text(config)},
        reader='PEFT: PeftModel.from_pretrained(model, "{folder}"), or --model.lora.adapter='
        "{folder}",
        weights_file=ADAPTER_WEIGHTS,
        is_whole=False,
    )


def _text(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
