"""Words, sentences and search terms of a text."""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

# Numbers such as 3.5 and 1,000 are one word.
WORD = re.compile(r"\d+(?:[.,]\d+)+|[^\W_]+(?:['’\-][^\W_]+)*")
# An end: marks, then closing quotes or brackets, then a space or the end of the line.
END = re.compile(r"(?<![.!?…])([.!?…]+)[\"'”’»)\]]*(?=\s|$)")
LAST_WORD = re.compile(r"[^\s(\[\"'“‘«]+$")
FOLLOWS = re.compile(r"\s*[\"'“‘«(\[\s]*(.?)", re.DOTALL)
LONGEST_ABBREVIATION = 12  # characters, with room to see that a word is longer
ABBREVIATIONS = frozenset(
    {
        *("mr", "mrs", "ms", "dr", "prof", "sr", "jr", "st", "rev", "hon", "gen", "col", "sgt"),
        *("capt", "lt", "vs", "etc", "al", "cf", "ca", "approx", "no", "nos", "vol", "vols", "pp"),
        *("p", "fig", "figs", "eq", "sec", "ch", "ed", "eds", "inc", "ltd", "co", "corp", "dept"),
        *("est", "jan", "feb", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "nov"),
        *("dec", "mon", "tue", "wed", "thu", "fri", "e.g", "i.e", "u.s", "u.k", "a.m", "p.m"),
        *("ph.d", "b.a", "m.a", "d.c"),
    }
)
# Of these some end sentences as often as not: they do where a capital follows.
MAY_END = frozenset({"etc", "al", "inc", "ltd", "co", "corp", "u.s", "u.k", "a.m", "p.m", "no"})
KEPT_STEMS = 1 << 17
_WORD = re.compile(r"\w+")
# Words that ask or connect, without which a query means the same.
_ENGLISH = """
a an and are as at be but by for from had has have he her his i if in into is it its it no not of on
or our she so such that the their then there these they this to was we were what when where which
who will with you your
"""
STOPWORDS = {"english": frozenset(_ENGLISH.split())}


def words_of(text: str) -> list[str]:
    """Return the words of a text; it's and well-known are one word each."""
    return WORD.findall(text)


def sentences_of(lines: Iterable[str]) -> list[str]:
    """Return the sentences of lines; none goes over the end of a line, such as a heading's.

    `?!` and `...` are one end, and what follows them in small letters goes on with the sentence;
    not so behind a lone mark such as ` .`, nor in a line without capitals, where it says nothing.
    """
    found = []
    for line in lines:
        start, has_capitals = 0, line != line.lower()
        for end in END.finditer(line):
            if _is_end(line, start, end, has_capitals):
                found.append(line[start : end.end()].strip())
                start = end.end()
        found.append(line[start:].strip())
    return [sentence for sentence in found if WORD.search(sentence)]


def _is_end(line: str, start: int, end: re.Match[str], has_capitals: bool) -> bool:
    behind = FOLLOWS.match(line, end.end())
    assert behind is not None  # it may be empty
    follows = behind[1]
    is_lone = len(end[1]) == 1 and line[end.start() - 1 : end.start()].isspace()
    goes_on = follows.islower() and not is_lone and (has_capitals or len(end[1]) > 1)
    if end[1] != ".":
        return not goes_on
    if not behind[0].strip():
        return True
    word = LAST_WORD.search(line, max(start, end.start() - LONGEST_ABBREVIATION), end.start())
    last = word[0].lower() if word else ""
    if len(last) == 1 and last.isalpha() and word is not None and word[0].isupper():
        return last == "i" and not goes_on  # an initial: J. Smith; "than I." ends
    if last in ABBREVIATIONS:
        # "No. 5" and "fig. 2" go on; "etc. The" and "Inc. It" end.
        return last in MAY_END and follows.isupper()
    return not goes_on


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
        stopwords: language whose commonest words are passed over; `None` keeps all.

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
