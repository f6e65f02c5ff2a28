"""Languages: the standard's codes, the field's habits, no guesses."""

import pytest

from datamodules.occupations.store import ALIASES, ISO_639_1, language_code


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ("en", "en"),
        (" EN ", "en"),
        ("English", "en"),
        ("en-GB", "en"),
        ("en_US", "en"),
        ("se", "sv"),
        ("ge", "de"),
        ("dk", "da"),
        ("swe", "sv"),
        ("nb", "no"),
        ("Nynorsk", "no"),
        ("gr", "el"),
        ("Dutch", "nl"),
        ("unknown", "unk"),
        ("", "unk"),
        ("nan", "unk"),
    ],
)
def test_codes_aliases_and_names_are_understood(raw, code):
    assert language_code(raw) == code


def test_every_iso_code_is_itself_or_a_known_alias_of_another():
    changed = {code for code in ISO_639_1 if language_code(code) != code}
    assert changed == {"na", "nb", "nn"}
    assert set(ALIASES.values()) <= ISO_639_1
