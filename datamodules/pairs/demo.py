"""Embedded demo data: job titles as old records spell and abbreviate them, and their normal form.

The grammar of job descriptions gives the titles, in four languages; rules of the time spell them.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from datamodules.demo import csv_text, made
from datamodules.occupations.grammar import (
    LANGUAGES,
    MASTER,
    OLD_SPELLINGS,
    RANK_FORMS,
    RELATION_FORMS,
    TitleHead,
    heads,
    slip,
)

SEED, NUM_PAIRS = 1845, 20_000
SHARE_RELATION, SHARE_RANK = 0.35, 0.6
SHARE_OLD, SHARE_SHORT, SHARE_SLIP, SHARE_CAPITAL = 0.35, 0.5, 0.15, 0.3
# A word or the end of a compound, and how a clerk shortens it.
SHORT_FORMS = {
    "en": (
        *(
            ("apprentice", "appr."),
            ("journeyman", "journ."),
            ("master", "mstr."),
            ("widow", "wid."),
        ),
        *(("foreman", "form."), ("servant", "serv."), ("daughter", "dau."), ("merchant", "merch.")),
        *(("maker", "mkr."), ("weaver", "weavr."), ("carpenter", "carp."), ("fisherman", "fishn.")),
    ),
    "da": (
        *(("lærling", "lærl."), ("svend", "svd."), ("mester", "mstr."), ("formand", "fmd.")),
        *(("enke efter", "e.e."), ("datter", "dat."), ("handler", "hdl."), ("mager", "mgr.")),
        *(("tømrer", "tømr."), ("snedker", "snedk."), ("skrædder", "skrd."), ("fisker", "fisk.")),
    ),
    "sv": (
        *(("lärling", "lärl."), ("gesäll", "ges."), ("mästare", "mäst."), ("förman", "förm.")),
        *(("änka efter", "ä.e."), ("dotter", "dott."), ("handlare", "handl."), ("makare", "mak.")),
        *(("timmerman", "timm."), ("snickare", "snick."), ("skräddare", "skrädd.")),
    ),
    "de": (
        *(("lehrling", "lehrl."), ("geselle", "ges."), ("meister", "mstr."), ("werkführer", "wf.")),
        *(("witwe", "wwe."), ("tochter", "tocht."), ("händler", "hdlr."), ("macher", "mchr.")),
        *(("zimmermann", "zimm."), ("tischler", "tischl."), ("schneider", "schneid.")),
    ),
}


def demo_titles() -> Path:
    """Return the csv of source and target, made at first use."""

    def files() -> Iterator[tuple[str, str]]:
        yield "titles.csv", csv_text([("source", "target"), *titles(NUM_PAIRS, SEED)])

    return made("titles", files) / "titles.csv"


def titles(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield so many different spellings with their normal forms."""
    draw = random.Random(seed).random  # the one stream that Python promises never to change
    known, trades = set[str](), heads()
    while len(known) < count:
        language = LANGUAGES[int(draw() * len(LANGUAGES))]
        normal = _normal_form(trades[int(draw() * len(trades))], language, draw)
        source = _spelled(normal, language, draw)
        if source not in known:
            known.add(source)
            yield source, normal


def _normal_form(trade: TitleHead, language: str, draw: Callable[[], float]) -> str:
    word, stem = trade.words[language][0]
    is_of_another = draw() < SHARE_RELATION
    rank = 0
    if draw() < SHARE_RANK:
        rank = MASTER if is_of_another else 1 + int(draw() * len(RANK_FORMS[language]))
    if rank:
        word = RANK_FORMS[language][rank - 1][0].format(x=word, c=stem)
    if not is_of_another:
        return word
    relations = RELATION_FORMS[language]
    return relations[int(draw() * len(relations))][0].format(b=word)


def _spelled(text: str, language: str, draw: Callable[[], float]) -> str:
    """Return a title with the short forms, old spellings and slips of a clerk."""
    for forms, share in ((SHORT_FORMS, SHARE_SHORT), (OLD_SPELLINGS, SHARE_OLD)):
        for form, other in forms[language]:
            if form in text and draw() < share:
                text = text.replace(form, other)
    if draw() < SHARE_SLIP:
        text = slip(text, draw)
    return text.capitalize() if draw() < SHARE_CAPITAL else text
