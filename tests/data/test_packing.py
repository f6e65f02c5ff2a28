"""Rows of pieces: each piece once, none beyond the row, as a plain best fit would lay them."""

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from datamodules.text.packing import best_fit


def plain_best_fit(lengths, capacity):
    """Return the sorted lengths of every row, one piece at a time."""
    rows = []  # in the order in which they came to their room
    for size in sorted(lengths, reverse=True):
        fitting = [row for row in rows if sum(row) + size <= capacity]
        if not fitting:
            rows.append([])
            fitting = rows[-1:]
        chosen = max(fitting, key=sum)
        rows.append([*chosen, size])
        rows.remove(chosen)
    return sorted(rows)


def test_rows_worked_out_by_hand():
    # 7 | 6 | 5 joins none (12 > 10) | 3 joins the 7 | 3 joins the 6, which has the least room
    order, offsets = best_fit(np.array([3, 7, 5, 6, 3]), 10)
    rows = [order[a:b].tolist() for a, b in pairwise(offsets)]
    assert rows == [[0, 1], [3, 4], [2]]


@settings(deadline=None)
@example((30, [1, 2, 4, 25, 27]))  # two rows of equal room
@given(st.integers(1, 40).flatmap(
    lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=60))
))  # fmt: skip
def test_every_piece_is_in_one_row_and_rows_are_those_of_plain_best_fit(case):
    capacity, lengths = case
    order, offsets = best_fit(np.array(lengths, np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert offsets[0] == 0
    assert offsets[-1] == len(lengths)
    rows = [order[a:b].tolist() for a, b in pairwise(offsets)]
    assert all(row == sorted(row) and row for row in rows)
    sizes = [sorted((lengths[i] for i in row), reverse=True) for row in rows]
    assert all(sum(row) <= capacity for row in sizes)
    assert sorted(sizes) == plain_best_fit(lengths, capacity)


def ragged(num_pieces, seed):
    """Return log-normal lengths of mean 180 and sigma 0.8, cut at 512."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(180) - 0.8**2 / 2, 0.8, num_pieces))
    return np.clip(lengths.astype(np.int64), 1, 512)


@pytest.mark.parametrize("seed", range(3))
def test_ragged_documents_fill_nearly_all_positions(seed):
    lengths = ragged(10_000, seed)
    _, offsets = best_fit(lengths, 512)
    efficiency = lengths.sum() / ((len(offsets) - 1) * 512)
    assert efficiency >= 0.98
    assert 1 - efficiency < 0.01  # 0.9997 when this was written


def test_a_million_pieces_take_seconds():
    lengths = ragged(1_000_000, 0)
    started = time.perf_counter()
    best_fit(lengths, 512)
    assert time.perf_counter() - started < 10  # 0.5 s on a quiet machine


def test_pieces_longer_than_a_row_are_refused():
    with pytest.raises(ValueError, match="pieces must have 1 to 4 positions, got 2 to 5"):
        best_fit(np.array([2, 5]), 4)
