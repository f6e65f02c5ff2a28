"""Texts as terms, and tokens of them: rare and unknown words become one token."""

import pytest

from datamodules.text.encoding import TextLimits
from datamodules.text.terms import terms_by
from datamodules.tokenizers.text_tokenizer import TokenizerOptions, make_tokenizer

TEXTS = ["flow flows of air", "air flow at 3 angles", "angle of the wing"]


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


def test_words_of_fewer_texts_become_the_unknown_token():
    tokenizer = make_tokenizer(TokenizerOptions(kind="words", min_count=2), iter(TEXTS))
    unknown = tokenizer.backend.token_to_id("<|unknown|>")
    known = {"air", "flow", "of"}
    assert {w for w in tokenizer.backend.get_vocab() if not w.startswith("<|")} == known
    ids = tokenizer.encode("flow of molasses").tolist()
    assert ids[-1] == unknown
    assert unknown not in ids[:-1]
    assert unknown in tokenizer.special_ids.tolist()


def test_without_a_count_an_unknown_word_is_refused():
    tokenizer = make_tokenizer(TokenizerOptions(kind="words"), iter(TEXTS))
    with pytest.raises(ValueError, match='does not know the word "molasses"'):
        tokenizer.encode("flow of molasses")


def test_a_count_belongs_to_words():
    with pytest.raises(ValueError, match="min_count belongs to kind words"):
        TokenizerOptions(kind="bpe", min_count=2)
    with pytest.raises(ValueError, match="min_count belongs to kind words"):
        TokenizerOptions(kind="words", min_count=0)


def test_more_words_than_room_name_the_way_out():
    options = TokenizerOptions(kind="words", min_count=1, vocab_size=4)
    with pytest.raises(ValueError, match="raise data.tokenizer.min_count 1"):
        make_tokenizer(options, iter(TEXTS))
