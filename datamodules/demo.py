"""Embedded demo data: made at first use, kept in a cache folder, the same bytes everywhere."""

import ast
import csv
import hashlib
import inspect
import io
import json
import os
import platform
import random
import re
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from datamodules.files.splitting import PART_NAMES, SplitOptions, split_by_stem
from datamodules.occupations import grammar

TOPICS = "pydoc_data/topics.py"
# Modules written in Python with documentation worth reading; one that a version lacks is left out.
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
    """One documented thing: its module, its name in it ("" for the module), kind and docstring."""

    module: str
    name: str
    kind: str  # module, class or function
    signature: str
    docstring: str

    @property
    def source(self) -> str:
        """The full name."""
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def summary(self) -> str:
        """The first paragraph, on one line."""
        return " ".join(self.docstring.split("\n\n")[0].split())


def topics() -> dict[str, str]:
    """Return the topics of the language reference, name -> text."""
    tree = ast.parse((_library() / TOPICS).read_text("utf-8"))
    table = next(n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign))
    assert table is not None
    return {name: text.translate(_MARKS) for name, text in ast.literal_eval(table).items()}


@cache
def documented() -> tuple[Documented, ...]:
    """Return what the modules document, in the order of the list and of the sources."""
    found: list[Documented] = []
    for name in MODULES.split():
        path = _library() / f"{name}.py"
        if path.is_file():
            # decimal's Python source is _pydecimal, and so on
            module = name.removesuffix("/__init__").replace("/", ".").replace("_py", "")
            found += _documented(module, "", ast.parse(path.read_bytes()))
    return tuple(found)


@cache
def sources_digest() -> str:
    """Return the hex digest of all sources that are read."""
    content = hashlib.sha256()
    for name in (TOPICS, *(f"{module}.py" for module in MODULES.split())):
        path = _library() / name
        if path.is_file():
            content.update(f"{name} {path.stat().st_size};".encode() + path.read_bytes())
    return content.hexdigest()


def _library() -> Path:
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / TOPICS).is_file():
        raise FileNotFoundError(
            f"this Python has no {folder / TOPICS}, which the demo text is made of; name your own "
            "files, such as --data.train_files=mine.txt, or install Python's standard library."
        )
    return folder


def _documented(
    module: str, outer: str, node: ast.Module | ast.ClassDef | ast.FunctionDef
) -> Iterator[Documented]:
    docstring = ast.get_docstring(node)
    if docstring and docstring.strip():
        kind = {ast.Module: "module", ast.ClassDef: "class"}.get(type(node), "function")
        text = inspect.cleandoc(docstring).translate(_MARKS)
        yield Documented(module, outer, kind, _signature(node, outer), text)
    for child in node.body:
        if isinstance(node, ast.FunctionDef) or not isinstance(
            child, ast.ClassDef | ast.FunctionDef
        ):
            continue
        if not child.name.startswith("_"):
            yield from _documented(module, f"{outer}.{child.name}".lstrip("."), child)


def _signature(node: ast.AST, name: str) -> str:
    if not isinstance(node, ast.FunctionDef):
        return name
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({ast.unparse(node.args)}){result}"


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
# Of two attributes, the pairs of values that only the combinations have: an eighth of all pairs,
# each value in at most one of them, so that every value is trained.
HELD_OUT_PAIRS = {
    (first, second): frozenset(
        (value, VALUES[second][(factor * i + place) % 8]) for i, value in enumerate(VALUES[first])
    )
    for first, second, factor, place in (("job", "pet", 3, 1), ("color", "object", 5, 2))
}


def stories() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the part, and the text and the attributes of each story, always the same; every value
    of an attribute is a word of the text, and no text comes twice."""
    known: set[str] = set()
    for part, number in PARTS.items():
        rng = random.Random(f"{SEED} {part}")
        made = 0
        while made < number:
            attributes = _attributes(rng, part == COMBINED)
            text = _told(attributes, rng)
            if text not in known:
                known.add(text)
                made += 1
                yield part, {"text": text, "attributes": attributes}


def _attributes(rng: random.Random, is_combined: bool) -> dict[str, str]:
    """Return attributes without a held-out pair; combined ones with one, or one of each kind."""
    while True:
        attributes = {name: _one(values, rng) for name, values in VALUES.items()}
        if not any(
            (attributes[a], attributes[b]) in pairs for (a, b), pairs in HELD_OUT_PAIRS.items()
        ):
            break
    if is_combined:
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


# SHA-256 of each file; its first digits stand in the name, so that no old file is taken for new.
DIGESTS = {
    "occupations": "314a69cb92ad227b7882cdc838256812a544f09028c3ac772c325ecea7cafea6",
    "occupation_codes": "f564bb2874961c21c61b806e71f96b4adc2cf55dc2a35ddb6dad229fe0c19d17",
    "stories": "f2025ae77f47b5b3f8bcacdef3180f1ab627a42fdb497d1329992076b7338426",
}

# --- occupations: descriptions in four languages, codes of five digits ---

NUM_OCCUPATIONS = 20_000
OCCUPATION_COLUMNS = ("text", "language", "code_1", "code_2", "split")
OCCUPATION_SEED = 1911
OCCUPATION_SPLIT = SplitOptions(validation_share=0.08, test_share=0.1, seed=0)


def demo_occupations(cache_dir: Path) -> Path:
    """A csv of 20,000 rows: text, language, code_1, code_2 (mostly empty), split.

    The split is by string: no variant of a test string stands in the training part.
    """

    def rows() -> Iterator[Sequence[str]]:
        records = grammar.records(NUM_OCCUPATIONS, OCCUPATION_SEED)
        texts, first_codes = [r.text for r in records], [r.codes[0] for r in records]
        parts = split_by_stem(texts, first_codes, OCCUPATION_SPLIT).tolist()
        yield OCCUPATION_COLUMNS
        for record, part in zip(records, parts, strict=True):
            second_code = record.codes[1] if len(record.codes) > 1 else ""
            yield record.text, record.language, record.codes[0], second_code, PART_NAMES[part]

    return _cached_table(cache_dir, "occupations", rows)


def demo_code_book(cache_dir: Path) -> Path:
    """A csv (code, description) of every code that the grammar of the demo knows."""
    rows = [("code", "description"), *grammar.code_book().items()]
    return _cached_table(cache_dir, "occupation_codes", lambda: rows)


# --- language models: the documentation that Python carries ---

TEXT_VERSION = 2  # of the functions below
SHORTEST_TEXT, SHORTEST_SUMMARY, LONGEST_SUMMARY = 80, 20, 400
SHORTEST_PAGE, LONGEST_TITLE = 40, 100


def demo_text(cache_dir: Path) -> Path:
    """A jsonl of {"text", "source"}: topics of the language reference, and docstrings, in ASCII.

    Another version of Python has other words, and a file of its own.
    """
    return _cached_lines(cache_dir, "text", _texts)


def demo_instructions(cache_dir: Path) -> Path:
    """A jsonl of {"prompt", "completion"}: what is asked of a name, and its first paragraph."""
    return _cached_lines(cache_dir, "instructions", _instructions)


def demo_pages(cache_dir: Path) -> Path:
    """A jsonl of {"text", "title", "query", "url"}: the docstrings as pages, their first paragraph
    as the title, and the words of the signature as the query."""
    return _cached_lines(cache_dir, "pages", _pages)


def _pages() -> Iterator[dict[str, str]]:
    known: set[str] = set()
    for found in documented():
        text = _unwrapped(found.docstring.partition("\n\n")[2].strip())
        has_length = len(found.summary) <= LONGEST_TITLE and len(text) >= SHORTEST_PAGE
        if has_length and text.isascii() and text not in known:
            known.add(text)
            words = re.findall(r"[a-z]{2,}", (found.signature or found.module).lower())
            query = " ".join(w for w in dict.fromkeys(words) if w not in ("self", "none"))
            url = f"https://docs.example/{found.source.replace('.', '/')}"
            title = found.summary.rstrip(".")
            yield {"text": text, "title": title, "query": query or found.module, "url": url}


def _unwrapped(text: str) -> str:
    """Return a text with one line per paragraph; examples, lists and tables keep their lines."""
    paragraphs = text.split("\n\n")
    kept = re.compile(r"^(\s|>>>|[-*+=|])", re.MULTILINE)
    return "\n".join(p if kept.search(p) else " ".join(p.split()) for p in paragraphs)


def _texts() -> Iterator[dict[str, str]]:
    known: set[str] = set()
    for name, text in topics().items():
        if text not in known and text.isascii():
            known.add(text)
            yield {"text": text.strip() + "\n", "source": f"topic {name}"}
    for found in documented():
        is_long = len(found.docstring) >= SHORTEST_TEXT
        # A rare letter would be unknown to a tokenizer of the other documents' characters.
        if is_long and found.docstring.isascii() and found.docstring not in known:
            known.add(found.docstring)
            heading = f"{found.module}: {found.signature}" if found.name else found.module
            yield {"text": f"{heading}\n\n{found.docstring}\n", "source": found.source}


def _instructions() -> Iterator[dict[str, str]]:
    known: set[str] = set()
    for found in documented():
        question = {
            "module": f"What is the module {found.module} for?",
            "class": f"What is the class {found.name} of the module {found.module}?",
            "function": f"What does {found.name} of the module {found.module} do?",
        }[found.kind]
        has_length = SHORTEST_SUMMARY <= len(found.summary) <= LONGEST_SUMMARY
        if has_length and not {question, found.summary} & known:
            known |= {question, found.summary}
            yield {"prompt": question, "completion": found.summary}


# --- language models whose facts are known: stories of a grammar ---


def demo_stories(cache_dir: Path) -> Path:
    """A folder of jsonl files of {"text", "attributes"}: train, validation, test, combinations.

    The stories of combinations.jsonl hold pairs of attributes that no other file has, such as a
    job and a pet, see `HELD_OUT_PAIRS`. No text stands in two files.
    """
    folder = Path(cache_dir) / f"demo-stories-{DIGESTS['stories'][:8]}"
    paths = {part: folder / f"{part}.jsonl" for part in PARTS}
    if all(path.is_file() for path in paths.values()):
        content = b"".join(path.read_bytes() for path in paths.values())
        if hashlib.sha256(content).hexdigest() == DIGESTS["stories"]:
            return folder
    lines: dict[str, list[str]] = {part: [] for part in paths}
    for part, story in stories():
        lines[part].append(json.dumps(story) + "\n")
    for part, path in paths.items():
        _write_atomically(path, "".join(lines[part]).encode("utf-8"))
    return folder


# --- the cache ---


def _cached_lines(cache_dir: Path, name: str, rows: Callable[[], Iterator[dict[str, str]]]) -> Path:
    """The jsonl of this name for this Python, made where it is missing."""
    sources = sources_digest().encode()
    digest = hashlib.sha256(f"{TEXT_VERSION} ".encode() + sources).hexdigest()[:8]
    path = Path(cache_dir) / f"demo-{name}-{platform.python_version()}-{digest}.jsonl"
    if not path.is_file():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows()]
        _write_atomically(path, "".join(lines).encode("utf-8"))
    return path


def _cached_table(cache_dir: Path, name: str, rows: Callable[[], Iterable[Sequence[str]]]) -> Path:
    """The csv of this name, made anew where it is missing or not whole."""
    path = Path(cache_dir) / f"demo-{name}-{DIGESTS[name][:8]}.csv"
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == DIGESTS[name]:
        return path
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows())
    _write_atomically(path, text.getvalue().encode("utf-8"))
    return path


def _write_atomically(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except BaseException:
        os.unlink(partial)
        raise
