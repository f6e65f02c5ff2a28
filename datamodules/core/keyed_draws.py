"""The first draws of many samples' own generators at once: Philox over an array of keys.

A generator object for each sample takes ten times as long as its few draws.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox 4x64-10.
"""

from typing import Any

import numpy as np

from datamodules.core.plan import sample_keys

_NUM_ROUNDS, _NUM_WORDS = 10, 4
_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_FACTORS_LOW, _FACTORS_HIGH = _FACTORS & _LOW, _FACTORS >> _HALF
_SPARE_BITS, _STEP = 11, 2.0**-53  # of a double in [0, 1), as numpy makes it
_HALF_BITS = 32
MOST_KEPT = 1 << 20  # samples whose words are kept, 8 bytes each word
_AT_ONCE = 4096  # samples, whose arithmetic stays in a processor's cache


def uniforms_for(seed: int, epoch: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    """Return [N, count] float64: `rng_for(seed, epoch, sample_id).random(count)` of each sample.

    Args:
        seed: of the run.
        epoch: from 0.
        sample_ids: [N] integers.
        count: draws of each sample.
    """
    return (words_for(seed, epoch, sample_ids, count) >> np.uint64(_SPARE_BITS)) * _STEP


def words_for(seed: int, epoch: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    """Return [N, count] uint64, the first random words of each sample's generator, of which each
    draw takes one; arguments as those of `uniforms_for`."""
    num_blocks = -(-count // _NUM_WORDS)
    keys = np.repeat(sample_keys(seed, epoch, sample_ids), num_blocks)
    # numpy's generator counts up before it draws
    counters = np.tile(np.arange(1, num_blocks + 1, dtype=np.uint64), len(sample_ids))
    return _philox(keys, counters).reshape(len(sample_ids), -1)[:, :count]


class KeptWords:
    """`words_for` of all samples of an epoch, made at once when the first of them is asked for: a
    sample costs a small part of what it does in a batch of some ten. One sample alone is better
    asked of `words_for`.

    Args:
        seed: of the run.
        num_samples: N; of more than `MOST_KEPT` those of a batch are made when they are asked for.
        count: words of each sample.
    """

    def __init__(self, seed: int, num_samples: int, count: int) -> None:
        self.seed, self.num_samples, self.count = seed, num_samples, count
        self._epoch, self._kept = -1, np.zeros((0, count), np.uint64)

    def __getstate__(self) -> dict[str, int]:
        """Return what a worker that is no fork gets, which makes its own."""
        return {name: getattr(self, name) for name in ("seed", "num_samples", "count")}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def of(self, sample_ids: np.ndarray, epoch: int) -> np.ndarray:
        """Return the first words of samples [B] in an epoch, [B, count] uint64."""
        if self.num_samples > MOST_KEPT:
            return words_for(self.seed, epoch, sample_ids, self.count)
        if epoch != self._epoch:
            parts = np.split(
                np.arange(self.num_samples), range(_AT_ONCE, self.num_samples, _AT_ONCE)
            )
            made = [words_for(self.seed, epoch, part, self.count) for part in parts]
            self._kept, self._epoch = np.concatenate(made), epoch
        return self._kept[sample_ids]


def uniform(word: Any) -> Any:
    """Return what `random()` makes of a word, or of each of an array of words."""
    return (word >> _SPARE_BITS) * _STEP


def below(word: int, count: int) -> int:
    """Return what `integers(count)` makes of a word, for a count of 2 to 2^32.

    Args:
        word: of 64 bits.
        count: one more than the largest that is drawn.

    Source: Lemire 2019, "Fast random integer generation in an interval".
    """
    mask = (1 << _HALF_BITS) - 1
    product = (word & mask) * count
    if product & mask < (mask + 1 - count) % count:  # once in 2^32 / count: numpy draws again,
        product = (word >> _HALF_BITS) * count  # from the other half of the word
    return product >> _HALF_BITS


def _philox(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return [n, 4] uint64: the block of each key [n] at its counter [n]; both uint64."""
    even = np.stack([counters, np.zeros_like(counters)])  # words 0 and 2 of the block
    odd = np.zeros_like(even)  # words 1 and 3
    key = np.stack([keys, np.zeros_like(keys)])
    for _ in range(_NUM_ROUNDS):
        high, low = _product(even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = key + _KEY_STEPS
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1)


def _product(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the upper and the lower 64 bits of words [2, n] times their factors."""
    low, high = words & _LOW, words >> _HALF
    first = _FACTORS_HIGH * low + (_FACTORS_LOW * low >> _HALF)
    second = _FACTORS_LOW * high + (first & _LOW)
    upper = _FACTORS_HIGH * high + (first >> _HALF) + (second >> _HALF)
    return upper, words * _FACTORS
