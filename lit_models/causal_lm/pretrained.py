"""Networks out of folders: GPT-2 and Llama as the own decoder, any other causal language model by
transformers, both with one interface.

A recipe describes a network without its weights, in plain values that a checkpoint keeps:
{"kind": "own", "config": fields of DecoderConfig} or {"kind": "transformers", "config": content of
config.json}. So a checkpoint is loaded where the folder has gone.

Shapes: R rows, T positions, D hidden, V vocabulary.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from lit_models.causal_lm.decoder_config import DecoderConfig, check_context
from lit_models.causal_lm.layout_configs import decoder_config, obstacle
from lit_models.causal_lm.layouts import read_hugging_face
from lit_models.causal_lm.model_folders import read_config, weight_files
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.transformers_model import (
    PretrainedDecoder,
    built_model,
    check_is_causal,
    loaded_model,
    position_limit,
    vocab_size_of,
)

LARGE_LOGIT, HEAD_TOLERANCE = 1000.0, 0.02

Backend = Literal["auto", "own", "transformers"]
Recipe = dict[str, Any]
Network = Decoder | PretrainedDecoder


def own_recipe(config: DecoderConfig) -> Recipe:
    """Return the recipe of an own decoder."""
    return {"kind": "own", "config": asdict(config)}


def recipe_of(network: Network) -> Recipe:
    """Return the recipe of a network."""
    if isinstance(network, Decoder):
        return own_recipe(network.config)
    return {"kind": "transformers", "config": network.content}


def read_recipe(folder: str | Path, backend: Backend = "auto") -> Recipe:
    """Return the recipe of a model's folder, from its config.json alone.

    Args:
        folder: local, in the Hugging Face layout.
        backend: who computes it; auto takes the own decoder where that can.

    Raises:
        FileNotFoundError: there is no such folder or no config.json in it.
        ValueError: config.json is damaged, or the backend cannot compute the model.
    """
    content = read_config(folder)
    if backend == "own" or (backend == "auto" and obstacle(content) is None):
        return own_recipe(decoder_config(content, str(folder)))
    check_is_causal(content, str(folder))
    return {"kind": "transformers", "config": content}


def check_recipe(recipe: Recipe, context_length: int, vocab_size: int) -> None:
    """Refuse data that a network cannot take.

    Args:
        recipe: of the network.
        context_length: positions of the longest document.
        vocab_size: of the tokenizer.

    Raises:
        ValueError: documents are longer than learned positions, or tokens are without embedding.
    """
    if recipe["kind"] == "own":
        config = DecoderConfig(**recipe["config"])
        check_context(config, context_length)
        size = config.vocab_size or vocab_size
    else:
        limit = position_limit(recipe["config"])
        if limit is not None and context_length > limit:
            raise ValueError(
                f"context_length {context_length} is longer than the model's {limit} positions; "
                f"lower data.context_length to {limit} or less, or take a model with rotary ones."
            )
        size = vocab_size_of(recipe["config"])
    if vocab_size > size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the network embeds {size}; take the "
            "model's own tokenizer, or a network from scratch with vocab_size left out."
        )


def learned_positions(recipe: Recipe) -> int | None:
    """Return how many positions a network can tell apart; none where they have no table."""
    if recipe["kind"] != "own":
        return position_limit(recipe["config"])
    config = DecoderConfig(**recipe["config"])
    return config.max_positions if config.positions == "learned" else None


def network_from_config(recipe: Recipe) -> Network:
    """Return the network of a recipe with random weights, in float32.

    Raises:
        ValueError: the recipe is of another version.
    """
    kind, config = recipe.get("kind"), recipe.get("config")
    if kind == "own" and config is not None:
        return Decoder(DecoderConfig(**config))
    if kind == "transformers" and config is not None:
        return PretrainedDecoder(built_model(config), config)
    raise ValueError(
        f'a network\'s recipe has kind "own" or "transformers" and a config, got {kind!r}; load '
        "the checkpoint with the version that wrote it."
    )


def load_network(
    folder: str | Path, backend: Backend = "auto", dtype: torch.dtype | None = torch.float32
) -> Network:
    """Return the network of a model's folder with its weights, on the CPU, in training mode.

    Dropout is 0, whatever config.json says: `exact_dropout` and LoRA have their own.

    Args:
        folder: config.json and safetensors.
        backend: as in `read_recipe`.
        dtype: of the weights; none keeps that of the files.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged, does not fit the others, or the model is of a kind that
            cannot be computed here.
    """
    recipe = read_recipe(folder, backend)
    if recipe["kind"] == "own":
        config, weights = read_hugging_face(folder, dtype)
        with torch.device("meta"):
            decoder = Decoder(config)
        decoder.load_state_dict(weights, assign=True)
        decoder.tie_head()
        return decoder
    weight_files(folder)  # refuses pickles
    network = PretrainedDecoder(loaded_model(folder, recipe["config"], dtype), recipe["config"])
    check_head(network, str(folder))
    return network


@torch.no_grad()
def check_head(network: PretrainedDecoder, source: str) -> None:
    """Refuse a model whose logits are not the head's product with the hidden states.

    The head's output is made large on its way to the logits, so that a cap is seen.

    Raises:
        ValueError: they are capped, scaled or shifted.
    """
    was_training = network.training
    tokens = torch.arange(3, device=network.head.weight.device)[None]
    hook = network.head.register_forward_hook(lambda head, given, output: _enlarged(output))
    try:
        logits = network.eval().model(input_ids=tokens, use_cache=False).logits
        hidden = network(tokens, tokens, torch.zeros_like(tokens))
    finally:
        hook.remove()
        network.train(was_training)
    difference = (_enlarged(hidden @ network.head.weight.T) - logits).abs().max()
    if not difference <= HEAD_TOLERANCE * LARGE_LOGIT:
        raise ValueError(
            f"{source} is a {type(network.model).__name__}, whose logits are not the product of "
            "its head and its hidden states (they are capped, scaled or shifted by a bias): the "
            "loss here could not be its own. Take a model of another class, such as Llama or Qwen."
        )


def _enlarged(logits: Tensor) -> Tensor:
    return logits * (LARGE_LOGIT / logits.abs().max())
