"""Pages in: rows with HTML or text become the text that a writer reads, without what it writes.

What is to be written must not stand in the input. Of HTML only the body's visible text is read:
`<title>`, Open Graph and meta descriptions, JSON-LD are not in it. A line of the body that is the
target word for word is taken out (mostly the h1 or a breadcrumb), and so is a line that is one of
its parts between dashes or bars: the h1 of "Apple pie – My Site", and the site's name with it. A
longer passage that holds the target's words stays, as people write from such passages; `unisono
check` counts them.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from datamodules.files.bad_rows import BadRow, BadRows
from datamodules.files.html import parsed, visible_lines
from datamodules.files.rows import HALF_RULE, JsonRow, half_character, read_json_rows

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser

Target = Literal["title", "description"]
TARGETS = ("title", "description")
COLUMNS = ("html", "text", *TARGETS, "query", "url")
SHAPES = '{"html": "<html>…", "query": "…"} or {"text": "…", "title": "…", "description": "…"}'
WORD = re.compile(r"\w+")
SEPARATORS = re.compile(r"\s+[|–—·»:/<>~•-]+\s+")  # of the parts of a title


class WriterPage(NamedTuple):
    """One page as a writer reads it.

    Args:
        file: where it comes from.
        line: of the file, or row.
        text: visible lines without the target.
        target: what is to be written; "" where the row has none.
        title: "" where it is the target, or there is none.
        query: by which the page is to be found; mostly "".
        num_removed: lines that were the target.
    """

    file: str
    line: int
    text: str
    target: str
    title: str = ""
    query: str = ""
    num_removed: int = 0

    @property
    def holds_target(self) -> bool:
        """Whether a passage still has the target's words in their order."""
        return f" {_folded(self.target)} " in f" {_folded(self.text)} "


class PagePrompt(NamedTuple):
    """What a writer is asked, and the characters of it that may lose their end."""

    prompt: str
    shrinks: tuple[int, int]


class _Fault(Exception):
    """kind, value and rule of a bad row."""


def read_pages(path: Path, target: Target, bad_rows: BadRows) -> Iterator[WriterPage]:
    """Yield the sound pages of one file that have a target; the others go to `bad_rows`.

    Raises:
        ValueError: the file cannot be read as rows.
    """
    for row in read_json_rows(path):
        try:
            page = _page(row, target)
            if not page.target:
                raise _Fault("no target", page.text[:60], _without(target))
            yield page
        except _Fault as fault:
            kind, value, rule = fault.args
            bad_rows.add(BadRow(str(row.file), row.line, value, rule, kind))


def page_of(row: JsonRow, target: Target) -> WriterPage:
    """Return the page of a row that may lack its target.

    Raises:
        ValueError: the row breaks a rule; file and line are named.
    """
    try:
        return _page(row, target)
    except _Fault as fault:
        raise ValueError(f"{row.place}: {fault.args[2]}") from fault


def framed(page: WriterPage, target: Target) -> PagePrompt:
    """Return the prompt of a page: the query, the title where it is not the target, the text."""
    given = (("Query", page.query), ("Title", page.title))
    head = "".join(f"{name}: {value}\n" for name, value in given if value) + "Page: "
    end = len(head) + len(page.text)
    return PagePrompt(f"{head}{page.text}\n{target.capitalize()}:\n", (len(head), end))


def without_target(lines: list[str], target: str) -> list[str]:
    """Return the lines that are not the target, nor a part of it."""
    taken = {_folded(part) for part in (target, *SEPARATORS.split(target))} - {""}
    return [line for line in lines if _folded(line) not in taken]


def _page(row: JsonRow, target: Target) -> WriterPage:
    values = _texts(row)
    if not values["html"] and not values["text"]:
        keys = ", ".join(row.values) or "nothing"
        raise _Fault("no page", keys, f'the row has no "html" and no "text"; write {SHAPES}.')
    given = {name: _line(values[name]) for name in (*TARGETS, "query")}
    if values["text"]:  # somebody has taken it out of the HTML already
        lines = [_line(line) for line in values["text"].splitlines()]
    else:
        tree = parsed(values["html"])
        lines = visible_lines(tree)
        given |= {name: given[name] or _line(_own(tree, name)) for name in TARGETS}
    wanted = given[target]
    kept = [line for line in without_target(lines, wanted) if line]
    if not kept:
        rule = f"the page has no visible text besides its {target}; leave the row out."
        raise _Fault("empty page", (values["text"] or values["html"])[:60], rule)
    num_removed = sum(map(bool, lines)) - len(kept)
    title = given["title"] if target != "title" else ""
    place = (str(row.file), row.line)
    return WriterPage(*place, "\n".join(kept), wanted, title, given["query"], num_removed)


def _texts(row: JsonRow) -> dict[str, str]:
    values = {name: row.values.get(name) for name in COLUMNS}
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise _Fault("type", str(value), f'"{name}" must be a text, got {value!r}.')
    if (half := half_character(json.dumps(values, ensure_ascii=False))) is not None:
        raise _Fault("half character", half, f'"{half}" {HALF_RULE}')
    return {name: (value or "").strip() for name, value in values.items()}


def _own(tree: "LexborHTMLParser", name: str) -> str:
    """Return the title or the description that the page itself has in its head."""
    if name == "title":
        node = tree.css_first("head title")
        return node.text() if node else ""
    metas: Any = tree.css("meta[name]")
    found = (m.attributes for m in metas if (m.attributes["name"] or "").lower() == name)
    return next((a.get("content") or "" for a in found), "")


def _line(text: str) -> str:
    return " ".join(text.split())


def _folded(text: str) -> str:
    """Return the words alone, without case."""
    return " ".join(WORD.findall(text.casefold()))


def _without(target: Target) -> str:
    return (
        f'the page has no {target}, neither as "{target}" nor in its html: nothing could be '
        "learnt; fill it in."
    )
