"""Demo data, made in the cache at first use: the same bytes everywhere with the same Python."""

import ast
import csv
import inspect
import io
import json
import platform
import random
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.splitting import PART_NAMES, Split, SplitOptions, split_by_stem
from datamodules.occupations import grammar

DEMO_VERSION = 2  # raised when any demo file changes
TEXT_VERSION = 2  # raised when a file made of Python's sources changes
LIBRARY = Path(sysconfig.get_paths()["stdlib"])  # of this Python
TOPICS = "pydoc_data/topics.py"
# Well documented modules written in Python; those that a Python version lacks are left out.
MODULES = """
abc argparse ast base64 bdb bisect bz2 calendar cmd code codecs codeop collections/__init__ colorsys
compileall configparser concurrent/futures/_base concurrent/futures/process
concurrent/futures/thread contextlib contextvars copy copyreg csv dataclasses datetime _pydatetime
decimal _pydecimal difflib dis doctest email/charset email/header email/message email/policy
email/utils enum filecmp fileinput fnmatch fractions ftplib functools getopt getpass gettext glob
graphlib gzip hashlib heapq hmac html/__init__ html/parser http/client http/cookiejar http/cookies
http/server imaplib inspect io _pyio ipaddress json/__init__ json/decoder json/encoder keyword
linecache locale logging/__init__ logging/config logging/handlers lzma mailbox mimetypes
modulefinder multiprocessing/context multiprocessing/managers multiprocessing/pool
multiprocessing/queues netrc ntpath numbers operator optparse os pathlib pdb pickle pickletools
pkgutil platform plistlib poplib posixpath pprint profile pstats py_compile pyclbr pydoc queue
quopri random reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver ssl
stat statistics string stringprep subprocess symtable sysconfig tabnanny tarfile tempfile textwrap
threading timeit token tokenize trace traceback tracemalloc turtle types typing unittest/case
unittest/loader unittest/mock unittest/suite urllib/parse urllib/request urllib/robotparser uuid
warnings wave weakref webbrowser wsgiref/handlers wsgiref/headers xml/dom/minidom
xml/etree/ElementTree xmlrpc/client xmlrpc/server zipapp zipfile zipfile/__init__ zipimport
"""


_MARKS = str.maketrans(
    {"’": "'", "‘": "'", "´": "'", "“": '"', "”": '"', "–": "-", "—": " - ", "…": "..."}
)


class Documented(NamedTuple):
    """A documented object: module, name in it ("" for the module), kind and docstring."""

    module: str
    name: str
    kind: str  # module, class or function
    signature: str
    docstring: str

    @property
    def source(self) -> str:
        """Full name."""
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def summary(self) -> str:
        """First paragraph of the docstring, on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())

    @property
    def body(self) -> str:
        """The docstring after its first paragraph."""
        return self.docstring.partition("\n\n")[2].strip()


@cache
def documented() -> tuple[Documented, ...]:
    """Return the documented objects of `MODULES`, in source order."""
    objects = list[Documented]()
    for name in MODULES.split():
        path = LIBRARY / f"{name}.py"
        if path.is_file():
            # The Python source of decimal is _pydecimal, and so on.
            module = name.removesuffix("/__init__").replace("/", ".").replace("_py", "")
            objects += _documented(module, "", ast.parse(path.read_bytes()))
    return tuple(objects)


def _documented(
    module: str, outer: str, node: ast.Module | ast.ClassDef | ast.FunctionDef
) -> Iterator[Documented]:
    docstring, is_function = ast.get_docstring(node), isinstance(node, ast.FunctionDef)
    if docstring and docstring.strip():
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        signature = outer
        if isinstance(node, ast.FunctionDef):
            result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            signature = f"{outer}({ast.unparse(node.args)}){result}"
        text = inspect.cleandoc(docstring).translate(_MARKS)
        yield Documented(module, outer, kind, signature, text)
    for child in [] if is_function else node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef) and not child.name.startswith("_"):
            yield from _documented(module, f"{outer}.{child.name}".lstrip("."), child)


T = TypeVar("T")
Contents = Iterator[tuple[str, str]]  # names and contents of files

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

# Stories per file; those of the last have pairs of values that occur in no other file.
PARTS = {"train": 30_000, "validation": 1_000, "test": 1_000, "combinations": 1_000}
COMBINED = "combinations"
SEED = 1812
# Pairs of values of two attributes that occur only in `combinations`: an eighth of all pairs, each
# value in at most one, so that training contains every value.
HELD_OUT_PAIRS = {
    (first, second): frozenset(
        (value, VALUES[second][(factor * i + place) % 8]) for i, value in enumerate(VALUES[first])
    )
    for first, second, factor, place in (("job", "pet", 3, 1), ("color", "object", 5, 2))
}


def stories() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield part, and text and attributes, of each story, always the same ones. Every attribute's
    value is a word of the text, and texts are distinct."""
    known: set[str] = set()
    for part, number in PARTS.items():
        rng, made = random.Random(f"{SEED} {part}"), 0
        while made < number:
            attributes = _attributes(rng, part == COMBINED)
            pronouns = PRONOUNS["she" if attributes["name"] in NAMES["she"] else "he"]
            words = {**attributes, **pronouns, "verb": _one(VERBS[attributes["mood"]], rng)}
            meal, thing, loss = (_one(kind, rng) for kind in (MEALS, THINGS, LOSSES))
            middle = _one([(meal, thing, loss), (thing, meal, loss), (thing, loss, meal)], rng)
            sentences = [_one(OPENINGS, rng), *middle, _one(FEELINGS, rng), _one(ENDINGS, rng)]
            text = " ".join(sentences).format(**words)
            if text not in known:
                known.add(text)
                made += 1
                yield part, {"text": text, "attributes": attributes}


def _attributes(rng: random.Random, is_combined: bool) -> dict[str, str]:
    """Return attributes without held-out pairs, or, if combined, with one or one of each kind."""
    attributes: dict[str, str] = {}
    while not attributes or any(
        (attributes[a], attributes[b]) in pairs for (a, b), pairs in HELD_OUT_PAIRS.items()
    ):
        attributes = {name: _one(values, rng) for name, values in VALUES.items()}
    if is_combined:
        kinds = list(HELD_OUT_PAIRS)
        for kind in _one([kinds[:1], kinds[1:], kinds], rng):
            pair = _one(sorted(HELD_OUT_PAIRS[kind]), rng)
            attributes.update(zip(kind, pair, strict=True))
    return attributes


def _one(values: Sequence[T], rng: random.Random) -> T:
    return values[int(rng.random() * len(values))]  # `choice` may change between Python versions


# --- job titles: made by the grammar of job descriptions, spelled by rules of the time ---

TITLES_SEED, NUM_TITLES = 1845, 20_000
SHARE_RELATION, SHARE_RANK = 0.35, 0.6
SHARE_OLD, SHARE_SHORT, SHARE_SLIP, SHARE_CAPITAL = 0.35, 0.5, 0.15, 0.3
# Words or ends of compounds, and their abbreviations by clerks.
_SHORT_FORMS = """
en: apprentice appr., journeyman journ., master mstr., widow wid., foreman form., servant serv.,
daughter dau., merchant merch., maker mkr., weaver weavr., carpenter carp., fisherman fishn.;
da: lærling lærl., svend svd., mester mstr., formand fmd., enke efter e.e., datter dat., handler
hdl., mager mgr., tømrer tømr., snedker snedk., skrædder skrd., fisker fisk.;
sv: lärling lärl., gesäll ges., mästare mäst., förman förm., änka efter ä.e., dotter dott., handlare
handl., makare mak., timmerman timm., snickare snick., skräddare skrädd.;
de: lehrling lehrl., geselle ges., meister mstr., werkführer wf., witwe wwe., tochter tocht.,
händler hdlr., macher mchr., zimmermann zimm., tischler tischl., schneider schneid.
"""
SHORT_FORMS = {
    language: [pair.strip().rsplit(maxsplit=1) for pair in pairs.split(",")]
    for language, _, pairs in (entry.partition(":") for entry in _SHORT_FORMS.strip().split(";\n"))
}


def titles(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield `count` distinct spellings with their normal forms."""
    draw = random.Random(seed).random  # the only stream that Python keeps stable
    known, trades = set[str](), grammar.heads()
    while len(known) < count:
        language = grammar.LANGUAGES[int(draw() * len(grammar.LANGUAGES))]
        normal = _normal_form(trades[int(draw() * len(trades))], language, draw)
        source = _spelled(normal, language, draw)
        if source not in known:
            known.add(source)
            yield source, normal


def _normal_form(trade: grammar.TitleHead, language: str, draw: Callable[[], float]) -> str:
    word, stem = trade.words[language][0]
    is_of_another = draw() < SHARE_RELATION
    if draw() < SHARE_RANK:
        forms = grammar.RANK_FORMS[language]
        rank = grammar.MASTER if is_of_another else 1 + int(draw() * len(forms))
        word = forms[rank - 1][0].format(x=word, c=stem)
    if not is_of_another:
        return word
    relations = grammar.RELATION_FORMS[language]
    return relations[int(draw() * len(relations))][0].format(b=word)


def _spelled(text: str, language: str, draw: Callable[[], float]) -> str:
    """Return a title with abbreviations, old spellings and slips of a clerk."""
    for forms, share in ((SHORT_FORMS, SHARE_SHORT), (grammar.OLD_SPELLINGS, SHARE_OLD)):
        for form, other in forms[language]:
            if form in text and draw() < share:
                text = text.replace(form, other)
    if draw() < SHARE_SLIP:
        text = grammar.slip(text, draw)
    return text.capitalize() if draw() < SHARE_CAPITAL else text


# --- demo files, each made once ---

NUM_OCCUPATIONS, OCCUPATION_SEED = 20_000, 1911
OCCUPATION_SPLIT = SplitOptions(validation_share=0.08, test_share=0.1, seed=0)
SHORTEST_TEXT, SHORTEST_SUMMARY, LONGEST_SUMMARY = 80, 20, 400
SHORTEST_PAGE, LONGEST_TITLE = 40, 100
# Limits, grades and split of the collection.
FEWEST_WORDS, LONGEST_SOURCE, FEWEST_QUERY_WORDS = 8, 300, 3
GRADE_ITSELF, GRADE_RELATED = 2, 1
QUERY_SPLIT = Split(validation_share=0.15, test_share=0.15, seed=0)
NAME_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def _jsonl(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Return the content of a csv file with these rows."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _occupations() -> Contents:
    """A csv of 20,000 rows: text, language, code_1, code_2 (mostly empty), split; beside it
    `codes.csv` (code, description) with all codes of the grammar.

    The split is by text: no variant of a test text is in the training part.
    """
    records = grammar.records(NUM_OCCUPATIONS, OCCUPATION_SEED)
    texts, first_codes = [r.text for r in records], [r.codes[0] for r in records]
    parts = split_by_stem(texts, first_codes, OCCUPATION_SPLIT).tolist()
    rows = [
        (r.text, r.language, r.codes[0], "".join(r.codes[1:2]), PART_NAMES[part])
        for r, part in zip(records, parts, strict=True)
    ]
    columns = ("text", "language", "code_1", "code_2", "split")
    yield "occupations.csv", csv_text([columns, *rows])
    yield "codes.csv", csv_text([("code", "description"), *grammar.code_book().items()])


def _titles() -> Contents:
    """A csv of source and target: job titles in four languages, with the spellings and
    abbreviations of old records, and their normal forms."""
    yield "titles.csv", csv_text([("source", "target"), *titles(NUM_TITLES, TITLES_SEED)])


def _stories() -> Contents:
    """Jsonl files of {"text", "attributes"}: train, validation, test, combinations.

    The stories of combinations.jsonl have pairs of attributes, such as a job and a pet, that occur
    in no other file, see `HELD_OUT_PAIRS`. No text is in two files.
    """
    rows: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    for part, story in stories():
        rows[part].append(story)
    yield from ((f"{part}.jsonl", _jsonl(own)) for part, own in rows.items())


def _text() -> Contents:
    """A jsonl of {"text", "source"}: topics of the language reference, and docstrings, in ASCII."""
    from pydoc_data.topics import topics  # a megabyte

    rows: dict[str, dict[str, Any]] = {}  # each text once
    for name, topic in topics.items():
        text = topic.translate(_MARKS)
        if text.isascii():
            rows.setdefault(text, {"text": text.strip() + "\n", "source": f"topic {name}"})
    for thing in documented():
        # ASCII only: a character tokenizer might not know a rare letter of a held-out document.
        if len(thing.docstring) >= SHORTEST_TEXT and thing.docstring.isascii():
            heading = f"{thing.module}: {thing.signature}" if thing.name else thing.module
            text = f"{heading}\n\n{thing.docstring}\n"
            rows.setdefault(thing.docstring, {"text": text, "source": thing.source})
    yield "text.jsonl", _jsonl(rows.values())


def _answers() -> Iterator[tuple[str, str]]:
    """Yield a question about each documented object, and its first paragraph as the answer."""
    questions = {
        "module": "What is the module {0.module} for?",
        "class": "What is the class {0.name} of the module {0.module}?",
        "function": "What does {0.name} of the module {0.module} do?",
    }
    known: set[str] = set()
    for thing in documented():
        question = questions[thing.kind].format(thing)
        has_length = SHORTEST_SUMMARY <= len(thing.summary) <= LONGEST_SUMMARY
        if has_length and known.isdisjoint((question, thing.summary)):
            known |= {question, thing.summary}
            yield question, thing.summary


def _instructions() -> Contents:
    """A jsonl of {"prompt", "completion"}: the questions and answers of `_answers`."""
    rows = ({"prompt": question, "completion": answer} for question, answer in _answers())
    yield "instructions.jsonl", _jsonl(rows)


def _preferences() -> Contents:
    """A jsonl of {"prompt", "chosen", "rejected"}; rejected has the words in reverse order."""
    rows = (
        {"prompt": question, "chosen": answer, "rejected": " ".join(reversed(answer.split()))}
        for question, answer in _answers()
    )
    yield "preferences.jsonl", _jsonl(rows)


def _pages() -> Contents:
    """A jsonl of {"text", "title", "query", "url"}: docstrings as pages, with the first paragraph
    as the title and the words of the signature as the query."""
    marked = re.compile(r"^(\s|>>>|[-*+=|])", re.MULTILINE)  # examples, lists and tables
    pages: dict[str, dict[str, Any]] = {}  # each text once
    for thing in documented():
        paragraphs = thing.body.split("\n\n")  # unwrapped, except marked ones
        text = "\n".join(p if marked.search(p) else " ".join(p.split()) for p in paragraphs)
        has_length = len(thing.summary) <= LONGEST_TITLE and len(text) >= SHORTEST_PAGE
        if has_length and text.isascii():
            words = re.findall(r"[a-z]{2,}", (thing.signature or thing.module).lower())
            query = " ".join(w for w in dict.fromkeys(words) if w not in ("self", "none"))
            url = f"https://docs.example/{thing.source.replace('.', '/')}"
            title = thing.summary.rstrip(".")
            page = {"text": text, "title": title, "query": query or thing.module, "url": url}
            pages.setdefault(text, page)
    yield "pages.jsonl", _jsonl(pages.values())


def _scored_texts() -> Contents:
    """A jsonl of docstrings with facts that they do not state: id, text, module, kind and, for
    functions only, num_parameters and has_default."""
    rows = list[dict[str, Any]]()
    for thing in documented():
        counts = parameters(thing.signature) if thing.kind == "function" else (None, None)
        facts = {"id": thing.source, "text": thing.docstring, "module": thing.module}
        labels = {"num_parameters": counts[0], "has_default": counts[1]}
        rows.append({**facts, "kind": thing.kind, **labels})
    yield "scored_texts.jsonl", _jsonl(rows)


def parameters(signature: str) -> tuple[int, bool]:
    """Return the number of parameters without `self` and `cls`, and whether one has a default."""
    function = ast.parse(f"def f{signature[signature.index('(') :]}: pass").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    several = [*arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    own = names[1:] if names[:1] in (["self"], ["cls"]) else names
    has_default = bool(arguments.defaults) or any(d is not None for d in arguments.kw_defaults)
    return len(own) + len(several), has_default


def _collection() -> Contents:
    """Pages and queries about them, in the layout of BEIR.

    A page is a docstring, with the first paragraph as the title and the rest as the text. A query
    is the words of a function's signature. The function's page has grade 2; the page of its class
    or module, and methods of its class that share a word in their names, have grade 1.
    """
    pages: dict[str, Documented] = {}  # each name and each text once
    texts: set[str] = set()
    for thing in documented():
        fits = len(thing.summary) <= LONGEST_SOURCE and len(thing.body.split()) >= FEWEST_WORDS
        if fits and thing.source not in pages and thing.docstring not in texts:
            pages[thing.source] = thing
            texts.add(thing.docstring)
    rows = [{"_id": i, "title": p.summary, "text": p.body} for i, p in pages.items()]
    yield "corpus.jsonl", _jsonl(rows)
    queries, grades = _asked(pages)
    rows = [{"_id": f"how-{source}", "text": text} for text, source in queries.items()]
    yield "queries.jsonl", _jsonl(rows)
    part_of = QUERY_SPLIT.by_lot(f"how-{source}" for source in queries.values())
    for part, name in enumerate(PART_NAMES):
        lines = ["query-id\tcorpus-id\tscore\n"]
        for source, own in zip(queries.values(), part_of.tolist(), strict=True):
            if own == part:
                lines += [f"how-{source}\t{page}\t{g}\n" for page, g in grades[source].items()]
        yield f"qrels/{name}.tsv", "".join(lines)


def _asked(pages: dict[str, Documented]) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Return query -> page of its function, and for each such page its relevant pages' grades."""

    def words_of(name: str) -> list[str]:
        return [word.lower() for word in NAME_WORD.findall(name) if len(word) > 1]

    by_parent: dict[str, list[str]] = {}
    for source in pages:
        by_parent.setdefault(source.rpartition(".")[0], []).append(source)
    queries: dict[str, str] = {}
    grades: dict[str, dict[str, int]] = {}
    for source, page in pages.items():
        arguments = re.sub(r"=[^,)]*|->.*|\bself\b|\bcls\b", " ", page.signature)
        words = dict.fromkeys(words_of(f"{page.module} {arguments}"))
        text = " ".join(words)
        if page.kind != "function" or len(words) < FEWEST_QUERY_WORDS or text in queries:
            continue
        queries[text] = source
        parent = source.rpartition(".")[0]
        related = [parent] if parent in pages else []
        if parent != page.module:
            name = set(words_of(page.name.rpartition(".")[2]))
            siblings = (s for s in by_parent[parent] if s != source)
            related += [s for s in siblings if name & set(words_of(s.rpartition(".")[2]))]
        grades[source] = {source: GRADE_ITSELF, **dict.fromkeys(related, GRADE_RELATED)}
    return queries, grades


def _made(files: Callable[[], Contents], name: str = "", of_python: bool = False) -> Path:
    """Return the file `name`, or the folder, of these files, made at first use; files made of
    Python's sources get a folder per Python version."""
    facts: list[Any] = [DEMO_VERSION]
    if of_python:
        paths = map(LIBRARY.joinpath, (TOPICS, *(f"{m}.py" for m in MODULES.split())))
        sources = [[path.name, file_digest(path)] for path in paths if path.is_file()]
        facts += [platform.python_version(), TEXT_VERSION, digest_of(sources)]

    def write(folder: Path) -> None:
        for path, content in files():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(content, "utf-8", newline="")

    folder = f"{files.__name__.removeprefix('_')}-{digest_of(facts)[:8]}"
    return made_once(cache_root() / "demo" / folder, write) / name


demo_occupations = partial(_made, _occupations, "occupations.csv")
demo_titles = partial(_made, _titles, "titles.csv")
demo_stories = partial(_made, _stories)
demo_text = partial(_made, _text, "text.jsonl", of_python=True)
demo_instructions = partial(_made, _instructions, "instructions.jsonl", of_python=True)
demo_preferences = partial(_made, _preferences, "preferences.jsonl", of_python=True)
demo_pages = partial(_made, _pages, "pages.jsonl", of_python=True)
demo_scored_texts = partial(_made, _scored_texts, "scored_texts.jsonl", of_python=True)
demo_collection = partial(_made, _collection, of_python=True)
