"""Grammar of demo job descriptions in the style of parish and marriage records, with codes.

A code has five digits: trade (two digits), material, rank, relation. They follow from the part of
the text that describes the person; the text may also name trades, ranks and materials of others.
Some valid combinations are rare, and some never occur.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from datamodules.files.splitting import STATUS_WORDS

LANGUAGES = ("en", "da", "sv", "de")

# First two digits, then the word in each of LANGUAGES.
TRADES = """
77 baker        bager        bagare          bäcker
61 farmer       bonde        bonde           bauer
96 joiner       snedker      snickare        tischler
80 shoemaker    skomager     skomakare       schuhmacher
79 tailor       skrædder     skräddare       schneider
83 smith        smed         smed            schmied
64 fisherman    fisker       fiskare         fischer
97 carpenter    tømrer       timmerman       zimmermann
84 miller       møller       mjölnare        müller
95 mason        murer        murare          maurer
78 brewer       brygger      bryggare        brauer
85 butcher      slagter      slaktare        metzger
76 tanner       garver       garvare         gerber
86 wheelwright  hjulmager    hjulmakare      wagner
90 ropemaker    rebslager    repslagare      seiler
88 potter       pottemager   krukmakare      töpfer
"""
# First two digits, third digits of the possible materials, then the word in each language.
ACTIONS = """
75 123    weaver   væver   vävare   weber
41 123456 merchant handler handlare händler
74 123    spinner  spinder spinnare spinner
72 45     founder  støber  gjutare  gießer
81 456    turner   drejer  svarvare dreher
71 456    polisher sliber  slipare  schleifer
"""
# Third digit, then two words per language: for the beginning of a compound, and alone.
MATERIALS = """
1 silk   silk   silke   silke   silkes   silke   seiden   seide
2 wool   wool   uld     uld     ylle     ylle    woll     wolle
3 linen  linen  linned  linned  linne    linne   leinen   leinen
4 iron   iron   jern    jern    järn     järn    eisen    eisen
5 copper copper kobber  kobber  koppar   koppar  kupfer   kupfer
6 wood   wood   træ     træ     trä      trä     holz     holz
"""
RANKS = ("worker", "apprentice", "journeyman", "master", "foreman")  # fourth digit
RELATIONS = ("", "widow of", "child of", "servant of")  # fifth digit
MASTER = RANKS.index("master")
# Codes of widows, children and servants distinguish only masters from workers.
RELATED_RANKS = (0, MASTER)
RANK_WEIGHTS = (8, 3, 3, 4, 2)

# {x} is the trade, {c} its form in a compound; one tuple per rank above worker.
RANK_FORMS = {
    "en": (
        ("apprentice {x}", "{x}'s apprentice", "apprentice to a master {x}"),
        ("journeyman {x}", "{x} journeyman", "journeyman with a master {x}"),
        ("master {x}", "{x} master"),
        ("foreman {x}", "{x}s' foreman", "foreman of the {x}s"),
    ),
    "da": (
        ("{c}lærling", "lærling hos en {c}mester", "{c} lærling"),
        ("{c}svend", "svend hos en {c}mester", "{c} svend"),
        ("{c}mester", "mester {x}"),
        ("{c}formand", "formand for {x}ne"),
    ),
    "sv": (
        ("{c}lärling", "lärling hos en {c}mästare", "{c} lärling"),
        ("{c}gesäll", "gesäll hos en {c}mästare", "{c} gesäll"),
        ("{c}mästare", "mäster {x}"),
        ("{c}förman", "förman för {x}"),
    ),
    "de": (
        ("{c}lehrling", "lehrling bei einem {c}meister", "{c} lehrling"),
        ("{c}geselle", "geselle bei einem {c}meister", "{c} geselle"),
        ("{c}meister", "meister der {x}"),
        ("{c}werkführer", "werkführer der {x}"),
    ),
}
# {b} is the other person with trade and rank; one tuple per relation.
RELATION_FORMS = {
    "en": (
        ("widow of a {b}", "{b}'s widow", "widow of the {b}"),
        ("son of a {b}", "daughter of a {b}", "{b}'s son", "{b}'s daughter"),
        ("servant to a {b}", "servant at a {b}'s", "{b}'s servant"),
    ),
    "da": (
        ("enke efter en {b}", "enke efter {b}", "{b}s enke"),
        ("søn af en {b}", "datter af en {b}", "{b}s søn", "{b}s datter"),
        ("karl hos en {b}", "pige hos en {b}", "{b}s pige"),
    ),
    "sv": (
        ("änka efter en {b}", "änka efter {b}", "{b}s änka"),
        ("son till en {b}", "dotter till en {b}", "{b}s son", "{b}s dotter"),
        ("dräng hos en {b}", "piga hos en {b}", "{b}s piga"),
    ),
    "de": (
        ("witwe eines {b}", "witwe des {b}", "{b}s witwe"),
        ("sohn eines {b}", "tochter eines {b}", "{b}s sohn", "{b}s tochter"),
        ("knecht bei einem {b}", "magd bei einem {b}", "{b}s magd"),
    ),
}
# {a} is the person to code; {b}, another person or an earlier occupation, does not count.
ASIDE_FORMS = {
    "en": (
        *("{a}, son of a {b}", "{a}, widow of a {b}", "{a}, servant to a {b}"),
        *("{a} in the house of a {b}", "{a}, previously {b}", "previously {b}, now {a}"),
        *("son of a {b}, himself {a}", "widow of a {b}, herself {a}"),
    ),
    "da": (
        *("{a}, søn af en {b}", "{a}, enke efter en {b}", "{a}, karl hos en {b}"),
        *("{a} boende hos en {b}", "{a}, tidligere {b}", "tidligere {b}, nu {a}"),
        *("søn af en {b}, selv {a}", "enke efter en {b}, selv {a}"),
    ),
    "sv": (
        *("{a}, son till en {b}", "{a}, änka efter en {b}", "{a}, dräng hos en {b}"),
        *("{a} boende hos en {b}", "{a}, tidigare {b}", "tidigare {b}, nu {a}"),
        *("son till en {b}, själv {a}", "änka efter en {b}, själv {a}"),
    ),
    "de": (
        *("{a}, sohn eines {b}", "{a}, witwe eines {b}", "{a}, knecht bei einem {b}"),
        *("{a} wohnhaft bei einem {b}", "{a}, früher {b}", "früher {b}, jetzt {a}"),
        *("sohn eines {b}, selbst {a}", "witwe eines {b}, selbst {a}"),
    ),
}
PAIR_FORMS = {
    "en": ("{a} and {b}", "{a}, also {b}", "{a} & {b}"),
    "da": ("{a} og {b}", "{a}, tillige {b}", "{a} & {b}"),
    "sv": ("{a} och {b}", "{a}, även {b}", "{a} & {b}"),
    "de": ("{a} und {b}", "{a}, auch {b}", "{a} & {b}"),
}
MATERIAL_FORMS = {"en": "{x} of {m}", "da": "{x} i {m}", "sv": "{x} av {m}", "de": "{x} in {m}"}
PLACES = {
    "en": "whitby ripon selby stroud ludlow oakham dursley thirsk kendal bungay frome wells",
    "da": "ribe odense hobro vejle lemvig thisted køge nakskov assens faaborg skive tønder",
    "sv": "ystad lund visby gävle växjö falun borås sala arboga nora skara umeå",
    "de": "lübeck celle goslar husum stade soest wismar kiel hameln jever emden plön",
}
PLACE_FORMS = {
    "en": ("{t} in {p}", "{t} of {p}", "{t}, {p}"),
    "da": ("{t} i {p}", "{t} af {p}", "{t}, {p}"),
    "sv": ("{t} i {p}", "{t} från {p}", "{t}, {p}"),
    "de": ("{t} in {p}", "{t} zu {p}", "{t}, {p}"),
}
OLD_SPELLINGS = {
    "en": (("er", "ar"), ("ck", "k"), ("oo", "o"), ("i", "y"), ("ll", "l")),
    "da": (("å", "aa"), ("æ", "ä"), ("ø", "ö"), ("k", "ch"), ("v", "w"), ("e", "ee")),
    "sv": (("å", "aa"), ("ä", "e"), ("v", "fv"), ("k", "ck"), ("ö", "ø")),
    "de": (("ä", "ae"), ("ü", "ue"), ("ß", "ss"), ("ei", "ey"), ("k", "c"), ("f", "ff")),
}

SHARE_RELATION = 0.12
SHARE_ASIDE = 0.20
SHARE_PAIR = 0.055
SHARE_PLACE = 0.4
SHARE_OLD_SPELLING = 0.10
SHARE_SLIP = 0.08
SHARE_STATUS = 0.08


T = TypeVar("T")
Words = tuple[tuple[str, str], ...]  # pairs of a trade's forms: alone and in compounds


class TitleHead(NamedTuple):
    """A trade with its material: three digits, an English name, and words by language."""

    digits: str
    name: str
    words: dict[str, Words]  # by language


class DemoRecord(NamedTuple):
    """One description, its language and its one or two codes."""

    text: str
    language: str
    codes: tuple[str, ...]


def heads() -> list[TitleHead]:
    """Return all trades and all valid pairs of material and action."""
    titles = []
    for digits, *words in map(str.split, TRADES.strip().splitlines()):
        pairs = zip(LANGUAGES, words, strict=True)
        forms: dict[str, Words] = {lang: (_with_stem(word, lang),) for lang, word in pairs}
        titles.append(TitleHead(digits + "0", words[0], forms))
    materials = {row[0]: row[1:] for row in map(str.split, MATERIALS.strip().splitlines())}
    for digits, worked, *words in map(str.split, ACTIONS.strip().splitlines()):
        for material in worked:
            forms = {}
            for i, (language, word) in enumerate(zip(LANGUAGES, words, strict=True)):
                first, alone = materials[material][2 * i : 2 * i + 2]
                space = " " if language == "en" else ""
                compound = _with_stem(f"{first}{space}{word}", language)
                apart = MATERIAL_FORMS[language].format(x=word, m=alone)
                forms[language] = (compound, compound, (apart, compound[1]))
            name = f"{materials[material][0]} {words[0]}"
            titles.append(TitleHead(digits + material, name, forms))
    return titles


def _with_stem(word: str, language: str) -> tuple[str, str]:
    """Return a word and its form in compounds: Swedish vävare becomes vävar-."""
    return word, word[:-1] if language == "sv" and word.endswith("are") else word


def code_book() -> dict[str, str]:
    """Return code -> English description of all valid codes, sorted."""
    book = {}
    for head in heads():
        name = head.name.capitalize()
        for rank, rank_name in enumerate(RANKS):
            book[f"{head.digits}{rank}0"] = f"{name}, {rank_name}"
        for relation in range(1, len(RELATIONS)):
            for rank in RELATED_RANKS:
                code = f"{head.digits}{rank}{relation}"
                book[code] = f"{RELATIONS[relation].capitalize()} {head.name}, {RANKS[rank]}"
    return dict(sorted(book.items()))


def slip(text: str, draw: Callable[[], float]) -> str:
    """Return the text with a slip of the pen: two letters swapped, one doubled, or one missing."""
    at, kind = int(draw() * (len(text) - 1)), int(draw() * 3)
    two = text[at : at + 2]
    return text[:at] + (two[::-1], two[:1] * 2 + two[1:], two[1:])[kind] + text[at + 2 :]


def records(count: int, seed: int) -> list[DemoRecord]:
    """Return random descriptions; equal arguments give equal ones on every machine."""
    # Python guarantees only for random() that a seed always gives the same numbers.
    draw = random.Random(seed).random
    ranked = sorted(heads(), key=lambda head: head.digits[::-1])
    # Trades follow Zipf's law, so that some combinations are rare.
    weights = [1 / (6 + i) for i in range(len(ranked))]

    def pick(choices: Sequence[T]) -> T:
        return choices[int(draw() * len(choices))]

    def weighted(weights: Sequence[float]) -> int:
        left = draw() * sum(weights)
        for i, weight in enumerate(weights):
            left -= weight
            if left < 0:
                return i
        return len(weights) - 1

    def person(language: str, rank: int | None = None) -> tuple[str, str]:
        """Return the words for a trade with a rank, and its code."""
        head = ranked[weighted(weights)]
        rank = weighted(RANK_WEIGHTS) if rank is None else rank
        word, stem = pick(head.words[language])
        forms = ("{x}",) if rank == 0 else RANK_FORMS[language][rank - 1]
        return pick(forms).format(x=word, c=stem), f"{head.digits}{rank}0"

    def noisy(text: str, language: str) -> str:
        """Return the text, at times with a place, an old spelling, a slip or a status word."""
        if draw() < SHARE_PLACE:
            place = pick(PLACES[language].split())
            text = pick(PLACE_FORMS[language]).format(t=text, p=place)
        if draw() < SHARE_OLD_SPELLING:
            new, old = pick(OLD_SPELLINGS[language])
            text = text.replace(new, old, 1)
        if draw() < SHARE_SLIP:
            text = slip(text, draw)
        if draw() < SHARE_STATUS:
            word = pick(STATUS_WORDS[language][:2])
            text = pick(("{t} ({w})", "{w} {t}", "{t}, {w}")).format(t=text, w=word)
        return text

    def record() -> DemoRecord:
        language = pick(LANGUAGES)
        kind = draw()
        codes: tuple[str, ...]
        if kind < SHARE_PAIR + SHARE_ASIDE:
            is_pair = kind < SHARE_PAIR
            (a, code), (b, other) = person(language), person(language)
            text = pick((PAIR_FORMS if is_pair else ASIDE_FORMS)[language]).format(a=a, b=b)
            codes = (code, other) if is_pair and other != code else (code,)
        elif kind < SHARE_PAIR + SHARE_ASIDE + SHARE_RELATION:
            b, code = person(language, pick(RELATED_RANKS))
            relation = int(draw() * (len(RELATIONS) - 1))
            text = pick(RELATION_FORMS[language][relation]).format(b=b)
            codes = (f"{code[:4]}{relation + 1}",)
        else:
            text, code = person(language)
            codes = (code,)
        return DemoRecord(noisy(text, language), language, codes)

    return [record() for _ in range(count)]
