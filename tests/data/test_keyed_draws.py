"""Draws of many samples at once: those that each sample's own generator would give."""

import numpy as np
import pytest

from datamodules.core.keyed_draws import (
    KeptWords,
    _philox,
    below,
    uniform,
    uniforms_for,
    words_for,
)
from datamodules.core.plan import rng_for
from datamodules.search.training_pairs import place_in_proportion


def test_philox_gives_the_published_words():
    # Random123's kat_vectors: philox4x64, 10 rounds, counter and key 0.
    zero = np.zeros(1, np.uint64)
    assert [hex(word) for word in _philox(zero, zero)[0].tolist()] == [
        *("0x16554d9eca36314c", "0xdb20fe9d672d0fdc", "0xd7e772cee186176b", "0x7e68b68aec7ba23b")
    ]


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 7), (-3, 2), (2**63, 10**6)])
@pytest.mark.parametrize("count", [1, 4, 8, 11])
def test_draws_are_those_of_each_samples_own_generator(seed: int, epoch: int, count: int):
    ids = np.array([0, 1, 5, 2**31, 2**40])
    alone = [rng_for(seed, epoch, sample_id).random(count) for sample_id in ids.tolist()]
    np.testing.assert_array_equal(uniforms_for(seed, epoch, ids, count), alone)
    np.testing.assert_array_equal(uniforms_for(seed, epoch, ids[[3]], count), alone[3:4])


def test_a_place_is_drawn_as_numpy_draws_it() -> None:
    for seed in range(300):
        grades = np.random.default_rng(seed).choice([0.1, 1.0, 2.0, 3.0], 1 + seed % 9)
        one, other = np.random.default_rng(seed), np.random.default_rng(seed)
        expected = other.choice(len(grades), p=grades / grades.sum())
        assert place_in_proportion(grades, one.random()) == expected
        assert one.random() == other.random()


@pytest.mark.parametrize("count", [2, 3, 1000, 3_000_000_000, 2**32 - 1])
def test_numbers_below_another_are_those_that_numpy_draws(count: int) -> None:
    ids = np.arange(200)
    for words, sample_id in zip(words_for(3, 1, ids, 2).tolist(), ids.tolist(), strict=True):
        rng = rng_for(3, 1, sample_id)
        # of the largest counts, numpy refuses nearly a third: both halves of a word, at times
        if count > 2**31 and all((h * count) % 2**32 < 2**32 % count for h in halves(words[0])):
            continue
        assert below(words[0], count) == rng.integers(count)
        assert uniform(words[1]) == rng.random()


def halves(word: int) -> tuple[int, int]:
    return word % 2**32, word >> 32


def test_words_are_kept_for_an_epoch_and_are_those_of_each_sample(monkeypatch) -> None:
    ids = np.array([5, 9000, 4096, 5])
    kept = KeptWords(5, 10_000, 2)
    for epoch in (0, 1, 0):
        np.testing.assert_array_equal(kept.of(ids, epoch), words_for(5, epoch, ids, 2))
    monkeypatch.setattr("datamodules.core.keyed_draws.MOST_KEPT", 9_999)
    many = KeptWords(5, 10_000, 2)
    np.testing.assert_array_equal(many.of(ids, 1), words_for(5, 1, ids, 2))
    assert not len(many._kept)
