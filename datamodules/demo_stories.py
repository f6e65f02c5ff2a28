"""Short stories made from a grammar: each one tells ten facts, and what comes later follows them.

A story is 50 to 60 words, full stops included, of a vocabulary of 127. The pet and the object come
back, pronouns follow the name, and what somebody does follows the mood: whoever predicts the next
word has to remember the facts.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

T = TypeVar("T")

NAMES = {
    "she": ["mira", "anna", "lena", "rosa", "ivy", "nora", "zoe", "ella"],
    "he": ["tom", "karl", "omar", "finn", "hugo", "ravi", "paul", "jon"],
}
VALUES = {
    "name": [*NAMES["she"], *NAMES["he"]],
    "age": ["twenty", "thirty", "forty", "sixty", "eighty"],
    "job": ["baker", "pilot", "farmer", "doctor", "painter", "sailor", "teacher", "singer"],
    "place": ["forest", "city", "desert", "village", "valley", "castle", "harbour", "market"],
    "pet": ["dog", "cat", "horse", "fox", "goat", "parrot", "rabbit", "donkey"],
    "color": ["red", "blue", "green", "black", "white", "golden"],
    "object": ["key", "map", "lamp", "book", "ring", "coin", "drum", "kite"],
    "mood": ["happy", "sad", "angry", "tired"],
    "food": ["bread", "soup", "apples", "rice", "honey", "cheese", "fish", "cake"],
    "weather": ["rain", "snow", "wind", "fog", "storm", "frost"],
}
VERBS = {
    "happy": ("laughed", "danced"),
    "sad": ("cried", "sighed"),
    "angry": ("shouted", "stamped"),
    "tired": ("yawned", "slept"),
}
PRONOUNS = {
    "she": {"they": "she", "their": "her", "them": "her"},
    "he": {"they": "he", "their": "his", "them": "him"},
}

OPENINGS = (
    "in the {place} lived a {job} of {age} called {name} with a {pet} .",
    "{name} the {job} was {age} and lived in the {place} with a {pet} .",
    "a {job} of {age} called {name} had a {pet} in the {place} .",
)
MEALS = (
    "{they} loved {food} and so did the {pet} .",
    "{they} gave {food} to {their} {pet} .",
    "{name} always ate {food} with the {pet} .",
)
THINGS = (
    "{name} kept a {color} {object} at home .",
    "{they} also had a {color} {object} .",
    "the {pet} loved {their} {color} {object} .",
)
LOSSES = (
    "one day {they} lost the {object} in the {weather} .",
    "then {weather} came and took the {object} .",
    "in the {weather} the {pet} lost the {object} .",
)
FEELINGS = (
    "{they} felt {mood} , so {they} {verb} .",
    "{name} was {mood} and {verb} .",
    "it made {them} {mood} and {they} {verb} .",
)
ENDINGS = (
    "at last the {pet} found the {color} {object} .",
    "then the {pet} gave {them} the {object} and ate {food} .",
    "after the {weather} they went home to the {place} .",
)

# How many stories each file holds; those of the last one hold a pair that no other has.
PARTS = {"train": 30_000, "validation": 1_000, "test": 1_000, "combinations": 1_000}
COMBINED = "combinations"
SEED = 1812


@dataclass(frozen=True)
class Story:
    """A text, and the value of each attribute, all of which are words of it."""

    text: str
    attributes: dict[str, str]


def held_out_pairs() -> dict[tuple[str, str], frozenset[tuple[str, str]]]:
    """Return, of two attributes, the pairs of values that only the combinations have.

    An eighth of all pairs, each value in at most one of them: so every value is trained.
    """
    jobs, pets = VALUES["job"], VALUES["pet"]
    colors, objects = VALUES["color"], VALUES["object"]
    return {
        ("job", "pet"): frozenset((job, pets[(3 * i + 1) % 8]) for i, job in enumerate(jobs)),
        ("color", "object"): frozenset(
            (color, objects[(5 * i + 2) % 8]) for i, color in enumerate(colors)
        ),
    }


def vocabulary() -> set[str]:
    """Return every word that a story can hold."""
    templates = chain(OPENINGS, MEALS, THINGS, LOSSES, FEELINGS, ENDINGS)
    fixed = {word for text in templates for word in text.split() if word[0] != "{"}
    pronouns = {word for forms in PRONOUNS.values() for word in forms.values()}
    return fixed.union(pronouns, *VALUES.values(), *VERBS.values())


def stories() -> Iterator[tuple[str, Story]]:
    """Yield (part, story) of all parts, always the same; no text comes twice."""
    known: set[str] = set()
    for part, number in PARTS.items():
        rng = random.Random(f"{SEED} {part}")
        made = 0
        while made < number:
            attributes = _combined(rng) if part == COMBINED else _usual(rng)
            text = _told(attributes, rng)
            if text not in known:
                known.add(text)
                made += 1
                yield part, Story(text, attributes)


def _usual(rng: random.Random) -> dict[str, str]:
    """Return attributes without a held-out pair."""
    while True:
        attributes = {name: _one(values, rng) for name, values in VALUES.items()}
        if not any(
            (attributes[a], attributes[b]) in pairs for (a, b), pairs in HELD_OUT_PAIRS.items()
        ):
            return attributes


def _combined(rng: random.Random) -> dict[str, str]:
    """Return attributes with a held-out pair, or with one of each kind."""
    attributes = _usual(rng)
    kinds = list(HELD_OUT_PAIRS)
    for kind in _one([kinds[:1], kinds[1:], kinds], rng):
        pair = _one(sorted(HELD_OUT_PAIRS[kind]), rng)
        attributes.update(zip(kind, pair, strict=True))
    return attributes


def _told(attributes: dict[str, str], rng: random.Random) -> str:
    pronouns = PRONOUNS["she" if attributes["name"] in NAMES["she"] else "he"]
    words = {**attributes, **pronouns, "verb": _one(VERBS[attributes["mood"]], rng)}
    meal, thing, loss = (_one(kind, rng) for kind in (MEALS, THINGS, LOSSES))
    middle = _one([(meal, thing, loss), (thing, meal, loss), (thing, loss, meal)], rng)
    sentences = [_one(OPENINGS, rng), *middle, _one(FEELINGS, rng), _one(ENDINGS, rng)]
    return " ".join(sentences).format(**words)


def _one(values: Sequence[T], rng: random.Random) -> T:
    return values[int(rng.random() * len(values))]  # `choice` may change with Python


HELD_OUT_PAIRS = held_out_pairs()
