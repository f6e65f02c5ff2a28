"""Of the pieces of a document only those are kept that are read, whichever sentence is missing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.search import document_parts
from datamodules.search.collection import Document
from datamodules.search.document_parts import document_sentences, needed_pieces

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


class Spelled:
    """An encoding whose tokens are characters; it remembers what it read."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def ids_of(self, texts: list[str], continues: bool = False) -> list[np.ndarray]:
        self.read += texts
        known = [f" {text}" if continues and text else text for text in texts]
        return [np.array([ord(character) for character in text], np.int64) for text in known]


def test_a_body_of_one_line_is_not_tokenised_once_more() -> None:
    texts = ["First one. Then two. And three.", "A line\nends. Then two.", "Alone it is.", ""]
    documents = [Document("Title", text) for text in texts]
    of_each = [document_sentences(document) for document in documents]
    encoding: Any = Spelled()
    alone = encoding.ids_of([sentence for own in of_each for sentence in own])
    pieces, is_divisible = document_parts._divided(documents, of_each, encoding, cuts=True)
    assert all(is_divisible)
    encoding.read.clear()
    for joined, expected in ((pieces, [texts[1]]), ([[]] * 4, texts[:2])):
        bodies = document_parts._bodies(documents, of_each, alone, joined, encoding)
        assert ["".join(map(chr, ids)) for ids in bodies] == texts
        assert encoding.read == expected
        encoding.read.clear()
    assert not any(document_parts._divided(documents, of_each, encoding, cuts=False)[1])
