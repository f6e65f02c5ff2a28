"""config.json of GPT-2 and Llama, to the shape of the own decoder and back."""

from dataclasses import asdict
from typing import Any

from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.rotary import RopeScaling

LLAMA_THETA, LLAMA_EPS, GPT2_EPS = 10_000.0, 1e-6, 1e-5  # transformers' defaults


def obstacle(content: dict[str, Any]) -> str | None:
    """Return why the own decoder cannot compute this config.json, or none if it can."""
    wanted: dict[str, tuple[Any, ...]]  # option -> values that it can take, the default first
    if content["model_type"] == "gpt2":
        wanted = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
    elif content["model_type"] == "llama":
        heads, width = content.get("num_attention_heads", 32), content.get("hidden_size", 4096)
        wanted = {
            "hidden_act": ("silu", "swish"),
            "head_dim": (None, heads and width // heads),
            "mlp_bias": (False, content.get("attention_bias", False)),
            "attention_bias": (False, content.get("mlp_bias", False)),
        }
        rope = _rope(content)
        if rope["rope_type"] not in ("default", "llama3"):
            return f"rope type {rope['rope_type']}, not default or llama3"
        if rope.get("partial_rotary_factor", 1) != 1:
            return f"partial_rotary_factor {rope['partial_rotary_factor']}, not 1"
    else:
        return f"model_type {content['model_type']}, not gpt2 or llama"
    if content.get("quantization_config"):
        return "quantised weights"
    for option, values in wanted.items():
        if content.get(option, values[0]) not in values:
            return f"{option} {content[option]}, not {values[-1]}"
    return None


def decoder_config(content: dict[str, Any], source: str) -> DecoderConfig:
    """Return the shape of the own decoder that computes a config.json.

    Args:
        content: of the file.
        source: the folder, for the message.

    Raises:
        ValueError: the own decoder cannot compute it, or the file lacks a size.
    """
    reason = obstacle(content)
    if reason is not None:
        raise ValueError(
            f"{source} has {reason}: the own decoder cannot compute it; read it with backend: "
            "transformers."
        )
    try:
        return _gpt2_shape(content) if content["model_type"] == "gpt2" else _llama_shape(content)
    except KeyError as error:
        raise ValueError(
            f"config.json of {source} lacks {error}; copy or download it again."
        ) from error


def _gpt2_shape(content: dict[str, Any]) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=content["vocab_size"],
        max_positions=content["n_positions"],
        hidden_size=content["n_embd"],
        num_layers=content["n_layer"],
        num_heads=content["n_head"],
        feed_forward=content.get("n_inner") or 4 * content["n_embd"],
        norm="layer",
        norm_eps=content.get("layer_norm_epsilon", GPT2_EPS),
        positions="learned",
        activation="gelu",
        bias=True,
        tied=content.get("tie_word_embeddings", True),
    )


def _llama_shape(content: dict[str, Any]) -> DecoderConfig:
    rope = _rope(content)
    scaling = None
    if rope.get("rope_type") == "llama3":
        scaling = RopeScaling(**{name: rope[name] for name in RopeScaling.__dataclass_fields__})
    return DecoderConfig(
        vocab_size=content["vocab_size"],
        max_positions=content["max_position_embeddings"],
        hidden_size=content["hidden_size"],
        num_layers=content["num_hidden_layers"],
        num_heads=content["num_attention_heads"],
        num_kv_heads=content.get("num_key_value_heads"),
        feed_forward=content["intermediate_size"],
        norm_eps=content.get("rms_norm_eps", LLAMA_EPS),
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=scaling,
        bias=bool(content.get("attention_bias")),
        tied=content.get("tie_word_embeddings", False),
    )


def _rope(content: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary options: transformers 5 has them together, 4 in two places."""
    scaling = content.get("rope_parameters") or content.get("rope_scaling") or {}
    rope = {"rope_theta": content.get("rope_theta") or LLAMA_THETA, **scaling}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return rope


def layout_content(config: DecoderConfig, dtype: str) -> dict[str, Any]:
    """Return the content of a config.json for the own decoder.

    Args:
        config: its vocab_size is known.
        dtype: name of the weights' dtype, such as float32.

    Raises:
        ValueError: neither layout can express the shape.
    """
    is_gpt2 = layout_of(config) == "gpt2"
    content = _gpt2_content(config) if is_gpt2 else _llama_content(config)
    ends = {"bos_token_id": None, "eos_token_id": None}  # the tokenizer's, which is not known here
    return {**content, **ends, "tie_word_embeddings": config.tied, "torch_dtype": dtype}


def _gpt2_content(config: DecoderConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocab_size,
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


def _llama_content(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "intermediate_size": config.inner_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **asdict(scaling)},
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
    }


def layout_of(config: DecoderConfig) -> str:
    """Return gpt2 or llama.

    Raises:
        ValueError: neither has these options together.
    """
    gpt2 = {"norm": "layer", "positions": "learned", "activation": "gelu"}
    llama = {"norm": "rms", "positions": "rotary", "activation": "swiglu"}
    for name, options in (("gpt2", gpt2), ("llama", llama)):
        if all(getattr(config, option) == value for option, value in options.items()):
            if name == "gpt2" and config.kv_heads != config.num_heads:
                break
            return name
    raise ValueError(
        f"neither layout of transformers has norm {config.norm} with positions "
        f"{config.positions}, activation {config.activation} and {config.kv_heads} key heads for "
        f"{config.num_heads}: GPT-2 is layer, learned, gelu and as many key heads, Llama rms, "
        "rotary, swiglu and any number; train one of these to export it."
    )
