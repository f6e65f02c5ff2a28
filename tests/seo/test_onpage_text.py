"""Sentences, readability, keywords and near-duplicates against numbers worked by hand."""

import random

import pytest

from datamodules.text.terms import sentences_of, words_of
from lit_models.seo.onpage import (
    Page,
    check_page,
    near_duplicates,
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


def test_keywords_are_counted_where_they_stand():
    text = (
        "<h1>Apple pies</h1><h2>apple  Pie</h2><p>An APPLE pie.</p><p>apple</p><p>pie</p>"
        + "x " * 100
        + "apple pie"
    )
    head = "<title>Apple pie, apple pie</title>"
    page = Page("a", head + text, "https://apple-pie.org/Apple_pie/apple%20pie?q=apple+pie")
    # The end of one line and the beginning of the next are no phrase; the first words are a run.
    assert check_page(page, ["apple pie"]).facts["keywords"]["apple pie"] == {
        "title": 2, "headings": 1, "first_words": 3, "text": 3, "address": 2,
    }  # fmt: skip


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
    expected, runs = (
        {},
        [{tuple(page[n : n + 5]) for n in range(max(1, len(page) - 4))} for page in pages],
    )
    for i, own in enumerate(runs):
        shares = [(len(own & other) / len(own | other), -o) for o, other in enumerate(runs[:i])]
        if shares and max(shares)[0] >= 0.8:
            expected[i] = (-max(shares)[1], max(shares)[0])
    assert near_duplicates(pages) == expected
    assert len(expected) > 5
