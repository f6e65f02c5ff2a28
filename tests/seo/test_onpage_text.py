"""Sentences, readability, keywords and near-duplicates against numbers worked by hand."""

import math
import random

import pytest

from datamodules.text.terms import sentences_of, words_of
from lit_models.seo.onpage import (
    Page,
    check_site,
    earlier_candidates,
    keyword_counts,
    near_duplicates,
    readability,
    shingles,
    syllables,
)


@pytest.mark.parametrize(
    "sentences",
    [
        ["Dr. Smith paid 3.5 dollars, e.g. for pie.", "He left."],
        ["What?!", "Yes.", '"No!" he said.', 'She said: "Go."', "They went."],
        ["J. R. R. Tolkien wrote it.", "So did I.", "He did not."],
        ["Buy eggs, milk etc. and flour.", "Buy eggs, etc.", "Then bake."],
        ["See fig. 3 and No. 5 of vol. 2.", "Well ... not yet…", "Now."],
        ["It is in the U.S. today.", "It is in the U.S.", "It stays."],
    ],
)
def test_sentences_end_where_they_end(sentences):
    assert sentences_of([" ".join(sentences)]) == sentences


def test_no_sentence_goes_over_a_line():
    assert sentences_of(["Apple pie", "Peel it. Bake", "***", ""]) == [
        "Apple pie",
        "Peel it.",
        "Bake",
    ]


def test_words_keep_apostrophes_hyphens_and_decimals():
    assert words_of("It's a well-known 3.5 of 1,000 _x_ – naïve") == [
        "It's", "a", "well-known", "3.5", "of", "1,000", "x", "naïve",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        "cat make makes made whole style style's jumped asked used goes queue here fire build yes",
        "table little bottles titles wanted needed houses boxes nation special social language "
        "million patient unique statement useful careless pages engine poem lion quiet science",
        "radio idea beautiful serious curious creation actual video museum theory sentence's "
        "various society's opinions available's well-meaning",
        "education readability's experience association's university's variety usually information",
    ],
)
def test_syllables_are_those_of_a_dictionary(words):
    counts = {
        **{"sentence's": 2, "society's": 4, "opinions": 3, "available's": 4, "well-meaning": 3},
        **{"readability's": 5, "association's": 5, "university's": 5, "variety": 4},
        **{"experience": 4, "education": 4, "usually": 4, "information": 4, "beautiful": 3},
    }
    expected = 1 if words.startswith("cat") else 2 if words.startswith("table") else 3
    assert {w: syllables(w) for w in words.split()} == {
        w: counts.get(w, expected) for w in words.split()
    }


def test_readability_is_that_of_the_formulas():
    # 2 sentences, 10 words, 11 syllables (apple has two).
    scores = readability(["The cat sat on the mat. It ate one apple.", "Menu"], "en-GB")
    assert (scores["sentences"], scores["words"], scores["syllables"]) == (2, 10, 11)
    assert scores["reading_ease"] == pytest.approx(206.835 - 1.015 * 5 - 84.6 * 1.1)
    assert scores["grade"] == pytest.approx(0.39 * 5 + 11.8 * 1.1 - 15.59)
    assert scores["why"].startswith("fewer than 100 words")


@pytest.mark.parametrize(
    ("lines", "language", "why"),
    [
        (["Eine Katze."], "de", 'the language is "de", and the formulas are for English'),
        (["A cat."], None, "the page declares no language"),
        (["Menu"], "en", "the page has no whole sentence"),
    ],
)
def test_there_is_no_score_where_there_cannot_be_one(lines, language, why):
    scores = readability(lines, language)
    assert (scores["reading_ease"], scores["grade"]) == (None, None)
    assert scores["why"].startswith(why)


def test_keywords_are_counted_where_they_stand():
    text = (
        "<h1>Apple pies</h1><p>An APPLE pie.</p><p>apple</p><p>pie</p>" + "x " * 100 + "apple pie"
    )
    page = Page("a", text, "https://apple-pie.org/Apple_pie/apple%20pie?q=apple+pie")
    facts = {"title": "Apple pie, apple pie", "headings": [(1, "Apple pies"), (2, "apple  Pie")]}
    # The end of one line and the beginning of the next are no phrase; the first words are a run.
    assert keyword_counts(page, "apple pie", facts) == {
        "title": 2, "headings": 1, "first_words": 2, "text": 2, "address": 2,
    }  # fmt: skip


def test_bm25_is_that_of_search():
    texts = ["a b", "A a c c", "c c c", "<p>"]
    rarity = math.log(1 + (4 - 2 + 0.5) / (2 + 0.5))
    mean = (2 + 4 + 3 + 0) / 4
    expected = [
        rarity * tf / (tf + 0.9 * (0.6 + 0.4 * length / mean)) if tf else 0
        for tf, length in ((1, 2), (2, 4), (0, 3), (0, 0))
    ]
    for keyword, times in (("a", 1), ("A, a!", 2)):
        reports = check_site([Page("x", text) for text in texts], [keyword])
        scores = [report.facts["keywords"][keyword]["bm25"] for report in reports]
        assert scores == pytest.approx([times * score for score in expected])


def test_near_duplicates_are_the_most_similar_earlier_texts():
    text = [f"w{i}" for i in range(104)]  # 100 runs of five
    texts = [text, text[:50], [*text[:-1], "x"], text, ["short"], ["Short"], []]
    found = near_duplicates(texts)
    assert found == {2: (0, 99 / 101), 3: (0, 1.0), 5: (4, 1.0)}


@pytest.mark.parametrize("seed", range(20))
def test_near_duplicates_are_those_of_comparing_all_with_all(seed):
    rng = random.Random(seed)
    menu = [f"m{i}" for i in range(rng.choice([0, 20]))]
    texts = []
    for _ in range(30):
        text = list(rng.choice(texts)) if texts and rng.random() < 0.8 else list("abcdefgh" * 3)
        for _ in range(rng.randrange(3)):
            text.insert(rng.randrange(len(text) + 1), rng.choice("abcdefgh"))
        texts.append(text[: rng.choice([4, 15, 24, 99])])
    pages = [menu + text for text in texts]
    expected, runs = {}, [shingles(page) for page in pages]
    for i, own in enumerate(runs):
        shares = [(len(own & other) / len(own | other), -o) for o, other in enumerate(runs[:i])]
        if shares and max(shares)[0] >= 0.8:
            expected[i] = (-max(shares)[1], max(shares)[0])
    assert near_duplicates(pages) == expected
    assert len(expected) > 5


def test_pages_that_share_no_more_than_a_menu_are_never_compared():
    menu = frozenset(range(200))
    runs = {i: menu | set(range(1000 * i, 1000 * i + 100)) for i in range(1, 41)}
    assert not any(earlier_candidates(runs).values())
