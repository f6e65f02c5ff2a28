"""Verbalizer and reconstructor: with a cache as without, from an identity on; drawn words."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.consistency_lens.lens import Explanation, Lens, gumbel_noise, straight_through
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


WORDS = torch.tensor([[3, 7, 1, 9], [2, 2, 5, 8]])


@torch.no_grad()
@pytest.mark.parametrize("kind", list(NETWORKS))
def test_it_begins_as_the_subject_that_reads_the_words_backwards(kind: str) -> None:
    for layer in (0, 2):
        lens = lens_of(kind, layer)
        rebuilt = lens.reconstructor(lens.words(WORDS))
        text = torch.cat([torch.full((2, 1), lens.begin_id), WORDS.flip(1)], dim=1)
        expected = lens.subject.activations(text)[:, -1]
        torch.testing.assert_close(rebuilt, expected, rtol=1e-9, atol=1e-9)


def test_every_trainable_parameter_gets_a_gradient_and_the_blocks_above_are_cut() -> None:
    for kind in NETWORKS:
        lens = lens_of(kind)
        assert len(lens.reconstructor.network.blocks()) == 2
        lens.reconstructor(lens.words(WORDS)).sum().backward()
        missing = [n for n, p in lens.reconstructor.named_parameters() if p.requires_grad]
        assert all(lens.reconstructor.get_parameter(n).grad is not None for n in missing), kind


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_choices_and_gradients_are_those_of_torch_with_the_same_noise(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(5, 9, dtype=torch.float64, generator=torch.manual_seed(1))
    logits.requires_grad_()
    weights = torch.randn(5, 9, dtype=torch.float64)
    noise = gumbel_noise(torch.arange(5), 0, 9).double()
    # torch's own noise is -log of draws of an exponential variable
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda draws: draws.copy_((-noise).exp()))
    theirs = F.gumbel_softmax(logits, tau=temperature, hard=True)
    ours = straight_through(logits, noise, temperature)
    torch.testing.assert_close(ours, theirs)
    assert ours.argmax(-1).tolist() == (logits + noise).argmax(-1).tolist()
    gradients = [torch.autograd.grad((y * weights).sum(), logits)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3


def test_without_noise_the_most_probable_word_is_taken() -> None:
    logits = torch.tensor([[0.1, 2.0, 1.0], [3.0, 0.0, 2.9]])
    assert straight_through(logits, None, 0.5).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_noise_has_the_moments_and_quantiles_of_gumbel() -> None:
    noise = gumbel_noise(torch.arange(2000), 3, 200).double().flatten()  # 400,000 draws
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)
    for share in (0.01, 0.25, 0.5, 0.75, 0.99):
        below = (noise < -math.log(-math.log(share))).double().mean()
        assert below == pytest.approx(share, abs=0.003)
    assert noise.isfinite().all()


def test_noise_of_neighbouring_samples_places_and_words_is_independent() -> None:
    first = gumbel_noise(torch.arange(500), 0, 100).double()
    second = gumbel_noise(torch.arange(500), 1, 100).double()
    # Standard error of a correlation of 50,000 pairs: 0.0045.
    pairs = {
        "samples": (first[:-1], first[1:]),
        "words": (first[:, :-1], first[:, 1:]),
        "places": (first, second),
        "a word further at the next place": (first[:, 1:], second[:, :-1]),
        "a sample further at the next place": (first[1:], second[:-1]),
    }
    for name, (one, other) in pairs.items():
        found = torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]
        assert abs(found) < 0.02, name


def test_words_are_drawn_as_often_as_their_probability_says() -> None:
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = gumbel_noise(torch.arange(20_000), 2, 4)
    drawn = straight_through(chances.log().expand(20_000, 4), noise, 1.0).mean(0)
    torch.testing.assert_close(drawn, chances, rtol=0, atol=0.012)


def test_noise_belongs_to_its_key_alone() -> None:
    keys = torch.tensor([7, 123456789, 2**62])
    together = gumbel_noise(keys, 1, 50)
    assert torch.equal(gumbel_noise(keys.flip(0), 1, 50), together.flip(0))
    assert torch.equal(gumbel_noise(keys[[1]], 1, 50)[0], together[1])
    assert torch.equal(gumbel_noise(keys, 1, 30), together[:, :30])
