"""Cleaning of collections: main text of pages, removal of near duplicates.

It needs the extra `pages`: trafilatura, datasketch and pyphen, imported where they are used.
"""

import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from datamodules.core.plan import check_range
from datamodules.files.rows import BadRow, BadRows

NUM_PERMUTATIONS, SEED = 128, 1  # of a MinHash sketch
SHINGLE = 5  # words per run


def library(name: str) -> Any:
    """Return a module of the extra; ValueError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is missing ({error}): pip install 'unisono[pages]'.") from error


@dataclass(frozen=True)
class Cleaning:
    """Which text and which documents are left out of a collection.

    Args:
        main_text: read only the main text of html pages, without menus, footers and comments, as
            trafilatura extracts it; a page without main text is empty.
        near_duplicates: share of common runs of five words, 0.1 to 1, from which a document counts
            as a repetition of an earlier one, estimated by MinHash (Broder 1997). It is then a bad
            row, which data.on_bad_rows=reject leaves out, with its judgements. `None` keeps all.
    """

    main_text: bool = False
    near_duplicates: float | None = None

    def __post_init__(self) -> None:
        check_range("cleaning", 0.1, 1, near_duplicates=self.near_duplicates)

    def facts(self) -> dict[str, Any]:
        """Return plain values that determine the result; empty if nothing is left out."""
        facts: dict[str, Any] = {}
        if self.main_text:
            facts["main_text"] = version(library("trafilatura").__name__)
        if self.near_duplicates is not None:
            facts["near_duplicates"] = [self.near_duplicates, library("datasketch").__version__]
        return facts

    def distinct(self, rows: Iterator[Any], bad_rows: BadRows) -> Iterator[Any]:
        """Yield the `TextRow`s of documents that do not repeat an earlier one."""
        if self.near_duplicates is None:
            yield from rows
            return
        sketches: Any = library("datasketch")
        known: dict[str, Any] = {}
        index = sketches.MinHashLSH(self.near_duplicates, NUM_PERMUTATIONS)
        for row in rows:
            words = re.findall(r"\w+", row.record.whole.lower())
            runs = range(max(1, len(words) - SHINGLE + 1))
            own = sketches.MinHash(NUM_PERMUTATIONS, SEED)
            own.update_batch([" ".join(words[n : n + SHINGLE]).encode() for n in runs])
            near = [(own.jaccard(known[id]), id) for id in index.query(own) if words]
            share, id = max(near, default=(0.0, ""))
            if share >= self.near_duplicates:
                rule = f"it repeats {id}, with {share:.2f} of its runs of words; keep one."
                bad_rows.add(BadRow(str(row.path), row.line, row.record.id, rule, "near duplicate"))
                continue
            if words and row.record.id not in known:
                index.insert(row.record.id, own)
                known[row.record.id] = own
            yield row


def main_lines(source: str) -> list[str]:
    """Return the lines of the main text of an html page."""
    text = library("trafilatura").extract(source, include_comments=False) or ""
    return [line for one in text.splitlines() if (line := " ".join(one.split()))]
