"""The head of a title: by hand, against a plain reference, and whatever stands around it."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_models.occupation_coder.encoders import SPACE, ngram_keys, within_words
from lit_models.occupation_coder.linear import (
    LinearHead,
    LinearOptions,
    TitleHeads,
    refuse_other_features,
)

ENDS = ["and", "of", "at", "from", "&", ",", "(", ")"]


def spaced(text: str, size: int = 0) -> torch.Tensor:
    ids = [SPACE, *map(ord, text), SPACE]
    return torch.tensor([ids + [SPACE] * (size - len(ids))])


def head_of(text: str, ends: list[str], size: int = 0) -> str:
    ids = spaced(text, size)
    return "".join(map(chr, ids[TitleHeads(ends)(ids)].tolist()))


def plain_head(text: str, ends: list[str]) -> str:
    last = ""
    for word in re.findall(r"[&,()]|[^\s&,()]+", text):
        if word not in ends:
            last = word
        elif last:
            return last
    return last


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("solicitor's clerk of london", "clerk"),
        ("carpenter and joiner", "carpenter"),
        ("and boot maker", "maker"),
        ("fisherman ( )", "fisherman"),
        ("(clerk) at sea", "clerk"),
        ("professor,music", "professor"),
        ("sandman", "sandman"),
        ("of and", ""),
        ("", ""),
        ("smed på landet", "landet"),
        ("form a", "a"),  # "from" has the same letters
        ("boot and shoe maker", "boot"),  # no grammar is read
    ],
)
def test_the_head_is_the_last_word_before_the_first_end(text, head):
    assert head_of(text, ENDS) == head
    assert head_of(text, ENDS, size=40) == head


@settings(deadline=None)
@given(st.text("aofnd &,(å", max_size=30))
def test_it_is_what_reading_word_by_word_finds(text):
    assert head_of(text, ENDS) == plain_head(text, ENDS)


@settings(deadline=None)
@given(st.lists(st.text("ab ", max_size=8), min_size=1, max_size=4))
def test_each_row_has_its_own_head(texts):
    size = max(map(len, texts)) + 2
    together = TitleHeads(["b"])(torch.cat([spaced(text, size) for text in texts]))
    for row, text in zip(together, texts, strict=True):
        assert row.tolist() == TitleHeads(["b"])(spaced(text, size))[0].tolist()


def test_ngrams_within_words_are_those_of_padded_words():
    ids = spaced("ab c")  # " ab " and " c "
    inside = within_words(ids, [1, 2, 3])
    keys, _ = ngram_keys(ids, torch.tensor([ids.shape[1]]), [1, 2, 3])
    assert keys.shape == inside.shape
    text = " ab c "
    found = {
        (text[start : start + size])
        for start in range(len(text))
        for place, size in enumerate([1, 2, 3])
        if inside[0, start, place] and start + size <= len(text)
    }
    assert found == {"a", "b", "c", " a", "ab", "b ", " c", "c ", " ab", "ab ", " c "}


def features(texts: list[str], **options: object) -> torch.Tensor:
    head = LinearHead(2, LinearOptions(ngram_sizes=(2, 3), num_features=1 << 14, **options))
    size = max(map(len, texts))
    ids = torch.tensor([[*map(ord, text)] + [0] * (size - len(text)) for text in texts])
    return head.features(ids, ids > 0)


def test_within_words_the_order_of_words_and_their_neighbours_say_nothing():
    one, other = features(["boot maker", "maker boot"], within_words=True)
    torch.testing.assert_close(one, other)
    one, other = features(["boot maker", "maker boot"])
    assert one @ other < 0.9


def test_a_title_is_nearer_to_one_of_its_head():
    texts = ["clerk of the docks", "clerk", "docks"]
    options = {"within_words": True, "head_ends": ("of",)}
    plain = features(texts, within_words=True)
    weighted = features(texts, head_weight=1.0, **options)
    assert weighted[0] @ weighted[1] > plain[0] @ plain[1]
    assert weighted[0] @ weighted[2] < plain[0] @ plain[2]
    torch.testing.assert_close(weighted.norm(dim=1), torch.ones(3))


def test_a_title_is_nearer_to_one_of_its_core_up_to_the_head():
    texts = ["ship carpenter of London", "ship carpenter", "carpenter of London"]
    options = {"within_words": True, "head_ends": ("of",)}
    plain = features(texts, within_words=True)
    weighted = features(texts, core_weight=1.0, **options)
    assert weighted[0] @ weighted[1] > plain[0] @ plain[1]
    assert weighted[0] @ weighted[2] < plain[0] @ plain[2]
    of_core = features(texts, core_weight=1e4, **options)  # then little else counts
    torch.testing.assert_close(of_core[0], of_core[1], atol=1e-3, rtol=0)
    torch.testing.assert_close(weighted.norm(dim=1), torch.ones(3))


def test_the_heads_ngrams_count_once_more_by_their_weight():
    one, other = features(["ab", "ab"], head_weight=0.5, within_words=True)
    torch.testing.assert_close(one @ other, torch.tensor(1.0))
    # "b ab" has 7 n-grams, " b", "b ", " b ", " a", "ab", " ab" and "ab ", of them "b " twice;
    # those of its head "ab" are 5, each of them among the columns of heads.
    text, bare = features(["b ab", "ab"], head_weight=0.5, within_words=True)
    counts, of_head = torch.tensor([1, 2, 1, 1, 1, 1, 1]).float(), torch.ones(5)
    shared = torch.tensor([2, 1, 1, 1, 1]).float().sum() / counts.norm() / of_head.norm()
    torch.testing.assert_close(text @ bare, (shared + 0.25) / 1.25)


def test_a_text_without_words_has_no_features():
    assert features(["", "clerk"], within_words=True, head_weight=0.5)[0].norm() == 0


def test_it_can_be_built_without_memory():
    with torch.device("meta"):
        LinearHead(2, LinearOptions(head_weight=0.5, head_ends=["of", ","]))


@pytest.mark.parametrize("ends", [("part of",), ("",), (" of",), "of"])
def test_ends_that_are_never_found_are_refused(ends):
    with pytest.raises(ValueError, match="must be a list of single words or signs"):
        LinearOptions(head_weight=1.0, head_ends=ends)


def test_weights_of_other_features_are_refused():
    trained = {"ngram_sizes": [3, 2], "num_features": 64, "cost": 0.5}
    same = LinearOptions(ngram_sizes=(2, 3), num_features=64, cost=0.1)
    refuse_other_features(same, trained)  # made before there were heads
    refuse_other_features(None, trained)
    other = LinearOptions(ngram_sizes=(2, 3), num_features=64, head_weight=0.4)
    with pytest.raises(ValueError, match=r"loss\.linear\.head_weight 0\.0, but it is 0\.4 here"):
        refuse_other_features(other, trained)
    with pytest.raises(ValueError, match="within_words True, but it is False here"):
        refuse_other_features(same, {**trained, "within_words": True})
