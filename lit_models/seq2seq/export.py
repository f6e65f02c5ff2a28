"""A fine-tuned model of transformers as a folder that transformers reads alone."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.adapters import add_lora, merged_weights
from lit_models.causal_lm.export import adapter_recipe, peft_layout
from lit_models.causal_lm.pretrained import CONFIG
from lit_models.seq2seq.network import Network, network_of
from lit_models.training.export import Layout

RECIPE_KEY = "seq2seq_recipe"
NETWORK = "network."  # where LitSeq2Seq keeps it
MODEL = "model."  # where that keeps one of transformers


def model_layout(
    content: Mapping[str, Any], weights: Mapping[str, Tensor], adapter: bool = False
) -> Layout | None:
    """Return the files of a folder that transformers reads alone; `None` for a network from
    scratch, of which it has no like.

    Args:
        content: of a checkpoint of LitSeq2Seq.
        weights: of the module.
        adapter: write the adapter alone instead, as PEFT reads it.

    Raises:
        ValueError: there is no adapter, or transformers has no model for it.
    """
    recipe = content[RECIPE_KEY]
    is_own = recipe["network"]["kind"] == "own"
    own = {n.removeprefix(NETWORK): t for n, t in weights.items() if n.startswith(NETWORK)}
    if adapter:
        lora = adapter_recipe(recipe)
        if is_own:
            raise ValueError(
                "transformers has no network from scratch of this family, so PEFT has none to put "
                "the adapter on; leave --adapter out."
            )
        names = {name: name.removeprefix(MODEL) for name in lora["layers"]}
        return peft_layout(lora, names, own, task="SEQ_2_SEQ_LM")
    if is_own:
        return None
    network = _described(recipe)
    twins = _twins(network)
    merged = merged_weights(network, own)
    stored = {name: t for n, t in merged.items() if (name := n.removeprefix(MODEL)) not in twins}
    dtype = next(t.dtype for t in stored.values() if t.is_floating_point())
    config = {n: value for n, value in recipe["network"]["config"].items() if n != "dtype"}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")  # which every version reads
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return Layout(
        stored,
        {CONFIG: text, **TextTokenizer.from_dict(recipe["tokenizer"]).hugging_face_files()},
        values={"extra": {RECIPE_KEY: {**recipe, "lora": None}}},
        replaced=("network", "pretrained", "lora"),
        reader='transformers: AutoModelForSeq2SeqLM.from_pretrained("{folder}")',
    )


def restored_weights(stored: Mapping[str, Tensor], extra: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of LitSeq2Seq from those of a folder of `model_layout` and its recipe,
    which is in `extra`."""
    twins = _twins(_described(extra[RECIPE_KEY]))
    weights = {**stored, **{twin: stored[name] for twin, name in twins.items()}}
    return {f"{NETWORK}{MODEL}{name}": tensor for name, tensor in weights.items()}


def _described(recipe: Mapping[str, Any]) -> Network:
    """Return the network of a recipe with its adapters, without values (on the meta device)."""
    with torch.device("meta"):
        network = network_of(recipe["network"], checks=False)
        if recipe.get("lora"):
            add_lora(network, recipe["lora"])
    return network


def _twins(network: Any) -> dict[str, str]:
    """Return names of the model's weights that are others' -> the names of those."""
    first: dict[int, str] = {}
    twins: dict[str, str] = {}
    for name, tensor in network.model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(tensor), name) != name:
            twins[name] = first[id(tensor)]
    return twins
