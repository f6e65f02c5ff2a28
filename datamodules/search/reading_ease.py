"""How easily a text is read, by formulas of its language and a library's syllables."""

from datamodules.search.cleaning import library
from datamodules.text.encoding import sentences_of, words_of

FLESCH = {  # base, per word of a sentence, per syllable of a word
    "en": (206.835, 1.015, 84.6),  # Flesch 1948
    "de": (180.0, 1.0, 58.5),  # Amstad 1978
    "fr": (207.0, 1.015, 73.6),  # Kandel & Moles 1958
    "es": (206.84, 1.02, 60.0),  # Fernández Huerta 1959
    "it": (217.0, 1.3, 60.0),  # Franchina & Vacca 1972
    "nl": (206.84, 0.93, 77.0),  # Douma 1960
}


def reading_ease(lines: list[str], language: str | None) -> float | None:
    """Return how easily a text is read, by Flesch's formula as adapted to its language: about 30
    is hard, 60 plain, 90 easy; `None` for another language, and without words.

    Syllables are those between which pyphen divides words.
    """
    code = (language or "").lower().replace("_", "-").partition("-")[0]
    words, sentences = words_of("\n".join(lines)), sentences_of(lines)
    if code not in FLESCH or not words:
        return None
    pyphen = library("pyphen")
    hyphens = pyphen.Pyphen(lang=pyphen.language_fallback(code))
    syllables = sum(1 + len(hyphens.positions(word)) for word in words)
    base, of_sentence, of_word = FLESCH[code]
    mean_words, mean_syllables = len(words) / len(sentences), syllables / len(words)
    return round(base - of_sentence * mean_words - of_word * mean_syllables, 1)
