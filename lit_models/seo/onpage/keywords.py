"""How often given keywords occur where, and how the pages rank for them by BM25."""

import math
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from lit_models.seo.onpage.page import Page
from datamodules.sentences import words_of

FIRST_WORDS = 100
K1, B = 1.2, 0.75  # Robertson and Zaragoza 2009, "The Probabilistic Relevance Framework"


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


def bm25(texts: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """Return the BM25 score of each text for a query, over these texts alone.

    Args:
        texts: words of each.
        query: words; one that is there twice counts twice.
    """
    folded = [[word.casefold() for word in words] for words in texts]
    mean_length = sum(map(len, folded)) / len(folded) if folded else 0.0
    scores = [0.0] * len(folded)
    for term in (word.casefold() for word in query):
        counts = [words.count(term) for words in folded]
        num_with = sum(count > 0 for count in counts)
        rarity = math.log(1 + (len(folded) - num_with + 0.5) / (num_with + 0.5))
        for i, (count, words) in enumerate(zip(counts, folded, strict=True)):
            if count:
                norm = 1 - B + B * len(words) / mean_length
                scores[i] += rarity * count * (K1 + 1) / (count + K1 * norm)
    return scores


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
