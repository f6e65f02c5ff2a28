"""The first draws of many samples' own generators at once: Philox over an array of keys.

A generator object for each sample takes ten times as long as its few draws.

Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Philox 4x64-10.
"""

import numpy as np

from datamodules.plan import sample_keys

_NUM_ROUNDS, _NUM_WORDS = 10, 4
_FACTORS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
_SPARE_BITS, _STEP = np.uint64(11), 2.0**-53  # of a double in [0, 1), as numpy makes it


def uniforms_for(seed: int, epoch: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    """Return [N, count] float64: `rng_for(seed, epoch, sample_id).random(count)` of each sample.

    Args:
        seed: of the run.
        epoch: from 0.
        sample_ids: [N] integers.
        count: draws of each sample.
    """
    num_blocks = -(-count // _NUM_WORDS)
    keys = np.repeat(sample_keys(seed, epoch, sample_ids), num_blocks)
    # numpy's generator counts up before it draws
    counters = np.tile(np.arange(1, num_blocks + 1, dtype=np.uint64), len(sample_ids))
    words = _philox(keys, counters).reshape(len(sample_ids), -1)
    return (words[:, :count] >> _SPARE_BITS) * _STEP


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
    factor_low, factor_high = _FACTORS & _LOW, _FACTORS >> _HALF
    first = factor_high * low + (factor_low * low >> _HALF)
    second = factor_low * high + (first & _LOW)
    upper = factor_high * high + (first >> _HALF) + (second >> _HALF)
    return upper, words * _FACTORS
