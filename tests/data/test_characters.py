"""Normalisation and encoding are the same in training and prediction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.tokenizers.codes import TextOptions, decode, encode

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


def test_text_is_lower_case_plain_and_single_spaced():
    normalise = TextOptions()
    assert normalise("  Wine \t and\nSPIRIT\u00a0Merchant ") == "wine and spirit merchant"
    assert normalise("ＦＵＬＬ ﬁsher") == "full fisher"
    assert normalise("a\0b") == "a b"
    folding = TextOptions(drop_status_words=True, fold_accents=True)
    assert folding("Afdød GÅRDMÆND à Ærø") == "gardmaend a aero"
    assert TextOptions.from_recipe(folding.to_recipe()) == folding
    kept = {"lowercase": True, "drop_status_words": False}
    assert normalise.to_recipe() == {"normalisation": kept, "max_length": 128}
    with pytest.raises(ValueError, match="trained on texts with lowercase: false, an option that"):
        TextOptions.from_recipe({"normalisation": {**kept, "lowercase": False}, "max_length": 9})


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.booleans())
def test_normalising_twice_changes_nothing_more(text, folds):
    normalise = TextOptions(fold_accents=folds)
    once = normalise(text)
    assert normalise(once) == once


@given(TEXTS.filter(lambda t: "\0" not in t))
def test_code_points_give_the_text_back(text):
    encoded = encode(text, max(1, len(text)))
    assert decode(encoded) == text
    assert encoded.dtype == np.int32


def test_a_long_text_is_cut():
    assert decode(encode("smøræ𝔘", 5)) == "smøræ"
    assert encode("smøræ𝔘", 6)[-1] == ord("𝔘")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("coach builder (deceased)", "coach builder"),
        ("soldier, ret’d.", "soldier"),
        ("Bager, afdød", "bager"),
        ("late baker and retired smith", "baker and smith"),
        ("Miner (dec'd)", "miner"),
        ("deceased", "deceased"),
        ("plate layer", "plate layer"),
    ],
)
def test_status_words_are_left_out_where_asked(text, expected):
    normalise = TextOptions(drop_status_words=True)
    assert normalise(text) == normalise(normalise(text)) == expected
    assert TextOptions()(text) == text.lower()
