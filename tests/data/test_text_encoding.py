"""Texts as input of an encoder, and as terms of search."""

import numpy as np
import pytest
import torch

from datamodules.text.encoding import Framing, TextLimits, padded, terms_by


@pytest.mark.parametrize("begin_id", [None, 9])
def test_rows_are_padded_as_one_by_one(begin_id: int | None) -> None:
    framing = Framing(begin_id, 8, TextLimits(max_length=7, max_query_length=2))
    begin = [] if begin_id is None else [begin_id]
    query, text, nothing = np.array([1, 2, 3]), np.array([4, 5, 6], np.uint16), np.zeros(0, int)
    rows = [*framing.pairs(query, [text]), framing.single(text), framing.query(nothing)]
    room = 7 - len(begin) - 4
    whole = [[*begin, 1, 2, 8, *[4, 5, 6][:room], 8], [*begin, 4, 5, 6, 8], [*begin, 8]]
    width = max(map(len, whole))
    batch = padded(rows)
    assert batch["input_ids"].tolist() == [row + [0] * (width - len(row)) for row in whole]
    lengths = torch.tensor([[len(row)] for row in whole])
    assert torch.equal(batch["attention_mask"], torch.arange(width) < lengths)
    first = len(begin) + 3
    segments = [0] * first + [1] * (width - first)
    assert batch["segment_ids"].tolist() == [segments, [0] * width, [0] * width]
    assert rows[0].ids.tolist() == whole[0]
    assert padded(rows[1:])["segment_ids"].dtype == torch.int64


def test_terms_are_words_in_lower_case_without_the_commonest_as_stems():
    assert terms_by(None, None)("The Flow-rate, 3.5!") == ["the", "flow", "rate", "3", "5"]
    assert terms_by(None, "english")("The flow of air") == ["flow", "air"]
    assert terms_by("english", "english")("The flows and angles") == ["flow", "angl"]


def test_a_text_becomes_its_terms_before_it_is_tokenised():
    assert TextLimits(stemmer="english").normalised("Flows, of AIR.") == "flow of air"
    assert TextLimits(lower_case=False).normalised("Flows, of AIR.") == "Flows, of AIR."


@pytest.mark.parametrize("options", [{"stemmer": "klingon"}, {"stopwords": "klingon"}])
def test_an_unknown_language_is_refused_with_those_that_are_known(options):
    with pytest.raises(ValueError, match="english"):
        TextLimits(**options)
