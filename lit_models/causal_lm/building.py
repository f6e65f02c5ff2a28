"""From options and data to a network: first a recipe of plain values, then the layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from datamodules.core.store import digest_of
from datamodules.tokenizers.text_tokenizer import TextTokenizer
from datamodules.tokenizers.wanted import TEXT_RECIPE_KEY
from lit_models.causal_lm.adapters import adapted_recipe, load_adapter
from lit_models.causal_lm.comparing import differences
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.freezing import freeze
from lit_models.causal_lm.isolation import check_isolation
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


def recipe_of_run(
    request: NetworkRequest,
    trained: Recipe | None,
    tokenizer: TextTokenizer,
    context_length: int,
    is_fitting: bool,
) -> Recipe:
    """Return the recipe of a run: an evaluation has its checkpoint's, a training today's options.

    Args:
        request: of the user.
        trained: the checkpoint's recipe; none without one.
        tokenizer: of the data.
        context_length: positions of the longest document.
        is_fitting: whether it is a training, which goes on where there is a checkpoint.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a training goes on with another function, an evaluation asks for another
            backend than the checkpoint's, or as `new_recipe`.
    """
    if trained is None:
        return new_recipe(request, tokenizer, context_length)
    if not is_fitting:
        _check_backend(request.computation.backend, trained["network"]["kind"])
        return trained
    # All weights come from the checkpoint: folders may have gone.
    folder, lora = request.pretrained, request.lora
    has_gone = folder is not None and not Path(folder).expanduser().exists()
    network = trained["network"] if has_gone else None
    if lora is not None and lora.adapter is not None:
        request = replace(request, lora=replace(lora, adapter=None))
    recipe = new_recipe(request, tokenizer, context_length, network)
    if request.lora is not lora and trained["lora"]:  # an adapter's layers may have other sizes
        same = all(trained["lora"][name] == recipe["lora"][name] for name in ("rank", "alpha"))
        if same and trained["lora"]["layers"].keys() == recipe["lora"]["layers"].keys():
            recipe["lora"]["layers"] = trained["lora"]["layers"]
    check_same(trained, recipe)
    return recipe


def _check_backend(asked: Backend, trained: str) -> None:
    if asked not in ("auto", trained):
        raise ValueError(
            f"model.computation.backend is {asked}, but the checkpoint's weights are those of "
            f"backend {trained}; leave it out, or `unisono export` the checkpoint and give the "
            "folder as model.pretrained."
        )


def new_recipe(
    request: NetworkRequest,
    tokenizer: TextTokenizer,
    context_length: int,
    network: Recipe | None = None,
) -> Recipe:
    """Return what a checkpoint keeps, so that it can be read without any other file.

    Args:
        request: of the user.
        tokenizer: of the data.
        context_length: positions of the longest document.
        network: its recipe; none has it made of the request.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: data and network do not fit each other, or a target of LoRA fits no layer.
    """
    if network is None and request.pretrained is not None:
        network = pretrained_recipe(request)
    elif network is None:
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


def stored_recipe(checkpoint: dict[str, Any]) -> Recipe:
    """Return the recipe that a checkpoint keeps.

    Raises:
        ValueError: it keeps none.
    """
    if TEXT_RECIPE_KEY not in checkpoint:
        raise ValueError(
            "the checkpoint holds no text recipe: it is of another family; give one of LitCausalLM."
        )
    return checkpoint[TEXT_RECIPE_KEY]


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
        ValueError: the checkpoint is of other tokens or of another function, or has adapters and
            this run none.
    """
    if trained is None:
        return
    if not _same_tokens(trained, recipe["tokenizer"]):
        raise ValueError(
            f"model.init_from {init_from} was trained with another tokenizer than that of the "
            "data; `unisono export` it, and give the folder as model.pretrained instead."
        )
    if trained["lora"] and not recipe["lora"]:
        raise ValueError(
            f"model.init_from {init_from} was trained with LoRA, and this run has none; `unisono "
            "export` merges it: give that folder."
        )
    changed = differences(trained, recipe, is_start=True)
    if changed:
        raise ValueError(
            f"model.init_from {init_from} was trained with other options, with which its weights "
            f"mean something else: {'; '.join(changed)}. Take the checkpoint's."
        )


def check_same(trained: Recipe, recipe: Recipe) -> None:
    """Refuse a checkpoint of other tokens or of another function than the network's.

    Args:
        trained: the checkpoint's recipe.
        recipe: by which the network is built.

    Raises:
        ValueError: it is.
    """
    if not _same_tokens(trained, recipe["tokenizer"]):
        raise ValueError(
            "the checkpoint was trained with another tokenizer than that of the data; take the "
            "data and data.tokenizer of its run."
        )
    changed = differences(trained, recipe)
    if changed:
        raise ValueError(
            "the checkpoint was trained with other options, with which its weights mean something "
            f"else: {'; '.join(changed)}. Leave them out to take the checkpoint's, or begin a new "
            "run."
        )


def check_data(recipe: Recipe, tokenizer: TextTokenizer, context_length: int) -> None:
    """Refuse data that a trained model cannot take.

    Args:
        recipe: of the model.
        tokenizer: of the data.
        context_length: positions of the longest document.

    Raises:
        ValueError: they are other tokens, or documents are longer than learned positions.
    """
    if not _same_tokens(recipe, tokenizer.to_dict()):
        raise ValueError(
            "the model was trained with another tokenizer than that of the data; set "
            "data.tokenizer to the one of its training, or `unisono export` the model and give "
            "the folder as model.pretrained."
        )
    check_recipe(recipe["network"], context_length, tokenizer.vocab_size)


def _same_tokens(recipe: Recipe, tokenizer: dict[str, Any]) -> bool:
    return digest_of(recipe["tokenizer"]) == digest_of(tokenizer)


def network_of(recipe: Recipe) -> Network:
    """Return the network of a recipe, its weights to come from a checkpoint."""
    network = network_from_config(recipe["network"])
    if recipe["lora"]:
        add_lora(network, recipe["lora"])
    return network


def new_network(request: NetworkRequest | None, recipe: Recipe) -> Network:
    """Return the network that a run starts from: pretrained, or with random weights.

    Args:
        request: of the user; none where all weights come from a checkpoint.
        recipe: of the run.

    Raises:
        FileNotFoundError: a file of the pretrained model or of the adapter is missing.
        ValueError: one of them is damaged.
    """
    if request is None or request.pretrained is None:
        return network_of(recipe)
    # What will stand still in fewer bits is read with those of its files: half the memory on the
    # way for most folders, and the same values.
    is_short = recipe["lora"] is not None and recipe["lora"]["base_dtype"] != "float32"
    dtype = None if is_short else torch.float32
    network = load_network(request.pretrained, request.computation.backend, dtype)
    if recipe["lora"]:
        add_lora(network, recipe["lora"])
        if request.lora is not None and request.lora.adapter is not None:
            load_adapter(network, recipe["lora"], request.lora.adapter)
    return network


def make_ready(network: Network, computation: ComputationOptions, frozen: Sequence[str]) -> None:
    """Test, freeze and recompute as a training needs it; before a strategy wraps the network.

    Args:
        network: with its weights, changed in place.
        computation: how it is computed.
        frozen: patterns of parameters that stand still.

    Raises:
        RuntimeError: documents see each other.
        ValueError: a pattern fits no parameter.
    """
    check_isolation(network)
    if frozen:
        freeze(network, frozen)
    if computation.activation_checkpointing:
        network.recompute_blocks()


def compile_once(network: Network) -> None:
    """Compile each block, where that is not done yet."""
    if not network.is_compiled:
        network.compile_blocks()
