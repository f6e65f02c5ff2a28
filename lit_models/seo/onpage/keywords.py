"""How often given keywords occur where."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from datamodules.sentences import words_of
from lit_models.seo.onpage.page import Page

FIRST_WORDS = 100


def keyword_counts(page: Page, keyword: str, facts: dict[str, Any]) -> dict[str, int]:
    """Return how often the words of a keyword follow each other in parts of a page.

    Case does not matter; word forms do: "cat" is not found in "cats".

    Args:
        page: where to look.
        keyword: one or more words.
        facts: of the page, with its title and headings.

    Raises:
        ValueError: the keyword has no word.
    """
    wanted = _words(keyword)
    if not wanted:
        raise ValueError(f'the keyword "{keyword}" has no word; give one such as "apple pie".')
    words = [word.casefold() for word in page.words]
    path = unquote(urlsplit(page.address).path) if page.address else ""
    return {
        "title": _count(_words(facts["title"] or ""), wanted),
        "headings": sum(_count(_words(text), wanted) for _, text in facts["headings"]),
        "first_words": _count(words[:FIRST_WORDS], wanted),
        "text": sum(_count(_words(line), wanted) for line in page.lines),
        "address": _count(_words(path.replace("_", " ").replace("-", " ")), wanted),
    }


def _words(text: str) -> list[str]:
    return [word.casefold() for word in words_of(text)]


def _count(words: Sequence[str], wanted: Sequence[str]) -> int:
    """Return how often a sequence occurs without overlap."""
    number, place = 0, 0
    while place + len(wanted) <= len(words):
        is_here = list(words[place : place + len(wanted)]) == list(wanted)
        number += is_here
        place += len(wanted) if is_here else 1
    return number
