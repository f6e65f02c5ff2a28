"""Subject, verbalizer and reconstructor in every kind of network: read, patched, copied, cached."""

from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.causal_lm.adapters import LoraOptions
from lit_models.consistency_lens import lens as lenses
from lit_models.consistency_lens.module import LitConsistencyLens
from lit_models.consistency_lens.subject import BaseOptions, PatchedSubject, Subject
from tests.consistency_lens import tiny

LAYERS = (0, 1, 2)  # including the last layer
ROWS = torch.arange(3)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_activations_are_those_of_a_plain_forward(kind, layer):
    network, (ids, _) = tiny.network_of(kind), tiny.documents()
    found = Subject(network, layer).of_layers(ids)[-1]
    torch.testing.assert_close(
        found, tiny.plain_forward(network, ids, layer)[0], rtol=1e-9, atol=1e-9
    )


@torch.no_grad()
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_neither_padding_nor_neighbours_change_an_activation(kind):
    subject, (ids, lengths) = Subject(tiny.network_of(kind), 1), tiny.documents()
    together = subject.of_layers(ids)[-1]
    for row, length in enumerate(lengths.tolist()):
        alone = subject.of_layers(ids[[row], :length])[-1][0]
        torch.testing.assert_close(together[row, :length], alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_no_block_above_the_layer_is_computed_for_activations(kind):
    subject, (ids, _) = Subject(tiny.network_of(kind), 1), tiny.documents()
    expected = subject.of_layers(ids)[-1]
    for parameter in subject.network.blocks()[2].parameters():
        parameter.fill_(torch.nan)
    assert not tiny.plain_forward(subject.network, ids, 1)[1].isfinite().any()
    called: list[bool] = []
    for part in subject.network.blocks()[2].children():
        part.register_forward_hook(lambda *given: called.append(True))
    assert torch.equal(subject.of_layers(ids)[-1], expected)
    assert not called


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_effects_are_those_of_the_whole_model(kind, layer):
    subject, replacement = Subject(tiny.network_of(kind), layer), tiny.activations()
    (ids, lengths), position = tiny.documents((9, 12, 12)), torch.tensor([2, 9, 1])
    batch: Any = {"input_ids": ids, "position": position, "lengths": lengths}
    patched = PatchedSubject(subject, batch)
    own = subject.of_layers(ids)[0][ROWS, position]  # patching its own activation changes no bit
    assert torch.equal(patched.changed(own), patched.true)
    nats, next_nats = patched.effect(replacement)
    whole = tiny.effects(subject, ids, position, replacement)
    torch.testing.assert_close(nats, whole[ROWS, position], rtol=1e-9, atol=1e-9)
    assert nats.min() > 0
    where = (subject.network, ids, layer, position)
    true, changed = (
        tiny.plain_forward(*where, x)[1].log_softmax(-1)[ROWS, position]
        for x in (None, replacement)
    )
    word = ids[ROWS, position + 1]
    torch.testing.assert_close(next_nats, (true - changed)[ROWS, word], rtol=1e-9, atol=1e-9)


FROZEN = BaseOptions(is_frozen=True)
TARGETS = {"GPT-2": ["c_attn"]}


def lora(kind: str) -> BaseOptions:
    return BaseOptions(lora=LoraOptions(TARGETS.get(kind, ["q_proj"]), rank=2))


def shared(lens: lenses.Lens, part: str) -> dict[str, bool]:
    """Return whether each parameter of a copy is the subject's own."""
    own = {id(p) for p in lens.subject.parameters()}
    network = getattr(lens, part).network
    return {n: id(p) in own for n, p in network.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_words_are_shared_and_blocks_are_not_unless_they_stand_still(kind):
    plain = tiny.lens_of(kind)
    frozen = tiny.lens_of(kind, verbalizer=FROZEN, reconstructor=FROZEN)
    for part in ("verbalizer", "reconstructor"):
        learns = {n for n, p in getattr(plain, part).network.named_parameters() if p.requires_grad}
        assert learns
        assert {name for name, is_shared in shared(plain, part).items() if not is_shared} == learns
        assert all(shared(frozen, part).values())
        assert not any(p.requires_grad for p in getattr(frozen, part).network.parameters())
    for lens in (plain, frozen):
        assert lens.verbalizer.network.embedding.weight is lens.subject.network.embedding.weight
        assert not any(p.requires_grad for p in lens.subject.parameters())


@torch.no_grad()
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_adapters_begin_as_nothing_and_lie_on_the_subjects_own_layers(kind):
    adapted = tiny.lens_of(kind, verbalizer=lora(kind), reconstructor=lora(kind))
    plain, text = tiny.lens_of(kind), torch.tensor([[3, 7, 1, 9]] * 3)
    logits = [lens.verbalizer(tiny.activations(), text) for lens in (adapted, plain)]
    rebuilt = [lens.reconstructor(lens.words(text)) for lens in (adapted, plain)]
    torch.testing.assert_close(*logits)
    torch.testing.assert_close(*rebuilt)
    for part in ("verbalizer", "reconstructor"):
        own = {name for name, is_shared in shared(adapted, part).items() if not is_shared}
        assert own
        assert all("lora_" in name for name in own)


def test_the_reference_is_a_copy_of_what_learns_and_shares_the_rest():
    lens = tiny.moved(tiny.lens_of(verbalizer=lora("own GPT-2"), reconstructor=FROZEN))
    lens.keep_reference()
    for part in ("verbalizer", "reconstructor"):
        both = zip(getattr(lens, part).parameters(), lens.reference[part].parameters(), strict=True)
        for own, kept in both:
            assert torch.equal(own, kept)
            assert (own is kept) == (not own.requires_grad)


def test_options_survive_a_checkpoint():
    stored_recipe = LitConsistencyLens.stored_recipe
    options = lenses.LensOptions(num_prompt=2, verbalizer=lora("own GPT-2"))
    recipe = stored_recipe({"lens_recipe": {"lens": asdict(options), "tokenizer": {}}})
    assert lenses.LensOptions(**recipe["lens"]) == options


KEYS = torch.tensor([4, 5, 6])


def gradients_of(lens: lenses.Lens, found: lenses.Explanation, activation: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, 16, dtype=torch.float64)
    loss = (found.embeddings * weights).sum() + found.logits.log_softmax(-1)[..., 3].sum()
    learning = [p for p in lens.verbalizer.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss, [activation, *learning]))


@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_a_cache_changes_neither_words_nor_gradients(kind):
    lens = tiny.moved(tiny.lens_of(kind))
    activation = tiny.activations().requires_grad_()
    quick = lens.verbalizer.explain(activation, KEYS, 0.7)
    slow = tiny.explained_without_cache(lens.verbalizer, activation, KEYS, 0.7)
    assert torch.equal(quick.token_ids, slow.token_ids)
    torch.testing.assert_close(quick.logits, slow.logits, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(quick.embeddings, slow.embeddings, rtol=1e-9, atol=1e-9)
    near = 1e-8 if "GPT-2" in kind or "own" in kind else 1e-5  # other networks have float32 norms
    pairs = (gradients_of(lens, found, activation) for found in (quick, slow))
    torch.testing.assert_close(*pairs, rtol=near, atol=near)


@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_given_words_are_scored_as_they_were_chosen(kind):
    lens, activation = tiny.moved(tiny.lens_of(kind)), tiny.activations()
    with torch.no_grad():
        chosen = lens.verbalizer.explain(activation, KEYS)
        scored = lens.verbalizer(activation, chosen.token_ids)
    torch.testing.assert_close(scored, chosen.logits, rtol=1e-9, atol=1e-9)
    words = lens.words(chosen.token_ids)  # Gemma scales embeddings, so they exceed its table
    torch.testing.assert_close(chosen.embeddings, words, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_the_maps_begin_as_the_identity(kind):
    verbalizer, seen = tiny.lens_of(kind).verbalizer, []
    assert torch.equal(verbalizer.map_weight, torch.eye(16).double().repeat(3, 1, 1))
    assert not verbalizer.map_bias.any()
    for block in verbalizer.network.blocks():  # the input of every block at the marker
        block.register_forward_hook(
            lambda module, args, kwargs, output: seen.append(
                *args[:1] or [kwargs["hidden_states"]]
            ),
            with_kwargs=True,
        )
    verbalizer.explain(tiny.activations())
    assert all(torch.equal(hidden[:, 2], tiny.activations()) for hidden in seen[:3])
    assert all(hidden.shape[1] == 1 for hidden in seen[3:])  # with the cache, one word at a time
    assert torch.equal(verbalizer.prompt, verbalizer.network.embedding(torch.tensor([28, 28])))


@torch.no_grad()
def test_without_an_activation_its_place_is_empty():
    found = tiny.moved(tiny.lens_of()).verbalizer.explain(None, rows=2)
    assert torch.equal(found.token_ids[0], found.token_ids[1])


@torch.no_grad()
def test_special_tokens_are_never_words_and_neighbours_change_nothing():
    lens, activation = tiny.moved(tiny.lens_of()), tiny.activations(64)
    keys = torch.arange(64)
    found = lens.verbalizer.explain(activation, keys)
    assert (found.token_ids != 28).all()
    alone = lens.verbalizer.explain(activation[[7]], keys[[7]])
    assert torch.equal(alone.token_ids[0], found.token_ids[7])


@torch.no_grad()
def test_without_a_gradient_words_are_rows_of_the_table_also_in_half_precision():
    lens = tiny.lens_of().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = lens.verbalizer.explain(tiny.activations().float(), KEYS)
    assert torch.equal(found.embeddings, lens.subject.network.embedding.weight[found.token_ids])
    assert not torch.equal(found.embeddings, found.embeddings.bfloat16().float())
    half = lens.bfloat16().verbalizer.explain(tiny.activations().float(), KEYS)  # from a store
    assert half.embeddings.dtype == torch.bfloat16


WORDS = torch.tensor([[3, 7, 1, 9], [2, 2, 5, 8]])


@torch.no_grad()
@pytest.mark.parametrize("kind", list(tiny.NETWORKS))
def test_it_begins_as_the_subject_that_reads_the_words_backwards(kind):
    for layer in (0, 2):
        lens = tiny.lens_of(kind, layer)
        rebuilt = lens.reconstructor(lens.words(WORDS))
        text = torch.cat([torch.full((2, 1), lens.begin_id), WORDS.flip(1)], dim=1)
        expected = lens.subject.of_layers(text)[-1][:, -1]
        torch.testing.assert_close(rebuilt, expected, rtol=1e-9, atol=1e-9)


def test_every_trainable_parameter_gets_a_gradient_and_the_blocks_above_are_cut():
    for kind in tiny.NETWORKS:
        lens = tiny.lens_of(kind)
        assert len(lens.reconstructor.network.blocks()) == 2
        lens.reconstructor(lens.words(WORDS)).sum().backward()
        missing = [n for n, p in lens.reconstructor.named_parameters() if p.requires_grad]
        assert all(lens.reconstructor.get_parameter(n).grad is not None for n in missing), kind


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_choices_and_gradients_are_those_of_torch_with_the_same_noise(temperature, monkeypatch):
    logits = torch.randn(5, 9, dtype=torch.float64, generator=torch.manual_seed(1))
    logits.requires_grad_()
    weights = torch.randn(5, 9, dtype=torch.float64)
    noise = lenses.gumbel_noise(torch.arange(5), 0, 9).double()
    # torch's own noise is -log of exponential draws
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda draws: draws.copy_((-noise).exp()))
    theirs = F.gumbel_softmax(logits, tau=temperature, hard=True)
    ours = lenses.straight_through(logits, noise, temperature)
    torch.testing.assert_close(ours, theirs)
    assert ours.argmax(-1).tolist() == (logits + noise).argmax(-1).tolist()
    gradients = [torch.autograd.grad((y * weights).sum(), logits)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*gradients)
    assert gradients[0].abs().max() > 1e-3


def test_without_noise_the_most_probable_word_is_taken():
    logits = torch.tensor([[0.1, 2.0, 1.0], [3.0, 0.0, 2.9]])
    assert lenses.straight_through(logits, None, 0.5).tolist() == [[0, 1, 0], [1, 0, 0]]


def test_noise_of_neighbouring_samples_places_and_words_is_independent():
    first = lenses.gumbel_noise(torch.arange(500), 0, 100).double()
    second = lenses.gumbel_noise(torch.arange(500), 1, 100).double()
    # The standard error of a correlation over 50,000 pairs is 0.0045.
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


def test_words_are_drawn_as_often_as_their_probability_says():
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05])
    noise = lenses.gumbel_noise(torch.arange(20_000), 2, 4)
    drawn = lenses.straight_through(chances.log().expand(20_000, 4), noise, 1.0).mean(0)
    torch.testing.assert_close(drawn, chances, rtol=0, atol=0.012)
