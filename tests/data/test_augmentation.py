import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.occupations.batches import Augmentation, augment

FIELDS = (
    "delete",
    "insert",
    "substitute",
    "swap_letters",
    "swap_words",
    "status_word",
)
LATIN = set("abcdefghijklmnopqrstuvwxyz")


def only(name: str, **options: int) -> Augmentation:
    return Augmentation(**{name: 1.0}, drop_language=0.0, **options)


def variants(text: str, options: Augmentation, language: str = "en", count: int = 200) -> set[str]:
    rngs = (np.random.default_rng(i) for i in range(count))
    return {augment(text, language, rng.random(8), rng, options)[0] for rng in rngs}


def noisy(text: str, seed: int, options: Augmentation) -> tuple[str, str]:
    rng = np.random.default_rng(seed)
    return augment(text, "en", rng.random(8), rng, options)


def test_the_default_changes_nothing() -> None:
    assert not any(Augmentation().probabilities())
    assert variants("farmer", Augmentation()) == {"farmer"}
    assert noisy("farmer", 0, Augmentation())[1] == "en"


def test_deletion_leaves_one_letter_out() -> None:
    assert variants("abcd", only("delete")) == {"bcd", "acd", "abd", "abc"}


def test_insertion_adds_a_letter_anywhere() -> None:
    found = variants("AB", only("insert"), count=500)
    assert {len(text) for text in found} == {3}
    assert {text.index(text.strip("AB") or "?") for text in found} == {0, 1, 2}
    assert {text.replace("A", "").replace("B", "") for text in found} <= LATIN


def test_substitution_takes_letters_of_the_script_and_the_language() -> None:
    assert {text[0] for text in variants("a", only("substitute"), count=900)} == LATIN
    assert "ø" in variants("a", only("substitute"), "da", count=900)
    assert variants("ж", only("substitute")) <= set("абвгдежзийклмнопрстуфхцчшщъыьэюя")
    assert variants("大工", only("substitute")) <= {"大工", "大大", "工工"}


def test_letters_and_words_change_places() -> None:
    assert variants("abc", only("swap_letters")) == {"bac", "acb"}
    assert variants("a b c", only("swap_words")) == {"b a c", "c b a", "a c b"}
    assert variants("smith", only("swap_words")) == {"smith"}
    assert variants("a", only("swap_letters")) == {"a"}


def test_a_status_word_is_added_in_the_samples_language() -> None:
    assert {"smed (afdød)", "afdød smed", "smed afdød"} <= variants(
        "smed", only("status_word"), "da"
    )
    assert variants("smed", only("status_word"), "unk") == {"smed"}


def test_the_number_of_edits_is_a_most() -> None:
    lengths = {len(text) for text in variants("abcdefgh", only("delete", num_edits=3))}
    assert lengths == {5, 6, 7}


def test_the_language_is_dropped_a_quarter_of_the_time_once_augmentation_is_on() -> None:
    options = Augmentation(delete=1e-9)
    rngs = [np.random.default_rng(i) for i in range(2000)]
    dropped = sum(augment("farmer", "en", rng.random(8), rng, options)[1] == "unk" for rng in rngs)
    assert dropped / 2000 == pytest.approx(0.25, abs=0.04)
    assert only("delete").probabilities()[-1] == 0
    assert any(Augmentation(drop_language=0.5).probabilities())


@settings(deadline=None)
@given(
    st.text(min_size=1, max_size=12).filter(lambda text: text.strip()),
    st.integers(0, 2**32),
    st.integers(1, 4),
)
def test_no_text_becomes_empty(text: str, seed: int, num_edits: int) -> None:
    options = Augmentation(**dict.fromkeys(FIELDS, 0.8), num_edits=num_edits)
    assert noisy(text, seed, options)[0].strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delete": 1.2}, "delete is a probability, 0 to 1, got 1.2"),
        ({"drop_language": -1}, "drop_language is a probability"),
        ({"num_edits": 0}, "num_edits must be at least 1, got 0"),
    ],
)
def test_impossible_options_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augmentation(**arguments)
