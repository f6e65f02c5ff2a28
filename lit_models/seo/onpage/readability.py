"""Flesch reading ease and Flesch-Kincaid grade of English texts.

Source: Flesch 1948, "A new readability yardstick"; Kincaid et al. 1975, both in words per sentence
and syllables per word. Syllables are counted by rules of spelling, which miss about one word in
ten (compounds such as "something" are listed, names are not); over a page the errors mostly
cancel, over a line they do not.
"""

import re
from collections.abc import Sequence
from typing import Any

from datamodules.sentences import sentences_of, words_of

FEWEST_WORDS = 100  # on which both formulas were made
VOWELS = re.compile(r"[aeiouy]+")
# Two vowels that are two syllables: radio, serious, client, actual; not nation, special, million.
HIATUS = re.compile(
    r"(?<![tscgxln])i[ao](?!us)|iation|(?<![tscgx])iou|(?<![tc])(?<!fr)ie[tn]|iety|eo(?!u)"
    r"|eum$|^crea(?![mks])"
    r"|(?<![qg])ua(?!de)|iu|uou|[aeiouy]ing"
)
# An e that is not spoken: make, makes, jumped, completely; not table, bottles, wanted, boxes.
SILENT_E = re.compile(
    r"[^aeiouyl]e$|[aeiouy]le$|[qg]ue$|[^tdaeiouy]ed$|[^aeiouysxzgchl]es$|[aeiouy]les$"
    r"|[^aeiouyl]e(?:ly|ful|less|ment|ness)$"
)
KNOWN = {
    **{"the": 1, "be": 1, "he": 1, "she": 1, "we": 1, "me": 1, "people": 2, "business": 2},
    **{"something": 2, "someone": 2, "every": 2, "everything": 3, "sometimes": 2, "area": 3},
    **{"idea": 3, "real": 1, "really": 2, "one": 1, "are": 1, "were": 1, "there": 1, "where": 1},
    **{"being": 2, "create": 2, "created": 3, "science": 2, "quiet": 2, "poem": 2, "lion": 2},
    **{"usually": 4, "actually": 4, "evening": 2, "different": 3, "interesting": 4, "people's": 2},
}


def readability(lines: Sequence[str], language: str | None) -> dict[str, Any]:
    """Return the scores of a text, or the reason why there are none.

    Args:
        lines: of the text; a sentence does not go over their ends.
        language: code such as en-GB, as the page declares it; none where it is not known.

    Returns:
        `reading_ease` (0 hard to 100 easy, beyond at extremes), `grade` (school years), with the
        counts `sentences`, `words`, `syllables`; or both scores none, and `why`.
    """
    none: dict[str, Any] = {"reading_ease": None, "grade": None}
    if language is None:
        return {**none, "why": "the page declares no language, and the formulas are for English"}
    if language.lower().replace("_", "-").split("-")[0] != "en":
        return {**none, "why": f'the language is "{language}", and the formulas are for English'}
    # A line without an end, such as a menu's or a heading's, is no sentence.
    sentences = [s for s in sentences_of(lines) if s.rstrip("\"'”’»)]")[-1:] in (*".!?…",)]
    words = [word for sentence in sentences for word in words_of(sentence)]
    if not words:
        return {**none, "why": "the page has no whole sentence"}
    num_syllables = sum(map(syllables, words))
    per_sentence, per_word = len(words) / len(sentences), num_syllables / len(words)
    scores: dict[str, Any] = {
        "reading_ease": 206.835 - 1.015 * per_sentence - 84.6 * per_word,
        "grade": 0.39 * per_sentence + 11.8 * per_word - 15.59,
        "sentences": len(sentences),
        "words": len(words),
        "syllables": num_syllables,
    }
    if len(words) < FEWEST_WORDS:
        scores["why"] = f"fewer than {FEWEST_WORDS} words in sentences: the scores are unsteady"
    return scores


def syllables(word: str) -> int:
    """Return the syllables of an English word by its spelling; a number counts one per digit."""
    word = word.lower().replace("’", "'")
    if word in KNOWN:
        return KNOWN[word]
    if "-" in word:
        return sum(syllables(part) for part in word.split("-"))
    digits = sum(c.isdecimal() for c in word)
    letters = word.removesuffix("'s").replace("'", "")
    groups = len(VOWELS.findall(letters)) + len(HIATUS.findall(letters))
    return digits + max(groups - bool(SILENT_E.search(letters)), 0 if digits else 1)
