"""From options and data to a network: first a recipe of plain values, then the layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from datamodules.cache import digest_of
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from lit_models.causal_lm.adapters import adapted_recipe, load_adapter
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.freezing import freeze
from lit_models.causal_lm.lora import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.pretrained import (
    Backend,
    Network,
    check_recipe,
    load_network,
    network_from_config,
    own_recipe,
    read_recipe,
)

Recipe = dict[str, Any]


@dataclass(frozen=True)
class ComputationOptions:
    """How a network is computed; the result is the same but for rounding.

    Args:
        compile: compile each block.
        activation_checkpointing: keep only the inputs of blocks for the backward pass.
        backend: who computes a pretrained model; auto takes the own decoder where it can.
    """

    compile: bool = False
    activation_checkpointing: bool = False
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "own", "transformers"):
            raise ValueError(
                f'computation.backend must be auto, own or transformers, got "{self.backend}".'
            )


@dataclass(frozen=True)
class NetworkRequest:
    """What the user asks for.

    Args:
        config: of a network from scratch.
        pretrained: folder of a model, instead of it.
        lora: adapters on it.
        computation: how it is computed.
    """

    config: DecoderConfig
    pretrained: str | None
    lora: LoraOptions | None
    computation: ComputationOptions


def new_recipe(request: NetworkRequest, tokenizer: TextTokenizer, context_length: int) -> Recipe:
    """Return what a checkpoint keeps, so that it can be read without any other file.

    Args:
        request: of the user.
        tokenizer: of the data.
        context_length: positions of the longest document.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: data and network do not fit each other, or a target of LoRA fits no layer.
    """
    if request.pretrained is not None:
        network = pretrained_recipe(request)
    else:
        size = request.config.vocab_size or tokenizer.vocab_size
        network = own_recipe(replace(request.config, vocab_size=size))
    check_recipe(network, context_length, tokenizer.vocab_size)
    recipe: Recipe = {"tokenizer": tokenizer.to_dict(), "network": network, "lora": None}
    if request.lora is not None:
        if request.lora.adapter is not None and request.pretrained is None:
            raise ValueError(
                f"model.lora.adapter {request.lora.adapter} goes on a trained base; name its "
                "folder with model.pretrained."
            )
        with torch.device("meta"):
            bare = network_from_config(network)
        recipe["lora"] = lora_recipe(bare, request.lora, request.pretrained)
        if request.lora.adapter is not None:
            recipe["lora"] = adapted_recipe(bare, recipe["lora"], request.lora.adapter)
    return recipe


def pretrained_recipe(request: NetworkRequest) -> Recipe:
    """Return the recipe of the pretrained network that is asked for.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds nothing that can be computed.
    """
    assert request.pretrained is not None
    return read_recipe(request.pretrained, request.computation.backend)


def check_start(init_from: str, trained: Recipe | None, recipe: Recipe) -> None:
    """Refuse weights of a checkpoint that mean something else here.

    Args:
        init_from: where they come from.
        trained: recipe that they were trained by; none in a checkpoint of another family.
        recipe: of this run.

    Raises:
        ValueError: the checkpoint is of other tokens, or has adapters and this run none.
    """
    if trained and digest_of(trained["tokenizer"]) != digest_of(recipe["tokenizer"]):
        raise ValueError(
            f"model.init_from {init_from} was trained with another tokenizer than that of the "
            "data; `unisono export` it, and give the folder as model.pretrained instead."
        )
    if trained and trained["lora"] and not recipe["lora"]:
        raise ValueError(
            f"model.init_from {init_from} was trained with LoRA, and this run has none; `unisono "
            "export` merges it: give that folder."
        )


def network_of(recipe: Recipe) -> Network:
    """Return the network of a recipe, its weights to come from a checkpoint."""
    network = network_from_config(recipe["network"])
    if recipe["lora"]:
        add_lora(network, recipe["lora"])
    return network


def new_network(request: NetworkRequest, recipe: Recipe) -> Network:
    """Return the network that a training starts from: pretrained, or with random weights.

    Raises:
        FileNotFoundError: a file of the pretrained model or of the adapter is missing.
        ValueError: one of them is damaged.
    """
    if request.pretrained is None:
        return network_of(recipe)
    network = load_network(request.pretrained, request.computation.backend)
    if recipe["lora"]:
        add_lora(network, recipe["lora"])
        if request.lora is not None and request.lora.adapter is not None:
            load_adapter(network, recipe["lora"], request.lora.adapter)
    return network


def made_ready(
    network: Network, computation: ComputationOptions, frozen: Sequence[str], is_fitting: bool
) -> None:
    """Freeze, recompute and compile as the options say; before a strategy wraps the network.

    Args:
        network: with its weights, changed in place.
        computation: how it is computed.
        frozen: patterns of parameters that stand still.
        is_fitting: whether it is trained.
    """
    if is_fitting and frozen:
        freeze(network, frozen)
    if is_fitting and computation.activation_checkpointing:
        network.recompute_blocks()
    if computation.compile:
        network.compile_blocks()
