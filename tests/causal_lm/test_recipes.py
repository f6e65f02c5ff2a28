"""Recipes of networks: rebuilt without their folders, and what does not fit them."""

import json
import shutil

import pytest
import torch

from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.pretrained import (
    check_recipe,
    load_network,
    network_from_config,
    own_recipe,
    read_recipe,
)
from tests.causal_lm.folders import packed_logits, saved, worst_difference


@pytest.mark.parametrize("backend", ["own", "transformers"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_recipe_rebuilds_the_network_where_the_folder_has_gone(tmp_path, backend, tied):
    saved(tmp_path / "base", "Llama", tie_word_embeddings=tied)
    recipe = json.loads(json.dumps(read_recipe(tmp_path / "base", backend)))
    assert recipe["kind"] == backend
    network = load_network(tmp_path / "base", backend)
    assert (network.head.weight is network.embedding.weight) == tied
    shutil.rmtree(tmp_path / "base")
    again = network_from_config(recipe)
    again.load_state_dict(network.state_dict())
    assert worst_difference(packed_logits(network), packed_logits(again)) == 0
    names = [name for name, _ in network.named_parameters()]
    assert names == [name for name, _ in again.named_parameters()]


@pytest.mark.parametrize("backend", ["own", "transformers"])
def test_a_recipe_gives_names_and_shapes_without_memory(tmp_path, backend):
    saved(tmp_path, "Llama")
    with torch.device("meta"):
        bare = network_from_config(read_recipe(tmp_path, backend))
    network = load_network(tmp_path, backend)
    shapes = {name: p.shape for name, p in network.named_parameters()}
    assert {name: p.shape for name, p in bare.named_parameters()} == shapes
    assert all(p.is_meta for p in bare.parameters())


def test_data_that_does_not_fit_is_refused(tmp_path):
    check_recipe(own_recipe(DecoderConfig()), 10_000, 300)  # rotary, and it takes the tokenizer's
    for backend, words in (("own", "network's 12 learned"), ("transformers", "model's 12")):
        saved(tmp_path, "GPT2")
        recipe = read_recipe(tmp_path, backend)
        check_recipe(recipe, 12, 29)
        with pytest.raises(ValueError, match=f"context_length 13 is longer than the {words} pos"):
            check_recipe(recipe, 13, 29)
        with pytest.raises(ValueError, match="the tokenizer has 30 tokens and the network embeds"):
            check_recipe(recipe, 12, 30)
    saved(tmp_path, "Qwen2")
    check_recipe(read_recipe(tmp_path), 10_000, 29)


def test_a_recipe_of_another_kind_is_refused():
    with pytest.raises(ValueError, match='kind "own" or "transformers" and a config, got \'x\''):
        network_from_config({"kind": "x", "config": {}})
