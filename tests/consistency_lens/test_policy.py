"""Learning from groups of drawn explanations, without a gradient through the words."""

import pytest
import torch
from torch import Tensor

from lit_models.consistency_lens import loss
from lit_models.consistency_lens.lens import Lens
from lit_models.consistency_lens.loss import LensLosses, LossWeight, group_terms
from lit_models.training.dropout import mixed
from tests.consistency_lens.tiny import activations, documents, lens_of, moved

pytestmark = pytest.mark.slow

GROUP = 3


def batch_of(number: int = 3) -> dict[str, Tensor]:
    ids, lengths = documents((9,) * number)
    position = torch.full((number,), 4)
    keys = torch.arange(1, number + 1) * 977
    return {"input_ids": ids, "lengths": lengths, "position": position, "noise_key": keys}


def test_advantages_are_deviations_within_the_group() -> None:
    rewards = torch.tensor([[1.0, 2.0, 3.0], [5.0, 5.0, 5.0], [0.0, 0.0, -3.0]])
    found = loss.advantages(rewards)
    outer = 1.5**0.5
    expected = [[-outer, 0, outer], [0, 0, 0], [0.5**0.5, 0.5**0.5, -(2**0.5)]]
    torch.testing.assert_close(found, torch.tensor(expected))


def test_the_gradient_is_that_of_a_plain_reference() -> None:
    lens = moved(lens_of())
    batch, activation = batch_of(), activations()
    learning = [p for p in lens.verbalizer.parameters() if p.requires_grad]
    reading = [p for p in lens.reconstructor.parameters() if p.requires_grad]
    term = group_terms(lens, batch, activation, {"reconstruction"}, GROUP)["reconstruction"]
    found = torch.autograd.grad(term.sum(), [*learning, *reading])

    policy, errors = torch.zeros(()), torch.zeros(())
    for row in range(3):  # explanation by explanation
        nats, worth = [], []
        for draw in range(GROUP):
            one = activation[[row]]
            text = lens.verbalizer.explain(one, mixed(batch["noise_key"][[row]], draw)).token_ids
            chances = lens.verbalizer(one, text).softmax(-1)[0]
            nats.append(-sum(chances[i, w].log() for i, w in enumerate(text[0])) / len(text[0]))
            rebuilt = lens.reconstructor(lens.words(text), text[:, 0])
            worth.append((rebuilt - one).square().mean() / lens.variance)
        errors = errors + sum(worth) / GROUP
        rewards = -torch.stack(worth).detach()
        away = (rewards - rewards.mean()) / rewards.std(correction=0)
        policy = policy + sum(a * n for a, n in zip(away, nats, strict=True)) / GROUP
    torch.testing.assert_close(term.sum(), errors)
    expected = torch.autograd.grad(policy, learning, retain_graph=True)
    expected += torch.autograd.grad(errors, reading)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def test_each_sample_is_the_same_alone_and_the_group_says_which_terms() -> None:
    lens, batch = moved(lens_of()), batch_of()
    names = {"reconstruction", "reference", "effect", "fluency", "entropy"}
    together = group_terms(lens, batch, activations(), names, GROUP)
    assert set(together) == names
    one = {name: values[[1]] for name, values in batch.items()}
    alone = group_terms(lens, one, activations()[[1]], names, GROUP)
    for name, values in together.items():
        torch.testing.assert_close(alone[name][0], values[1], rtol=1e-9, atol=1e-9)


def error(lens: Lens, activation: Tensor) -> float:
    """Of drawn explanations, mean over 8 draws that no step has used."""
    found = []
    with torch.no_grad():
        for draw in range(8):
            keys = mixed(torch.arange(len(activation)), 10_000 + draw)
            drawn = lens.verbalizer.explain(activation, keys)
            rebuilt = lens.reconstructor(drawn.embeddings, drawn.token_ids[:, 0])
            found.append(loss.squared_error(rebuilt, activation, lens.variance).mean())
    return float(torch.stack(found).mean())


def lowest_error(lens: Lens, activation: Tensor) -> float:
    """Of all texts of two words."""
    texts = torch.cartesian_prod(torch.arange(28), torch.arange(28))
    with torch.no_grad():
        rebuilt = lens.reconstructor(lens.words(texts), texts[:, 0])
    errors = (rebuilt[:, None] - activation).square().mean(-1)  # [texts, B]
    return float(errors.min(0).values.mean())


def test_explanations_become_better_while_the_reconstructor_stands_still() -> None:
    lens, activation = lens_of(num_words=2), activations(8)
    batch, before, lowest = batch_of(8), error(lens, activation), lowest_error(lens, activation)
    optimizer = torch.optim.Adam(lens.verbalizer.parameters(), lr=0.03)
    for step in range(30):
        batch["noise_key"] = mixed(torch.arange(8), step)
        term = group_terms(lens, batch, activation, {"reconstruction"}, 16)["reconstruction"]
        optimizer.zero_grad()
        term.mean().backward()
        optimizer.step()
    assert error(lens, activation) < before - 0.4 * (before - lowest)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group_size must be 0 or at least 2, got 1: .*4 to 16"):
        LensLosses(reconstruction=LossWeight(1.0), group_size=1)
