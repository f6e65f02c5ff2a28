"""Spelling noise for training: what scribes, typists and readers of old hands do to a text."""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np

from datamodules.files.splitting import STATUS_WORDS

UNKNOWN_LANGUAGE = "unk"
DROP_LANGUAGE = 0.25
NUM_STATUS_WORDS = 3


@dataclass
class Augmentation:
    """How training texts are varied; every field but num_edits is a probability per sample.

    Args:
        delete: letters are left out.
        insert: letters of the sample's script are put in.
        substitute: letters are replaced by others of the script.
        neighbour: letters are replaced by those beside them on the keyboard.
        swap_letters: neighbouring letters change places.
        swap_words: two words change places; leave it 0 where word order decides the code.
        status_word: a word such as "deceased" is added in the sample's language.
        drop_language: the language becomes unknown; null = 0.25 once any other field is on.
        num_edits: most letters that one kind of letter noise changes in a text, at least 1.
    """

    delete: float = 0.0
    insert: float = 0.0
    substitute: float = 0.0
    neighbour: float = 0.0
    swap_letters: float = 0.0
    swap_words: float = 0.0
    status_word: float = 0.0
    drop_language: float | None = None
    num_edits: int = 1

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.name != "num_edits"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} is a probability, 0 to 1, got {value}.")
        if self.num_edits < 1:
            raise ValueError(
                f"num_edits must be at least 1, got {self.num_edits}; set the probabilities to 0 "
                "to turn augmentation off."
            )

    @property
    def is_on(self) -> bool:
        """Whether any text or language can change."""
        return any(self.probabilities())

    def probabilities(self) -> tuple[float, ...]:
        """The eight probabilities in the order of the fields, drop_language resolved."""
        on_text = (
            *(self.delete, self.insert, self.substitute, self.neighbour, self.swap_letters),
            *(self.swap_words, self.status_word),
        )
        default = DROP_LANGUAGE if any(on_text) else 0.0
        return (*on_text, default if self.drop_language is None else self.drop_language)


def augment(
    text: str,
    language: str,
    shares: np.ndarray,
    rng: np.random.Generator,
    options: Augmentation,
) -> tuple[str, str]:
    """The sample with noise; never empty, and unchanged where all probabilities are 0.

    Args:
        text: normalised text.
        language: ISO name, or unk.
        shares: [8] in [0, 1), drawn for the sample: a kind of noise comes where its share is
            below its probability.
        rng: the sample's own generator, which says where noise falls.
        options: probabilities.
    """
    fires = (shares < options.probabilities()).tolist()
    if not any(fires):
        return text, language
    *letter_noise, swaps_words, adds_status, drops_language = fires
    varied = text
    if any(letter_noise):
        varied = _letter_noise(varied, language, letter_noise, rng, options.num_edits)
    if swaps_words or adds_status:
        draws = iter(rng.random(4).tolist())
        if swaps_words:
            varied = _swap_words(varied, next(draws), next(draws))
        if adds_status:
            varied = _add_status_word(varied, language, next(draws), next(draws))
    if not varied.strip():
        varied = text
    return varied, UNKNOWN_LANGUAGE if drops_language else language


def _letter_noise(
    text: str, language: str, fires: list[bool], rng: np.random.Generator, num_edits: int
) -> str:
    deletes, inserts, substitutes, neighbours, swaps = fires
    draws = iter(rng.random(sum(fires) * (1 + 2 * num_edits)).tolist())
    letters = list(text)
    if deletes:
        for where, _ in _edits(draws, num_edits):
            if len(letters) > 1:
                del letters[int(where * len(letters))]
    if inserts:
        for where, which in _edits(draws, num_edits):
            place = int(where * (len(letters) + 1))
            alphabet = _alphabet(letters, place, language)
            letters.insert(place, alphabet[int(which * len(alphabet))])
    if substitutes:
        for where, which in _edits(draws, num_edits):
            place = int(where * len(letters))
            alphabet = _alphabet(letters, place, language)
            letters[place] = alphabet[int(which * len(alphabet))]
    if neighbours:
        for where, which in _edits(draws, num_edits):
            place = int(where * len(letters))
            near = _NEIGHBOURS.get(letters[place])
            if near:
                letters[place] = near[int(which * len(near))]
    if swaps:
        for where, _ in _edits(draws, num_edits):
            place = int(where * (len(letters) - 1))
            letters[place : place + 2] = letters[place : place + 2][::-1]
    return "".join(letters)


def _edits(draws: Iterator[float], num_edits: int) -> Iterator[tuple[float, float]]:
    """One to num_edits pairs of draws, always using up the same number of them."""
    count = 1 + int(next(draws) * num_edits)
    pairs = [(next(draws), next(draws)) for _ in range(num_edits)]
    return iter(pairs[:count])


def _alphabet(letters: list[str], place: int, language: str) -> str | list[str]:
    """Letters that may stand here: those of the script, or of the text for a script without one."""
    letter = letters[place] if place < len(letters) else letters[-1]
    code_point = ord(letter)
    if code_point < _LATIN_END:
        return _LATIN_LETTERS.get(language, _LATIN)
    for start, end, alphabet in _SCRIPTS:
        if start <= code_point < end:
            return alphabet
    return letters


def _swap_words(text: str, first: float, second: float) -> str:
    words = text.split(" ")
    if len(words) < 2:
        return text
    i = int(first * len(words))
    j = (i + 1 + int(second * (len(words) - 1))) % len(words)
    words[i], words[j] = words[j], words[i]
    return " ".join(words)


def _add_status_word(text: str, language: str, which: float, where: float) -> str:
    words = STATUS_WORDS.get(language, ())[:NUM_STATUS_WORDS]
    if not words:
        return text
    word = words[int(which * len(words))]
    forms = (f"{text} ({word})", f"{word} {text}", f"{text} {word}")
    return forms[int(where * len(forms))]


def _keyboard_neighbours(*rows: str) -> dict[str, str]:
    """Each key with those left, right, above and below it on a staggered keyboard."""
    near: dict[str, str] = {}
    for y, row in enumerate(rows):
        for x, key in enumerate(row):
            around = [
                (y, x - 1),
                (y, x + 1),
                (y - 1, x),
                (y - 1, x + 1),
                (y + 1, x - 1),
                (y + 1, x),
            ]
            near[key] = "".join(
                rows[v][u] for v, u in around if 0 <= v < len(rows) and 0 <= u < len(rows[v])
            )
    return near


_NEIGHBOURS = {
    **_keyboard_neighbours("йцукенгшщзхъ", "фывапролджэ", "ячсмитьбю"),
    **_keyboard_neighbours("qwertyuiopå", "asdfghjklæø", "zxcvbnm"),
}
_LATIN = "abcdefghijklmnopqrstuvwxyz"
_LATIN_END = 0x250
_LATIN_LETTERS = {
    language: _LATIN + extra
    for language, extra in {
        **{"da": "æøå", "no": "æøå", "sv": "åäö", "fi": "åäö", "de": "äöüß", "nl": "ëï"},
        **{"fr": "éèêàçô", "es": "ñáéíóú", "pt": "ãçáéíóõ", "it": "àèéìòù", "ca": "àçèéíòú"},
    }.items()
}
_SCRIPTS = (
    (0x370, 0x400, "αβγδεζηθικλμνξοπρστυφχψω"),
    (0x400, 0x530, "абвгдежзийклмнопрстуфхцчшщъыьэюя"),
    (0x590, 0x600, "אבגדהוזחטיכלמנסעפצקרשת"),
    (0x600, 0x700, "ابتثجحخدذرزسشصضطظعغفقكلمنهوي"),
)
