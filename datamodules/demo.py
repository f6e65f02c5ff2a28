"""Embedded demo data: made at first use, kept in a cache folder, the same bytes everywhere."""

import csv
import hashlib
import io
import json
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from datamodules import demo_stories as story_grammar
from datamodules import documentation_texts
from datamodules.files.splitting import PART_NAMES, SplitOptions, split_by_stem
from datamodules.occupations import grammar

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
    return _cached(cache_dir, "occupations", _occupation_rows)


def demo_code_book(cache_dir: Path) -> Path:
    """A csv (code, description) of every code that the grammar of the demo knows."""
    return _cached(cache_dir, "occupation_codes", _occupation_code_rows)


def _occupation_rows() -> Iterable[Sequence[str]]:
    records = grammar.records(NUM_OCCUPATIONS, OCCUPATION_SEED)
    texts, first_codes = [r.text for r in records], [r.codes[0] for r in records]
    parts = split_by_stem(texts, first_codes, OCCUPATION_SPLIT).parts.tolist()
    yield OCCUPATION_COLUMNS
    for record, part in zip(records, parts, strict=True):
        second_code = record.codes[1] if len(record.codes) > 1 else ""
        yield record.text, record.language, record.codes[0], second_code, PART_NAMES[part]


def _occupation_code_rows() -> Iterable[Sequence[str]]:
    yield "code", "description"
    yield from grammar.code_book().items()


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
    for found in documentation_texts.documented():
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
    for name, text in documentation_texts.topics().items():
        if text not in known and text.isascii():
            known.add(text)
            yield {"text": text.strip() + "\n", "source": f"topic {name}"}
    for found in documentation_texts.documented():
        is_long = len(found.docstring) >= SHORTEST_TEXT
        # A rare letter would be unknown to a tokenizer of the other documents' characters.
        if is_long and found.docstring.isascii() and found.docstring not in known:
            known.add(found.docstring)
            heading = f"{found.module}: {found.signature}" if found.name else found.module
            yield {"text": f"{heading}\n\n{found.docstring}\n", "source": found.source}


def _instructions() -> Iterator[dict[str, str]]:
    known: set[str] = set()
    for found in documentation_texts.documented():
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
    job and a pet, see `demo_stories.held_out_pairs`. No text stands in two files.
    """
    folder = Path(cache_dir) / f"demo-stories-{DIGESTS['stories'][:8]}"
    paths = {part: folder / f"{part}.jsonl" for part in story_grammar.PARTS}
    if all(path.is_file() for path in paths.values()):
        content = b"".join(path.read_bytes() for path in paths.values())
        if hashlib.sha256(content).hexdigest() == DIGESTS["stories"]:
            return folder
    lines: dict[str, list[str]] = {part: [] for part in paths}
    for part, story in story_grammar.stories():
        lines[part].append(json.dumps(asdict(story)) + "\n")
    for part, path in paths.items():
        _write_atomically(path, "".join(lines[part]).encode("utf-8"))
    return folder


# --- the cache ---


def _cached_lines(cache_dir: Path, name: str, rows: Callable[[], Iterator[dict[str, str]]]) -> Path:
    """The jsonl of this name for this Python, made where it is missing."""
    sources = documentation_texts.sources_digest().encode()
    digest = hashlib.sha256(f"{TEXT_VERSION} ".encode() + sources).hexdigest()[:8]
    path = Path(cache_dir) / f"demo-{name}-{platform.python_version()}-{digest}.jsonl"
    if not path.is_file():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows()]
        _write_atomically(path, "".join(lines).encode("utf-8"))
    return path


def _cached(cache_dir: Path, name: str, rows: Callable[[], Iterable[Sequence[str]]]) -> Path:
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
