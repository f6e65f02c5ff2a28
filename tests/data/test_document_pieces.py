"""Of the pieces of a document only those are kept that are read, whichever sentence is missing."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.relevance.document_parts import needed_pieces

LENGTHS = st.lists(st.integers(0, 9), min_size=3, max_size=12)


def without(pieces: list[np.ndarray], number: int) -> list[int]:
    left = (
        [pieces[0], *pieces[3:]]
        if number == 0
        else [p for n, p in enumerate(pieces[1:]) if n != number]
    )
    return np.concatenate(left).tolist()


@given(LENGTHS, st.integers(1, 15))
def test_every_document_without_a_sentence_begins_as_before(lengths: list[int], most: int) -> None:
    ends = np.cumsum(lengths).tolist()
    pieces = [np.arange(end - size, end) for end, size in zip(ends, lengths, strict=True)]
    kept = needed_pieces(pieces, most)
    assert len(kept) == len(pieces)
    for number in range(len(pieces) - 1):
        assert without(kept, number)[:most] == without(pieces, number)[:most]


@pytest.mark.parametrize(("most", "expected"), [(None, 50), (4, 12), (5, 16), (90, 50)])
def test_what_is_behind_is_left_out(most: int | None, expected: int) -> None:
    # 4 tokens each. Of 5 to read: the beginnings and two sentences, one of which may be missing.
    pieces = [np.arange(4)] * 12 + [np.arange(2)]
    assert sum(map(len, needed_pieces(pieces, most))) == expected
