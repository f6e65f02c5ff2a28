"""Text is divided by documents or by tails, whatever the order of the documents."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.files.splitting import TEST, TRAIN, VALIDATION
from datamodules.text.splitting import Fragments, TextSplit, cuts_of

PART_OF = {(True, True): TRAIN, (False, True): VALIDATION, (False, False): TEST}


def fragments(hashes, part=TRAIN, characters=10):
    """Return documents of one fragment each."""
    n = len(hashes)
    return Fragments(
        np.full(n, part, np.int8),
        np.full(n, characters, np.int64),
        np.array(hashes, np.uint64),
        np.ones(n, bool),
        np.ones(n, bool),
    )


def parts_of(found, split):
    cuts = cuts_of(found, split)
    assert set(np.unique(cuts)) <= {0, 10}
    return [PART_OF[a > 0, b > 0] for a, b in cuts.tolist()]


def test_shares_of_distinct_documents_are_held_out():
    parts = parts_of(fragments(range(100)), TextSplit(0.2, 0.1))
    assert np.bincount(parts).tolist() == [70, 20, 10]
    other = parts_of(fragments(range(100)), TextSplit(0.2, 0.1, seed=1))
    assert parts != other


@settings(deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1), st.randoms(use_true_random=False))
def test_equal_documents_share_a_part_whatever_the_order(hashes, random):
    split = TextSplit(0.3, 0.2)
    of_text = {}
    for text, part in zip(hashes, parts_of(fragments(hashes), split), strict=True):
        assert of_text.setdefault(text, part) == part
    shuffled = random.sample(hashes, len(hashes))
    again = parts_of(fragments(shuffled), split)
    assert [of_text[text] for text in shuffled] == again


@pytest.mark.parametrize(
    ("num_documents", "counts"), [(1, [1]), (2, [1, 1]), (3, [1, 1, 1]), (8, [6, 1, 1])]
)
def test_few_documents_leave_training_first_and_then_validation(num_documents, counts):
    parts = parts_of(fragments(range(num_documents)), TextSplit(0.1, 0.1))
    assert np.bincount(parts).tolist() == counts


def test_tails_are_those_of_nano_gpt():
    sizes = np.array([1, 10, 1_115_394])
    found = fragments(range(3))._replace(characters=sizes)
    cuts = cuts_of(found, TextSplit(by="tail"))
    assert cuts[:, 0].tolist() == [int(0.9 * n) for n in sizes.tolist()] == [0, 9, 1_003_854]
    assert cuts[:, 1].tolist() == sizes.tolist()


def test_a_tail_of_a_long_document_begins_in_one_of_its_fragments():
    # 40 characters in four fragments: 50 % are 20, 25 % are 10, 25 % are 10
    found = fragments(range(5))._replace(
        begins=np.array([True, False, False, False, True]),
        ends=np.array([False, False, False, True, True]),
        characters=np.array([15, 5, 5, 15, 4]),
    )
    cuts = cuts_of(found, TextSplit(0.25, 0.25, by="tail"))
    assert cuts.tolist() == [[15, 15], [5, 5], [0, 5], [0, 5], [2, 3]]


def test_a_long_document_stays_whole_and_its_parts_of_files_too():
    found = fragments([1, 2, 3, 4])._replace(begins=np.array([True, False, True, True]))
    assert found.document.tolist() == [0, 0, 1, 2]
    parts = parts_of(found, TextSplit(0.4))
    assert parts[0] == parts[1]
    assert sorted(parts[1:]) == [TRAIN, TRAIN, VALIDATION]
    held = fragments(range(4), VALIDATION)
    assert parts_of(held, TextSplit(0.5)) == [VALIDATION] * 4
    assert parts_of(fragments(range(4), TEST), None) == [TEST] * 4


def test_the_second_half_of_a_long_document_counts_in_its_hash():
    first, second = (
        fragments([1, h])._replace(begins=np.array([True, False])).document_hashes() for h in (2, 3)
    )
    assert len(first) == 1
    assert first != second


def test_wrong_shares_are_refused():
    with pytest.raises(ValueError, match=r"split.test_share must be 0 to 0.9, got 1.5"):
        TextSplit(test_share=1.5)
    with pytest.raises(ValueError, match=r"split.validation_share \+ .* at most 0.9, got 1.1: too"):
        TextSplit(0.6, 0.5)
    with pytest.raises(ValueError, match='split.by must be one of documents, tail, got "lines"'):
        TextSplit(by="lines")  # type: ignore[arg-type]
