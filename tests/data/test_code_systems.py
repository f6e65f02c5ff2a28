import pytest

from datamodules.tokenizers.codes import HISCO, OCC1950, CodeSystem, named_code_system

LEVELS = CodeSystem(level_separator=",")


@pytest.mark.parametrize("raw", ["01110", " 01110 ", "-1", "-3"])
def test_a_hisco_code_survives_parsing_with_its_zeros_and_signs(raw: str) -> None:
    assert HISCO().parse(raw) == raw.strip()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("1110", r'lost its leading zeros \("01110"\)'),
        ("1110.0", r'decimal number; keep code columns as text \(here "01110"\)'),
        ("-1.0", r'decimal number.*"-1"'),
        ("011100", "too long: 6 symbols, every code has 5"),
        ("0111x", r'unknown symbol "x" at place 5; .*"0123456789" or one of -1, -2, -3'),
        ("-4", 'unknown symbol "-" at place 1'),
        ("  ", "code is empty"),
    ],
)
def test_a_wrong_hisco_code_is_refused_with_the_reason(raw: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HISCO().parse(raw)


def test_a_short_code_of_letters_is_not_said_to_have_lost_zeros() -> None:
    with pytest.raises(ValueError, match=r"too short: 2 symbols, every code has 3\.$"):
        CodeSystem(length=3).parse("ab")


def test_levels_are_symbols_and_the_separator_is_not() -> None:
    assert LEVELS.parse("1, 1,3 ,12") == "1,1,3,12"
    assert LEVELS.split("1,1,3,12") == ["1", "1", "3", "12"]
    with pytest.raises(ValueError, match="empty level 2"):
        LEVELS.parse("1,,3")
    with pytest.raises(ValueError, match="too long: 3 levels, every code has 2"):
        CodeSystem(length=2, level_separator=",").parse("1,1,3")


def test_a_reserved_symbol_is_refused_as_a_level() -> None:
    with pytest.raises(ValueError, match="reserved symbol"):
        LEVELS.parse("1,<end>")


def test_a_system_is_found_by_name_and_a_wrong_name_gets_a_suggestion() -> None:
    assert isinstance(named_code_system("occ1950"), OCC1950)
    own = CodeSystem(length=2)
    assert named_code_system(own) is own
    with pytest.raises(ValueError, match=r'"hisko" is not one of .*Did you mean "hisco"'):
        named_code_system("hisko")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 0}, "length must be at least 1"),
        ({"max_codes": 6}, "max_codes must be 1 to 5, got 6"),
        ({"level_separator": ""}, "level_separator must not be empty"),
        ({"specials": ["-1"], "special_descriptions": ["a", "b"]}, "one per special"),
    ],
)
def test_a_system_with_impossible_rules_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeSystem(**arguments)
