"""Texts as the terms that search compares: words in lower case, without the commonest, as stems."""

import re
from collections.abc import Callable
from functools import lru_cache

KEPT_STEMS = 1 << 17
_WORD = re.compile(r"\w+")
# Words that ask or connect, without which a query means the same.
_ENGLISH = """
a an and are as at be but by for from had has have he her his i if in into is it its it no not of on
or our she so such that the their then there these they this to was we were what when where which
who will with you your
"""
STOPWORDS = {"english": frozenset(_ENGLISH.split())}


def check_languages(stemmer: str | None, stopwords: str | None) -> None:
    """Refuse languages that are not known.

    Raises:
        ValueError: there is no list of such words, or no stemmer of the language.
        ImportError: the stemmer is not installed.
    """
    if stopwords not in (None, *STOPWORDS):
        raise ValueError(f'stopwords must be none or {" or ".join(STOPWORDS)}, got "{stopwords}".')
    if stemmer is not None:
        _stemmer(stemmer)


@lru_cache(maxsize=8)
def terms_by(stemmer: str | None, stopwords: str | None) -> Callable[[str], list[str]]:
    """Return what cuts a text into terms: letters and digits, in lower case.

    Args:
        stemmer: language of a Snowball stemmer, such as english; none compares whole words.
        stopwords: language whose commonest words are passed over; none keeps all.

    Raises:
        ValueError: as `check_languages`.
        ImportError: as `check_languages`.
    """
    check_languages(stemmer, stopwords)
    stop = STOPWORDS[stopwords] if stopwords else frozenset()
    stem = lru_cache(KEPT_STEMS)(_stemmer(stemmer)) if stemmer else None

    def terms(text: str) -> list[str]:
        found = [word for word in _WORD.findall(text.lower()) if word not in stop]
        return [stem(word) for word in found] if stem else found

    return terms


def _stemmer(language: str) -> Callable[[str], str]:
    import snowballstemmer  # which is needed for stems alone

    if language not in snowballstemmer.algorithms():
        known = ", ".join(sorted(snowballstemmer.algorithms()))
        raise ValueError(f'there is no stemmer of "{language}"; there are: {known}.')
    return snowballstemmer.stemmer(language).stemWord
