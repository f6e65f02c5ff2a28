"""GPT-2 and Llama as transformers stores them, to the own decoder's weights and back.

Shapes: D hidden.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.layout_configs import (
    decoder_config,
    layout_content,
    layout_of,
)
from lit_models.causal_lm.model_folders import read_config, read_weights
from lit_models.causal_lm.network import Decoder

# Part of an own name -> part of theirs.
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
NAMES = {"gpt2": GPT2_NAMES, "llama": LLAMA_NAMES}
PREFIXES = {"gpt2": "transformer.", "llama": "model."}
FUSED = ("q_proj", "k_proj", "v_proj")  # side by side in GPT-2's c_attn
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # of old files; no weights
KEY_BIAS = "attention.k_proj.bias"  # which the own decoder has not


class Place(NamedTuple):
    """Where a layout keeps a weight.

    Args:
        name: of the stored tensor.
        third: which third of its last axis; none where it is the whole tensor.
        is_transposed: it is stored as [in, out].
    """

    name: str
    third: int | None
    is_transposed: bool

    def shape(self, own: torch.Size) -> list[int]:
        """Return the shape of the stored tensor for that of the own weight."""
        sizes = list(reversed(own)) if self.is_transposed else list(own)
        return sizes if self.third is None else [*sizes[:-1], 3 * sizes[-1]]


def read_hugging_face(
    folder: str | Path, dtype: torch.dtype | None = torch.float32
) -> tuple[DecoderConfig, dict[str, Tensor]]:
    """Return shape and weights of a GPT-2 or Llama folder, under the names of `Decoder`.

    Key biases of GPT-2 are left out: they add the same to all scores of a query, which the softmax
    ignores. Dropout is 0, whatever the file says.

    Args:
        folder: config.json, and one or more safetensors files.
        dtype: of the weights; none keeps that of the files.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged, the model is another than the own decoder can compute, or
            weights are missing, too many or of the wrong shape.
    """
    content = read_config(folder)
    config, model_type = decoder_config(content, str(folder)), content["model_type"]
    stored = _with_prefix(read_weights(folder), PREFIXES[model_type])
    if config.tied:
        _drop_tied_head(stored, NAMES[model_type], str(folder))
    shapes = _layout_shapes(model_type, config)
    _check_stored(model_type, shapes, stored, str(folder))
    weights: dict[str, Tensor] = {}
    for name in shapes:
        weight = _taken(stored, _place(model_type, name))
        if not name.endswith(KEY_BIAS):
            weights[name] = weight.to(dtype or weight.dtype, copy=True)  # off the file
        elif model_type == "llama" and weight.any():  # with rotary positions they matter
            raise ValueError(
                f"{folder} has key biases, which the own decoder has not; read it with backend: "
                "transformers."
            )
    if config.tied:
        weights["head.weight"] = weights["embedding.weight"]
    return config, weights


def hugging_face_files(
    config: DecoderConfig, weights: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what config.json and model.safetensors of a GPT-2 or Llama folder hold.

    Biases that the layout has and the decoder has not are zeros.

    Args:
        config: of the decoder; its vocab_size is known.
        weights: its state_dict, whole tensors.

    Raises:
        ValueError: neither layout can express the shape.
    """
    model_type = layout_of(config)
    like = weights["embedding.weight"]
    parts: dict[str, list[Tensor]] = defaultdict(list)  # of a stored tensor, in their order
    for name, shape in _layout_shapes(model_type, config).items():
        weight = weights[name] if name in weights else like.new_zeros(shape)
        place = _place(model_type, name)
        parts[place.name].append(weight.detach().T if place.is_transposed else weight.detach())
    stored = {name: torch.cat(tensors, dim=-1) for name, tensors in parts.items()}
    return layout_content(config, str(like.dtype).removeprefix("torch.")), stored


def _layout_shapes(model_type: str, config: DecoderConfig) -> dict[str, torch.Size]:
    """Return the shapes of all weights that a layout has, under own names; q, k, v in order."""
    has_bias = config.bias or model_type == "gpt2"
    with torch.device("meta"):
        decoder = Decoder(replace(config, bias=has_bias))
    shapes = {name: tensor.shape for name, tensor in decoder.state_dict().items()}
    if config.tied:
        del shapes["head.weight"]
    if not has_bias:
        return shapes
    with_keys: dict[str, torch.Size] = {}
    for name, shape in shapes.items():
        if name.endswith("v_proj.bias"):
            with_keys[name.replace("v_proj", "k_proj")] = shape
        with_keys[name] = shape
    return with_keys


def _place(model_type: str, name: str) -> Place:
    names, parts = NAMES[model_type], name.split(".")
    their_name = ".".join(names.get(part, part) for part in parts)
    if model_type == "llama":
        return Place(their_name, None, False)
    third = FUSED.index(parts[-2]) if parts[-2] in FUSED else None
    return Place(their_name, third, name.endswith("_proj.weight"))  # stored for its Conv1D


def _taken(stored: dict[str, Tensor], place: Place) -> Tensor:
    tensor = stored[place.name]
    if place.third is not None:
        tensor = tensor.chunk(len(FUSED), dim=-1)[place.third]
    return (tensor.T if place.is_transposed else tensor).contiguous()


def _with_prefix(stored: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the weights under the names that a model with a head has; constants are left out."""
    return {
        name if name.startswith((prefix, "lm_head.")) else prefix + name: tensor
        for name, tensor in stored.items()
        if not f".{name}".endswith(CONSTANTS)
    }


def _drop_tied_head(stored: dict[str, Tensor], names: dict[str, str], source: str) -> None:
    head = stored.pop(f"{names['head']}.weight", None)
    embedding = stored.get(f"{names['embedding']}.weight")
    if head is not None and embedding is not None and not torch.equal(head, embedding):
        raise ValueError(
            f"{source} says tie_word_embeddings, but its lm_head.weight differs from the "
            "embedding; set tie_word_embeddings to false in its config.json."
        )


def _check_stored(
    model_type: str, shapes: dict[str, torch.Size], stored: dict[str, Tensor], source: str
) -> None:
    """Refuse weights that miss, are too many or have other shapes than config.json says."""
    places = [_place(model_type, name) for name in shapes]
    wanted = {
        place.name: place.shape(shape) for place, shape in zip(places, shapes.values(), strict=True)
    }
    faults = [f"lacks {name}" for name in wanted if name not in stored]
    faults += [f"has the unknown {name}" for name in sorted(stored) if name not in wanted]
    faults += [
        f"has {name} of shape {list(tensor.shape)}, not {wanted[name]}"
        for name, tensor in stored.items()
        if name in wanted and list(tensor.shape) != wanted[name]
    ]
    if faults:
        raise ValueError(
            f"{source} does not hold the {model_type} of its config.json: it "
            f"{', '.join(faults[:3])} ({len(faults)} faults in all); both must be of one model, "
            "download or copy it again."
        )
