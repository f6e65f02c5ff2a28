"""The verbalizer: with a cache as without, from an identity on."""

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

KEYS = torch.tensor([4, 5, 6])


def gradients_of(lens: Lens, found: Explanation, activation: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, 16, dtype=torch.float64)
    loss = (found.embeddings * weights).sum() + found.logits.log_softmax(-1)[..., 3].sum()
    learning = [p for p in lens.verbalizer.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, [activation, *learning]))


@pytest.mark.parametrize("kind", list(NETWORKS))
def test_a_cache_changes_neither_words_nor_gradients(kind: str) -> None:
    lens = moved(lens_of(kind))
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


@pytest.mark.parametrize("kind", list(NETWORKS))
def test_given_words_are_scored_as_they_were_chosen(kind: str) -> None:
    lens, activation = moved(lens_of(kind)), activations()
    with torch.no_grad():
        chosen = lens.verbalizer.explain(activation, KEYS)
        scored = lens.verbalizer(activation, chosen.token_ids)
    torch.testing.assert_close(scored, chosen.logits, rtol=1e-9, atol=1e-9)
    words = lens.words(chosen.token_ids)  # of Gemma, embeddings are larger than their table
    torch.testing.assert_close(chosen.embeddings, words, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_the_maps_begin_as_the_identity(kind: str) -> None:
    lens = lens_of(kind)
    verbalizer, seen = lens.verbalizer, []
    assert torch.equal(verbalizer.map_weight, torch.eye(16).double().repeat(3, 1, 1))
    assert not verbalizer.map_bias.any()
    for block in verbalizer.network.blocks():  # the marker's place at every block's input
        block.register_forward_hook(
            lambda module, args, kwargs, output: seen.append(
                *args[:1] or [kwargs["hidden_states"]]
            ),
            with_kwargs=True,
        )
    verbalizer.explain(activations())
    assert all(torch.equal(hidden[:, 2], activations()) for hidden in seen[:3])
    assert all(hidden.shape[1] == 1 for hidden in seen[3:])  # with the cache, word by word
    begin = verbalizer.network.embedding(torch.tensor([28, 28]))
    assert torch.equal(verbalizer.prompt, begin)


@torch.no_grad()
def test_without_an_activation_its_place_is_empty() -> None:
    found = moved(lens_of()).verbalizer.explain(None, rows=2)
    assert torch.equal(found.token_ids[0], found.token_ids[1])


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
