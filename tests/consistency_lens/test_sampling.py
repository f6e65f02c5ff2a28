"""The straight-through choice against torch's, and noise that belongs to the sample."""

import math

import pytest
import torch
import torch.nn.functional as F

from lit_models.consistency_lens.lens import gumbel_noise, straight_through


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
