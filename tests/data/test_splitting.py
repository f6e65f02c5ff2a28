from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.files.rows import RowFault
from datamodules.files.splitting import (
    TEST,
    VALIDATION,
    SplitOptions,
    parse_part,
    split_by_stem,
    stem_key,
)

TEXTS = [f"trade{i % 400}{' (deceased)' if i % 3 else ''}" for i in range(2000)]
CODES = [f"{i % 400 // 40}" for i in range(2000)]


@pytest.mark.parametrize(
    "variants",
    [
        ("Farmer", "farmer (deceased)", "retired  farmer.", "FARMER, late", "farmer (dec'd)"),
        ("wine and spirit merchant", "Merchant; spirit and wine"),
        ("Bødker", "bodker afdød", "fhv. bødker"),
        ("Müller", "ehemaliger muller"),
        ("smålandsk smed", "pensionerad SMED, smalandsk"),
        ("baker's man", "bakers man", "man: baker\u2019s"),
        ("cultivateur", "cultivateur décédé", "ancien cultivateur"),
    ],
)
def test_variants_of_one_string_share_a_key(variants: tuple[str, ...]) -> None:
    assert len({stem_key(variant) for variant in variants}) == 1


def test_the_key_is_the_sorted_words_without_case_accents_and_status_or_what_is_there() -> None:
    assert stem_key("Retired Wine-Merchant, née Ærø") == "aero merchant nee wine"
    assert stem_key("Deceased") == "deceased"
    assert stem_key("???") == "???"
    assert stem_key("大工") == "大工"
    assert stem_key("") == ""


def test_each_code_with_enough_strings_has_its_shares() -> None:
    parts = split_by_stem(TEXTS, CODES, SplitOptions(0.1, 0.1))
    for code in set(CODES):
        texts = {stem_key(t): p for t, c, p in zip(TEXTS, CODES, parts, strict=True) if c == code}
        assert np.bincount(list(texts.values())).tolist() == [32, 4, 4]


def test_small_codes_get_their_shares_on_average_and_keep_one_string_for_training() -> None:
    texts = [f"t{i}" for i in range(3000)]
    parts = split_by_stem(texts, [str(i // 2) for i in range(3000)], SplitOptions(0.2, 0.1))
    assert np.bincount(parts) / 3000 == pytest.approx([0.7, 0.2, 0.1], abs=0.02)
    assert (np.bincount(parts.reshape(-1, 2).min(axis=1)) == [1500]).all()


@settings(deadline=None)
@given(st.permutations(range(40)))
def test_the_order_of_the_rows_changes_nothing(order: list[int]) -> None:
    texts, codes = [f"t{i % 30}" for i in range(40)], [str(i % 3) for i in range(40)]
    first = split_by_stem(texts, codes, SplitOptions(0.2, 0.2))
    rows = ([column[i] for i in order] for column in (texts, codes))
    assert split_by_stem(*rows, SplitOptions(0.2, 0.2)).tolist() == first[order].tolist()


def test_the_seed_draws_another_split() -> None:
    splits = [split_by_stem(TEXTS, CODES, SplitOptions(seed=seed)) for seed in (0, 1, 2)]
    assert all((a != b).any() for a, b in pairwise(splits))


def test_a_wrong_split_value_is_refused() -> None:
    with pytest.raises(RowFault, match='split "7" is not one of train'):
        parse_part("7")
    assert [*map(parse_part, ("Test", " dev", "validation"))] == [TEST, VALIDATION, VALIDATION]


def test_the_split_is_this_one_on_every_machine() -> None:
    split = split_by_stem([f"t{i}" for i in range(12)], ["a"] * 12, SplitOptions(0.25, 0.25))
    assert split.tolist() == [1, 0, 0, 0, 0, 0, 2, 2, 2, 1, 0, 1]
