"""Statistics of activations beside plain numpy."""

from collections.abc import Iterator

import numpy as np
import pytest

from datamodules.activations.store import Chunk, statistics_of

NUM, WIDTH = 700, 12


def sample(offset: float = 3.0) -> Chunk:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM, WIDTH)) @ rng.standard_normal((WIDTH, WIDTH)) + offset
    return x.astype(np.float32), rng.integers(0, 9, NUM) * 5, rng.integers(2, 6, NUM)


def cut(arrays: Chunk, size: int) -> Iterator[Chunk]:
    for start in range(0, NUM, size):
        x, tokens, positions = (values[start : start + size] for values in arrays)
        yield x, tokens, positions


def test_they_are_those_of_plain_numpy() -> None:
    x32, tokens, positions = sample()
    x, found = x32.astype(np.float64), statistics_of(cut(sample(), 64))
    np.testing.assert_allclose(found.mean, x.mean(0), rtol=1e-13)
    assert found.variance == pytest.approx(x.var(0).mean(), rel=1e-12)
    lengths = np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(found.unit_mean, (x / lengths[:, None]).mean(0), rtol=1e-12)
    expected = (lengths.mean(), lengths.std(), lengths.max())
    assert found.norms == pytest.approx(expected, rel=1e-12)
    assert found.token_ids.tolist() == sorted(set(tokens.tolist()))
    for token, mean in zip(found.token_ids, found.token_means, strict=True):
        np.testing.assert_allclose(mean, x[tokens == token].mean(0), rtol=2e-6)
    assert len(found.position_means) == 6
    for position in range(6):
        at = x[positions == position] if position > 1 else x  # 0 and 1 are absent: overall mean
        np.testing.assert_allclose(found.position_means[position], at.mean(0), rtol=2e-6)


def test_components_are_those_of_the_singular_values_with_a_fixed_sign() -> None:
    x = sample()[0].astype(np.float64)
    found = statistics_of(cut(sample(), 64)).components
    _, _, rows = np.linalg.svd(x - x.mean(0), full_matrices=False)
    assert found.shape == (WIDTH, WIDTH)
    np.testing.assert_allclose(np.abs((found * rows).sum(1)), 1, atol=1e-5)
    assert (found[np.arange(WIDTH), np.abs(found).argmax(1)] > 0).all()


def test_chunks_change_rounding_at_most_and_equal_chunks_nothing() -> None:
    first, other = statistics_of(cut(sample(), 64)), statistics_of(cut(sample(), 101))
    again = statistics_of(cut(sample(), 64))
    for name, value in vars(first).items():
        np.testing.assert_allclose(vars(other)[name], value, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(vars(again)[name], value)
    np.testing.assert_allclose(first.mean, other.mean, rtol=1e-13)


def test_a_large_common_offset_swallows_no_variance() -> None:
    """Some features of real models lie thousands away from zero."""
    x = sample(offset=1e6)[0].astype(np.float64)
    found = statistics_of(cut(sample(offset=1e6), 64))
    assert found.variance == pytest.approx(x.var(0).mean(), rel=1e-9)


def test_no_activation_and_no_number_are_refused() -> None:
    with pytest.raises(ValueError, match="is long enough .*lower data.positions.min_position"):
        statistics_of([])
    x, tokens, positions = sample()
    x[3, 3] = np.inf
    with pytest.raises(ValueError, match="no finite numbers.*take 32-true"):
        statistics_of([(x, tokens, positions)])
