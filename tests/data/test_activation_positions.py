"""Choice of positions, and cutting of documents."""

from itertools import pairwise
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.activations.documents import Pieces, PositionRule, drawn_positions
from tests.text_corpora import request, text_file

CORPORA = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 2**64 - 1)), max_size=30)
RULES = st.builds(PositionRule, st.integers(0, 12), st.integers(1, 9), st.integers(0, 5))


def drawn(corpus: list[tuple[int, int]], rule: PositionRule) -> list[list[int]]:
    """Return the positions of each document."""
    sizes = np.array([size for size, _ in corpus], np.int64)
    hashes = np.array([key for _, key in corpus], np.uint64)
    documents, positions = drawn_positions(sizes, hashes, rule)
    assert documents.dtype == positions.dtype == np.int64
    assert (np.diff(documents) >= 0).all()
    return [positions[documents == number].tolist() for number in range(len(corpus))]


@given(CORPORA, RULES)
@settings(deadline=None)
def test_positions_are_distinct_ascending_in_range_and_as_many_as_there_are(corpus, rule):
    for (size, _), found in zip(corpus, drawn(corpus, rule), strict=True):
        assert len(found) == min(max(0, size - rule.min_position), rule.per_document)
        assert found == sorted(set(found))
        assert all(rule.min_position <= position < size for position in found)


@given(CORPORA, RULES, st.randoms())
@settings(deadline=None)
def test_a_document_draws_the_same_whatever_stands_around_it(corpus, rule, random):
    whole = drawn(corpus, rule)
    order = list(range(len(corpus)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert drawn([corpus[i] for i in order], rule) == [whole[i] for i in order]
    for i, one in enumerate(corpus[:3]):
        assert drawn([one], rule) == [whole[i]]


def test_every_choice_is_as_likely_as_any_other():
    """Pairs of 5 places over 20,000 documents, by a chi-squared test with 9 degrees of freedom."""
    keys = np.random.default_rng(0).integers(0, 2**63, 20_000).astype(np.uint64)
    rule = PositionRule(min_position=3, per_document=2)
    _, positions = drawn_positions(np.full(20_000, 8), keys, rule)
    pairs, counts = np.unique(positions.reshape(-1, 2), axis=0, return_counts=True)
    assert len(pairs) == comb(5, 2)
    expected = 20_000 / len(pairs)
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9  # quantile 0.999


def test_other_seeds_draw_other_positions():
    corpus = [(40, key) for key in range(100)]
    first, other = (drawn(corpus, PositionRule(6, 4, seed)) for seed in (0, 1))
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5


def test_a_negative_position_is_refused():
    for name, least in (("min_position", 0), ("per_document", 1)):
        with pytest.raises(ValueError, match=f"positions.{name} must be at least {least}, got -1"):
            PositionRule(**{name: -1})


def test_long_documents_are_cut_and_no_position_is_lost(tmp_path):
    texts = ["a" * 5, "b" * 23, "c", "d" * 12]
    paths = [tmp_path / f"{i}.txt" for i in range(len(texts))]  # type: ignore[operator]
    files = [text_file(path, text) for path, text in zip(paths, texts, strict=True)]
    pieces = Pieces(request(files).open(), 0, context_length=8)
    # Bytes between a begin and an end token: 6, 24, 2 and 13 positions, cut at 7.
    assert pieces.sizes.tolist() == [6, 7, 7, 7, 3, 2, 7, 6]
    assert pieces.document.tolist() == [0, 1, 1, 1, 1, 2, 3, 3]
    assert max(len(pieces.tokens(i)) for i in range(len(pieces.starts))) == 8
    for document, text in enumerate(texts):
        own = [pieces.tokens(i) for i in np.flatnonzero(pieces.document == document)]
        read = np.concatenate([own[0][:1], *(tokens[1:] for tokens in own)])
        assert pieces.store.tokenizer.decode(read) == text
        assert all(a[-1] == b[0] for a, b in pairwise(own))
    assert len(set(pieces.hashes.tolist())) == len(pieces.starts)
    assert pieces.hashes[0] == pieces.stream.hashes[0]
