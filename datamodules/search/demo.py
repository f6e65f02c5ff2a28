"""A collection of the documentation that Python carries, in the layout of BEIR."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from datamodules.core.store import digest_of, made_once
from datamodules.demo import Documented, documented, sources_digest
from datamodules.files.splitting import PART_NAMES, TEST, TRAIN, VALIDATION, keyed_hashes

DEMO_VERSION = 1  # of the functions below
FEWEST_WORDS, LONGEST_TITLE, FEWEST_QUERY_WORDS = 8, 300, 3
GRADE_ITSELF, GRADE_RELATED = 2, 1
SHARES = {TEST: 0.15, VALIDATION: 0.15}
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


class _Query(NamedTuple):
    id: str
    text: str
    grades: dict[str, int]


def demo_collection(cache_dir: Path) -> Path:
    """Return a folder of pages and of queries about them.

    A page is a docstring: its first paragraph is the title, the rest the text. A query is the
    words of a function's signature, which are not its title; its page has grade 2. Grade 1 have
    the page of its class or module, and those of its class whose name shares a word with it.
    Another version of Python has other words, and a folder of its own.
    """
    digest = digest_of([DEMO_VERSION, sources_digest()])
    return made_once(cache_dir / "demo" / f"relevance-{digest[:12]}", _write)


def _write(folder: Path) -> None:
    pages = _pages()
    queries = list(_queries(pages))
    parts = [_part(lot) for lot in keyed_hashes((q.id for q in queries), 0) / 2.0**64]
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for source, page in pages.items():
            row = {"_id": source, "title": page.summary, "text": _body(page)}
            file.write(json.dumps(row) + "\n")
    with (folder / "queries.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"_id": q.id, "text": q.text}) + "\n" for q in queries)
    (folder / "qrels").mkdir()
    for number, name in enumerate(PART_NAMES):
        with (folder / "qrels" / f"{name}.tsv").open("w", encoding="utf-8") as file:
            file.write("query-id\tcorpus-id\tscore\n")
            for query, part in zip(queries, parts, strict=True):
                if part == number:
                    grades = query.grades.items()
                    file.writelines(f"{query.id}\t{page}\t{grade}\n" for page, grade in grades)


def _pages() -> dict[str, Documented]:
    """Return full name -> what is documented, each text and each name once."""
    pages: dict[str, Documented] = {}
    texts: set[str] = set()
    for thing in documented():
        is_page = len(thing.summary) <= LONGEST_TITLE and len(_body(thing).split()) >= FEWEST_WORDS
        if is_page and thing.source not in pages and thing.docstring not in texts:
            pages[thing.source] = thing
            texts.add(thing.docstring)
    return pages


def _queries(pages: dict[str, Documented]) -> Iterator[_Query]:
    """Yield one query per page of a function, each text once."""
    by_parent: dict[str, list[str]] = {}
    for source in pages:
        by_parent.setdefault(source.rpartition(".")[0], []).append(source)
    texts: set[str] = set()
    for source, page in pages.items():
        words = _query_words(page)
        text = " ".join(words)
        if page.kind != "function" or len(words) < FEWEST_QUERY_WORDS or text in texts:
            continue
        texts.add(text)
        parent = source.rpartition(".")[0]
        related = [parent] if parent in pages else []
        if parent != page.module:
            name = set(_words(page.name.rpartition(".")[2]))
            siblings = (s for s in by_parent[parent] if s != source)
            related += [s for s in siblings if name & set(_words(s.rpartition(".")[2]))]
        grades = {source: GRADE_ITSELF, **dict.fromkeys(related, GRADE_RELATED)}
        yield _Query(f"how-{source}", text, grades)


def _query_words(page: Documented) -> list[str]:
    """Return the words of module, name and arguments, each once."""
    arguments = re.sub(r"=[^,)]*|->.*|\bself\b|\bcls\b", " ", page.signature)
    return list(dict.fromkeys(_words(f"{page.module} {arguments}")))


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORD.findall(name) if len(word) > 1]


def _body(page: Documented) -> str:
    return page.docstring.partition("\n\n")[2].strip()


def _part(lot: float) -> int:
    if lot < SHARES[TEST]:
        return TEST
    return VALIDATION if lot < SHARES[TEST] + SHARES[VALIDATION] else TRAIN
