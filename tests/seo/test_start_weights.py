"""Weights that a run takes from the checkpoint it starts with."""

import copy
import logging
from functools import partial

import pytest

from datamodules.text.encoding import RECIPE_KEY
from lit_models import LitTextScorer
from lit_models.causal_lm.adapters import LoraOptions
from tests.distributed.seo_family import scored_texts, text_scorer
from tests.seo.small_collection import adamw, ranker, small_encoder


@pytest.fixture
def recipe(tmp_path):
    scored_texts(tmp_path / "scored.jsonl")
    _, data = text_scorer(tmp_path / "run", {})
    data.setup("fit")
    return data.recipe


def built(module, recipe):
    module.recipe = copy.deepcopy(recipe)
    module.configure_model()
    module.init_from = "first.ckpt"
    return module


def scorer(recipe, encoder=small_encoder, **options):
    return built(LitTextScorer(optimizer=adamw, encoder=encoder, **options), recipe)


def checkpoint_of(module):
    return {"state_dict": module.state_dict(), RECIPE_KEY: module.recipe}


def taken(module, other):
    """Return the weights that are taken from another module."""
    found, theirs = module.adapted_weights(checkpoint_of(other)), other.state_dict()
    assert found.keys() == module.state_dict().keys()
    return {name for name, tensor in found.items() if tensor is theirs.get(name)} | {
        n for n, t in found.items() if n in theirs and t.data_ptr() == theirs[n].data_ptr()
    }


def test_a_head_is_taken_where_its_classes_are_the_same(recipe, caplog) -> None:
    other = scorer(recipe)
    assert taken(scorer(recipe), other) == other.state_dict().keys()
    recipe["heads"]["trade"]["classes"].reverse()  # equal shape, other meaning
    module = scorer(recipe)
    with caplog.at_level(logging.INFO):
        left = module.state_dict().keys() - taken(module, other)
    trade = "network.heads.head_trade.output."
    assert left == {trade + "weight", trade + "bias"}
    assert f"these begin anew: {trade}bias, {trade}weight" in caplog.text


def test_another_kind_of_module_takes_the_encoder_alone(recipe) -> None:
    other, module = scorer(recipe), built(ranker(), recipe)
    found = taken(module, other)
    assert found == {n for n in module.state_dict() if n.startswith("network.encoder.")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 32}, r"encoder.layers.0.attention.output.weight \[16, 16\] there, \[32, 32\]"),
        ({"num_layers": 3}, r"encoder.layers.2.\S+ missing there, \[16.* and \d+ more. All of"),
        ({"num_layers": 1}, r"encoder.layers.1.\S+ \[16\S* 16\] there, missing here"),
    ],
)
def test_an_encoder_that_differs_is_refused(recipe, options, message) -> None:
    module = scorer(recipe, partial(small_encoder, **options))
    with pytest.raises(ValueError, match=f"init_from first.ckpt has another encoder: .*{message}"):
        module.adapted_weights(checkpoint_of(scorer(recipe)))


def test_adapters_begin_anew_but_are_never_left_behind(recipe) -> None:
    plain, adapted = scorer(recipe), scorer(recipe, lora=LoraOptions(["qkv"], rank=2))
    fresh = {n for n in adapted.state_dict() if "lora_" in n}
    assert fresh
    assert adapted.state_dict().keys() - taken(adapted, plain) == fresh
    with pytest.raises(ValueError, match=r"qkv.lora_A \[2, 16\] there, missing here"):
        plain.adapted_weights(checkpoint_of(adapted))
