import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from datamodules.tokenizers import codes as coding
from tests.text_corpora import text_file

HISCO, OCC1950 = coding.named_code_system("hisco"), coding.named_code_system("occ1950")


def book_of(codes: list[str], system: coding.CodeSystem | None = None) -> coding.CodeBook:
    return coding.CodeBook(system or coding.CodeSystem(), codes, [""] * len(codes))


# --- systems ---


@pytest.mark.parametrize("raw", ["01110", " 01110 ", "-1", "-3"])
def test_a_hisco_code_survives_parsing_with_its_zeros_and_signs(raw):
    assert HISCO.parse(raw) == raw.strip()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("1110", r'lost its leading zeros \("01110"\)'),
        ("1110.0", r'decimal number; keep code columns as text \(here "01110"\)'),
        ("-1.0", r'decimal number.*"-1"'),
        ("011100", "has 6 symbols, and must have 5"),
        ("0111x", r'unknown symbol "x" at place 5; .*"0123456789" or one of -1, -2, -3'),
        ("-4", 'unknown symbol "-" at place 1'),
        ("  ", "code is empty"),
        ("#REF!", 'code "#REF!" is an error of Excel; mend its formula, or empty it'),
    ],
)
def test_a_wrong_hisco_code_is_refused_with_the_reason(raw, message):
    with pytest.raises(ValueError, match=message):
        HISCO.parse(raw)


def test_a_short_code_of_letters_is_not_said_to_have_lost_zeros():
    with pytest.raises(ValueError, match=r"has 2 symbols, and must have 3\.$"):
        coding.CodeSystem(length=3).parse("ab")


def test_a_system_is_found_by_name_and_a_wrong_name_gets_a_suggestion():
    assert (OCC1950.length, OCC1950.max_codes, OCC1950.specials) == (3, 2, {})
    own = coding.CodeSystem(length=2)
    assert coding.named_code_system(own) is own
    with pytest.raises(ValueError, match=r'"hisko" is not one of .*Did you mean "hisco"'):
        coding.named_code_system("hisko")


# --- the book ---


def test_the_table_spells_codes_and_fills_the_shorter_with_end():
    book = book_of(["10", "2", "012"])
    assert book.symbols == ["<pad>", "<begin>", "<end>", "<empty>", "0", "1", "2"]
    assert book.table.tolist() == [[5, 4, 2], [6, 2, 2], [4, 5, 6]]
    assert [book.index(code) for code in ("10", "2", "012")] == [0, 1, 2]


def test_a_special_is_one_symbol():
    book = book_of(["01110", "-1"], HISCO)
    assert book.symbols[4:] == ["0", "1", "-1"]
    assert book.table[1].tolist() == [6, coding.END_ID, coding.END_ID, coding.END_ID, coding.END_ID]


def test_an_unknown_code_lists_the_nearest_first():
    book = coding.CodeBook(HISCO, ["01110", "01120", "99999"], ["Chemist", "", ""])
    with pytest.raises(ValueError, match=r"3 codes\); nearest: 01110 \(Chemist\), 01120, 99999"):
        book.index("01111")
    assert book.nearest("01", count=1) == [("01110", "Chemist")]


def test_lost_zeros_show_against_a_book_of_any_length():
    with pytest.raises(ValueError, match=r'"1110" .*lost its leading zeros \("01110"\)'):
        book_of(["01110", "22"]).index("1110")


levels = st.lists(st.integers(0, 12).map(str), min_size=1, max_size=8).map(",".join)
words = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=6)


@given(st.lists(words.filter(lambda w: w == w.strip()), min_size=1, max_size=20, unique=True))
def test_codes_of_any_script_come_back_from_their_rows(codes):
    book = book_of(codes)
    spelled = [[book.symbols[i] for i in row if i != coding.END_ID] for row in book.table]
    assert ["".join(symbols) for symbols in spelled] == codes


@given(st.lists(levels, min_size=1, max_size=20, unique=True))
def test_a_book_comes_back_from_json_with_the_same_ids(codes):
    book = book_of(codes)
    copy = coding.CodeBook.from_dict(json.loads(json.dumps(book.to_dict())))
    assert copy.to_dict() == book.to_dict()
    assert np.array_equal(copy.table, book.table)
    assert copy.max_codes == book.max_codes


# --- building ---


def test_a_book_file_makes_unseen_codes_legal_and_adds_the_specials(tmp_path):
    path = text_file(tmp_path / "book.csv", "code,description\n01110,Chemist\n-1,No title\n")
    book = coding.build_code_book(HISCO, path, ["99999"])
    assert book.codes == ["01110", "-1", "-2", "-3"]
    assert book.descriptions[:2] == ["Chemist", "No title"]
    assert book.max_codes == 5


def test_without_a_book_the_codes_in_the_data_are_the_book():
    assert coding.build_code_book(OCC1950, None, ["100", "010", "100"]).codes == ["010", "100"]
    with pytest.raises(ValueError, match="the data hold no code"):
        coding.build_code_book(coding.CodeSystem(), None, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("code,description\n01110,a\n1120,b\n", r'book\.csv:3: code "1120" seems to have lost'),
        ("code,description\n01110,a\n01110,b\n", r'book\.csv:3: code "01110" has two'),
    ],
)
def test_a_wrong_book_file_is_refused_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        coding.build_code_book(HISCO, text_file(tmp_path / "book.csv", text), [])


def test_a_missing_book_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        coding.build_code_book(HISCO, tmp_path / "none.csv", [])


def test_codes_cut_short_by_a_number_format_are_suspected():
    assert coding.lost_zero_suspects(["1110", "12345", "23456", "34567"]) == ["1110"]
    assert coding.lost_zero_suspects(["1110", "01234", "23456"]) == []
    assert coding.lost_zero_suspects(["1", "12", "123"]) == []
    assert coding.lost_zero_suspects([]) == []
