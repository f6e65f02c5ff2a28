"""A fine-tuned model of transformers as a folder that transformers reads alone."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.tokenizers.text import TextTokenizer
from lit_models.causal_lm.pretrained import CONFIG
from lit_models.seq2seq.network import network_of
from lit_models.training.export import Layout

RECIPE_KEY = "seq2seq_recipe"
MODEL = "network.model."  # where LitSeq2Seq keeps one


def model_layout(
    content: Mapping[str, Any], weights: Mapping[str, Tensor], adapter: bool = False
) -> Layout | None:
    """Return the files of a folder that transformers reads alone; `None` for a network from
    scratch, of which it has no like.

    Args:
        content: of a checkpoint of LitSeq2Seq.
        weights: of the module.
        adapter: refused with a ValueError.
    """
    recipe = content[RECIPE_KEY]
    if adapter:
        raise ValueError("a LitSeq2Seq has no adapters; leave --adapter out.")
    if recipe["network"]["kind"] == "own":
        return None
    twins = _twins(recipe)
    stored = {n.removeprefix(MODEL): t for n, t in weights.items() if n.startswith(MODEL)}
    stored = {name: tensor for name, tensor in stored.items() if name not in twins}
    dtype = next(t.dtype for t in stored.values() if t.is_floating_point())
    config = {n: value for n, value in recipe["network"]["config"].items() if n != "dtype"}
    config["torch_dtype"] = str(dtype).removeprefix("torch.")  # which every version reads
    tokenizer = TextTokenizer.from_dict(recipe["tokenizer"])
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return Layout(
        stored,
        {CONFIG: text, **tokenizer.hugging_face_files()},
        values={"extra": {RECIPE_KEY: recipe}},
        replaced=("network", "pretrained"),
        reader='transformers: AutoModelForSeq2SeqLM.from_pretrained("{folder}")',
    )


def restored_weights(stored: Mapping[str, Tensor], extra: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of LitSeq2Seq from those of a folder of `model_layout` and its recipe,
    which is in `extra`."""
    weights = dict(stored)
    weights |= {twin: stored[name] for twin, name in _twins(extra[RECIPE_KEY]).items()}
    return {f"{MODEL}{name}": tensor for name, tensor in weights.items()}


def _twins(recipe: Mapping[str, Any]) -> dict[str, str]:
    """Return names of weights that are others' -> the names of those."""
    with torch.device("meta"):
        network: Any = network_of(recipe["network"], checks=False)
    first: dict[int, str] = {}
    twins: dict[str, str] = {}
    model: nn.Module = network.model
    tensors = [*model.named_parameters(remove_duplicate=False)]
    for name, tensor in tensors:
        if first.setdefault(id(tensor), name) != name:
            twins[name] = first[id(tensor)]
    return twins
