"""Export of language models to transformers folders, and of adapters to PEFT folders.

The own decoder is written as the equivalent GPT-2 or Llama; `unisono` reads it back with the
recipe that the folder keeps.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.tokenizers.text import TEXT_RECIPE_KEY, TextTokenizer
from lit_models.causal_lm.adapters import A, B, add_lora, merged_weights
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.pretrained import (
    CONFIG,
    GENERATION,
    PretrainedDecoder,
    network_from_config,
)
from lit_models.run_files import Layout

NetworkOf = Callable[[dict[str, Any]], Any]
NETWORK, MODEL = "network.", "model."  # prefixes of weights in LitCausalLM and PretrainedDecoder
REPLACED = ("network", "pretrained", "lora", "freeze")  # options that the folder's recipe replaces
# Part of our weight name -> part of transformers' name.
GPT2_NAMES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "layers": "transformer.h",
    "attention_norm": "ln_1",
    "attention": "attn",
    "q_proj": "c_attn",
    "k_proj": "c_attn",
    "v_proj": "c_attn",
    "o_proj": "c_proj",
    "feed_forward_norm": "ln_2",
    "feed_forward": "mlp",
    "up_proj": "c_fc",
    "down_proj": "c_proj",
    "norm": "transformer.ln_f",
    "head": "lm_head",
}
LLAMA_NAMES = {
    "embedding": "model.embed_tokens",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "norm": "model.norm",
    "head": "lm_head",
}
FUSED = ("q_proj", "k_proj", "v_proj")  # side by side in GPT-2's c_attn


def model_layout(
    content: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    adapter: bool = False,
    key: str = TEXT_RECIPE_KEY,
    network_of: NetworkOf = network_from_config,
) -> Layout | None:
    """Return the files of a folder that transformers can read, with LoRA merged; `None` for an own
    encoder with decoder, which transformers does not have.

    Args:
        content: of a checkpoint.
        adapter: write only the adapter, in PEFT's layout.
        key: of the recipe in the checkpoint.
        network_of: as in `described_network`.

    Raises:
        ValueError: transformers has no model of the own decoder's shape, or there is no adapter
            that PEFT can apply.
    """
    recipe, is_causal = content[key], key == TEXT_RECIPE_KEY
    network = described_network(recipe, network_of)
    own = {n.removeprefix(NETWORK): t for n, t in weights.items() if n.startswith(NETWORK)}
    if adapter:
        return adapter_layout(network, recipe, own, "CAUSAL_LM" if is_causal else "SEQ_2_SEQ_LM")
    if recipe["network"]["kind"] == "own" and not is_causal:
        return None
    stored = merged_weights(network, own)
    if isinstance(network, Decoder):
        network, stored = equivalent(network.config, stored)
    twins = _twins(network)  # tied weights are stored once
    stored = {n.removeprefix(MODEL): t for n, t in stored.items() if n not in twins}
    dtype = next(t.dtype for t in stored.values() if t.is_floating_point())
    config = {name: value for name, value in network.content.items() if name != "dtype"}
    config["architectures"] = [type(network.model).__name__]
    config["torch_dtype"] = str(dtype).removeprefix("torch.")  # all versions read this name
    tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
    described = recipe["network"]  # older ones lack what the folder of a model hands on
    texts = {CONFIG: config, GENERATION: described.get("generation_config")}
    if is_causal:
        texts = {name: values and _with_ids(values, tokenizer) for name, values in texts.items()}
    reader = "AutoModelForCausalLM" if is_causal else "AutoModelForSeq2SeqLM"
    return Layout(
        stored,
        {name: json_text(values) for name, values in texts.items() if values}
        | tokenizer.hugging_face_files(**described.get("tokenizer_config", {})),
        values={"extra": {key: {**recipe, "lora": None}}},
        replaced=REPLACED,
        reader=f'transformers: {reader}.from_pretrained("{{folder}}")',
    )


def _with_ids(values: Mapping[str, Any], tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the content of a configuration with the tokenizer's special ids; more ends stay."""
    ends, padding = values.get("eos_token_id"), tokenizer.special_tokens.get("pad_token")
    if not (isinstance(ends, list) and {*tokenizer.end_ids} <= {*ends}):
        ends = tokenizer.end_ids if len(tokenizer.end_ids) > 1 else tokenizer.end_id
    return {
        **values,
        "eos_token_id": ends,
        "bos_token_id": tokenizer.begin_id,
        "pad_token_id": None if padding is None else tokenizer.backend.token_to_id(padding),
    }


def restored_weights(
    stored: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    key: str = TEXT_RECIPE_KEY,
    network_of: NetworkOf = network_from_config,
) -> dict[str, Tensor]:
    """Return a module's weights from the stored weights of a `model_layout` folder; its recipe is
    in `extra`. Other args: as in `model_layout`."""
    network = described_network(extra[key], network_of)
    if isinstance(network, Decoder):
        kind, weights = layout_of(network.config), {}
        for name in network.state_dict():
            is_twin = network.config.tied and name == "head.weight"
            weights[name] = part_of(stored, kind, "embedding.weight" if is_twin else name)
    else:
        weights = {f"{MODEL}{name}": tensor for name, tensor in stored.items()}
        weights |= {twin: weights[name] for twin, name in _twins(network).items()}
    return {f"{NETWORK}{name}": tensor.contiguous() for name, tensor in weights.items()}


def described_network(recipe: Mapping[str, Any], network_of: NetworkOf) -> Any:
    """Return a recipe's network with its adapters on the meta device; `network_of` creates the
    network without adapters."""
    with torch.device("meta"):
        network = network_of(recipe["network"])
        if recipe.get("lora"):  # older checkpoints lack the key
            add_lora(network, recipe["lora"])
    return network


def equivalent(
    config: DecoderConfig, weights: Mapping[str, Tensor]
) -> tuple[PretrainedDecoder, dict[str, Tensor]]:
    """Return the GPT-2 or Llama on `meta` that computes what a decoder with these whole weights
    does, and its weights; biases that the decoder lacks are zeros. Raises as `layout_of`."""
    kind = layout_of(config)
    content: dict[str, Any] = {  # the tokenizer's ids are not known here
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": config.tied,
    }
    if kind == "gpt2":
        content |= {
            "n_positions": config.max_positions,
            "n_embd": config.hidden_size,
            "n_layer": config.num_layers,
            "n_head": config.num_heads,
            "n_inner": config.inner_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": config.norm_eps,
            "embd_pdrop": config.dropout,
            "resid_pdrop": config.dropout,
            "attn_pdrop": 0.0,
        }
    else:
        content |= {
            "max_position_embeddings": config.max_positions,
            "hidden_size": config.hidden_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.kv_heads,
            "intermediate_size": config.inner_size,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "rope_theta": config.rope_theta,
            "attention_bias": config.bias,
            "mlp_bias": config.bias,
        }
    with torch.device("meta"):
        network: Any = network_from_config({"kind": "transformers", "config": content})
    like = weights["embedding.weight"]
    stored = {name: like.new_zeros(t.shape) for name, t in network.model.state_dict().items()}
    for name, weight in weights.items():
        part_of(stored, kind, name).copy_(weight)
    return network, {f"{MODEL}{name}": tensor for name, tensor in stored.items()}


def part_of(stored: Mapping[str, Tensor], kind: str, name: str) -> Tensor:
    """Return the part of the stored weights of a layout, `gpt2` or `llama`, that is our weight of
    this name, as a view."""
    names, layer = GPT2_NAMES if kind == "gpt2" else LLAMA_NAMES, name.split(".")[-2]
    part = stored[".".join(names.get(each, each) for each in name.split("."))]
    if kind == "gpt2" and layer in FUSED:
        part = part.chunk(len(FUSED), dim=-1)[FUSED.index(layer)]
    is_transposed = kind == "gpt2" and name.endswith("_proj.weight")  # for its Conv1D
    return part.T if is_transposed else part


def layout_of(config: DecoderConfig) -> str:
    """Return transformers' model type for a decoder's shape; ValueError if there is none."""
    options = (config.norm, config.positions, config.activation)
    if options == ("layer", "learned", "gelu") and config.kv_heads == config.num_heads:
        return "gpt2"
    if options == ("rms", "rotary", "swiglu"):
        return "llama"
    raise ValueError(
        f"neither layout of transformers has norm {config.norm} with positions "
        f"{config.positions}, activation {config.activation} and {config.kv_heads} key heads for "
        f"{config.num_heads}: GPT-2 is layer, learned, gelu and as many key heads, Llama rms, "
        "rotary, swiglu and any number; train one of these to export it."
    )


def _twins(network: nn.Module) -> dict[str, str]:
    """Return name of a tied weight -> name under which the weight is stored."""
    first: dict[int, str] = {}
    names = network.named_parameters(remove_duplicate=False)
    pairs = ((name, first.setdefault(id(parameter), name)) for name, parameter in names)
    return {name: original for name, original in pairs if name != original}


def adapter_layout(
    network: nn.Module, recipe: Mapping[str, Any], weights: Mapping[str, Tensor], task: str
) -> Layout:
    """Return the files of an adapter folder for PEFT and a transformers model.

    Args:
        network: with adapters.
        recipe: of the network.
        weights: of the network, including the adapters.
        task: PEFT's task type.

    Raises:
        ValueError: there is no adapter, or the network is one from scratch.
    """
    lora = recipe.get("lora")
    if not lora:
        raise ValueError(
            "the checkpoint was trained without LoRA and has no adapter; leave --adapter out to "
            "export the whole model."
        )
    if recipe["network"]["kind"] == "own":
        raise ValueError(
            "PEFT applies adapters to models of transformers, and this network is one from "
            "scratch; leave --adapter out to export the whole model."
        )
    names = {name: name.removeprefix(MODEL) for name in lora["layers"]}  # own -> transformers'
    config = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": lora["base"],
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": sorted(names.values()),
        "fan_in_fan_out": any(getattr(m, "is_transposed", False) for m in network.modules()),
        "bias": "none",
        "inference_mode": True,
        "init_lora_weights": True,
    }
    stored = {
        f"base_model.model.{name}.{part}.weight": weights[f"{layer}.{part}"].contiguous()
        for layer, name in names.items()
        for part in (A, B)
    }
    return Layout(
        stored,
        {"adapter_config.json": json_text(config)},
        reader='PEFT: PeftModel.from_pretrained(model, "{folder}")',
        weights_file="adapter_model.safetensors",
        is_whole=False,
    )


def json_text(values: Any) -> str:
    """Return values as JSON in transformers' file format."""
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"
