"""The verbalizer: with a cache as without, from an identity on, through every way of injection."""

import pytest
import torch
from torch import Tensor

from lit_models.consistency_lens.lens import Explanation, Lens
from tests.consistency_lens.tiny import (
    NETWORKS,
    activations,
    explained_without_cache,
    lens_of,
    moved,
)

WAYS = ("per_block", "embedding", "added")
CASES = [(kind, "per_block") for kind in NETWORKS]
CASES += [("own GPT-2", "embedding"), ("own Llama", "added"), ("GPT-2", "added")]
CASES += [("Gemma", "embedding"), ("Qwen2", "embedding")]
KEYS = torch.tensor([4, 5, 6])


def gradients_of(lens: Lens, found: Explanation, activation: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, 16, dtype=torch.float64)
    loss = (found.embeddings * weights).sum() + found.logits.log_softmax(-1)[..., 3].sum()
    learning = [p for p in lens.verbalizer.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, [activation, *learning]))


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_a_cache_changes_neither_words_nor_gradients(kind: str, way: str) -> None:
    lens = moved(lens_of(kind, injection=way))
    activation = activations().requires_grad_()
    quick = lens.verbalizer.explain(activation, KEYS, 0.7)
    slow = explained_without_cache(lens.verbalizer, activation, KEYS, 0.7)
    assert torch.equal(quick.token_ids, slow.token_ids)
    torch.testing.assert_close(quick.logits, slow.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(quick.embeddings, slow.embeddings, rtol=1e-9, atol=1e-9)
    near = 1e-8 if "GPT-2" in kind or "own" in kind else 1e-5  # norms of others are in float32
    pairs = (gradients_of(lens, found, activation) for found in (quick, slow))
    for one, other in zip(*pairs, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize(("kind", "way"), CASES)
def test_given_words_are_scored_as_they_were_chosen(kind: str, way: str) -> None:
    lens, activation = moved(lens_of(kind, injection=way)), activations()
    with torch.no_grad():
        chosen = lens.verbalizer.explain(activation, KEYS)
        scored = lens.verbalizer(activation, chosen.token_ids)
    torch.testing.assert_close(scored, chosen.logits, rtol=1e-9, atol=1e-9)
    words = lens.words(chosen.token_ids)  # of Gemma, embeddings are larger than their table
    torch.testing.assert_close(chosen.embeddings, words, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_the_maps_begin_as_the_identity(kind: str) -> None:
    for way, number in (("per_block", 3), ("embedding", 1), ("added", 3)):
        verbalizer = lens_of(kind, injection=way).verbalizer
        mapped = verbalizer._mapped(activations())
        assert torch.equal(mapped, activations().expand(number, -1, -1))
    begin = verbalizer.network.embedding(torch.tensor([28, 28]))
    assert torch.equal(verbalizer.prompt, begin)


@torch.no_grad()
def test_each_way_puts_the_activation_where_it_says() -> None:
    activation = activations(2)
    prompts = {}
    for way in WAYS:
        verbalizer = lens_of(injection=way).verbalizer
        prompts[way] = verbalizer._prompt(activation, 2)
    begin = verbalizer.prompt.expand(2, -1, -1)
    empty = torch.zeros(2, 1, 16, dtype=torch.float64)
    assert torch.equal(prompts["per_block"], torch.cat([begin, empty], 1))
    assert torch.equal(prompts["embedding"], torch.cat([begin, activation[:, None]], 1))
    added = torch.cat([begin, empty], 1) + activation[:, None]
    assert torch.equal(prompts["added"], added)

    seen: list[Tensor] = []
    verbalizer = lens_of().verbalizer  # per block: the marker's place at every block's input
    for block in verbalizer.network.blocks():
        block.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    verbalizer.explain(activation)
    assert all(torch.equal(hidden[:, 2], activation) for hidden in seen[:3])
    assert all(hidden.shape[1] == 1 for hidden in seen[3:])  # with the cache, word by word


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_without_an_activation_its_place_is_empty(way: str) -> None:
    lens = moved(lens_of(injection=way))
    none = lens.verbalizer.explain(None, rows=2)
    lens.verbalizer.map_weight.zero_()
    lens.verbalizer.map_bias.zero_()
    if way != "per_block":  # there an activation of zeros still empties every block's input
        nothing = lens.verbalizer.explain(activations(2))
        torch.testing.assert_close(none.logits, nothing.logits)
    assert torch.equal(none.token_ids[0], none.token_ids[1])


@torch.no_grad()
def test_special_tokens_are_never_words_and_neighbours_change_nothing() -> None:
    lens, activation = moved(lens_of()), activations(64)
    keys = torch.arange(64)
    found = lens.verbalizer.explain(activation, keys)
    assert (found.token_ids != 28).all()
    alone = lens.verbalizer.explain(activation[[7]], keys[[7]])
    assert torch.equal(alone.token_ids[0], found.token_ids[7])


@torch.no_grad()
def test_without_a_gradient_words_are_rows_of_the_table_also_in_half_precision() -> None:
    lens = lens_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = lens.verbalizer.explain(activations().float(), KEYS)
    table = lens.subject.network.embedding.weight
    assert torch.equal(found.embeddings, table[found.token_ids])
    assert not torch.equal(found.embeddings, found.embeddings.bfloat16().float())
