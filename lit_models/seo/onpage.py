"""On-page checks: what pages say of themselves and which rules they break; see onpage.md.

`python -m lit_models.seo.onpage page.html FOLDER …`. No model and no network. A page takes time in
proportion to its length: its tree is walked once, texts of nested elements are cut, and only the
first findings of a check are shown with their places.

Source of the reading scores: Flesch 1948, "A new readability yardstick"; Kincaid et al. 1975, both
in words per sentence and syllables per word. Syllables are counted by rules of spelling, which miss
about one word in ten; over a page the errors mostly cancel, over a line they do not.
"""

import argparse
import json
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

import pyarrow as pa

from datamodules.files.documents import files_in
from datamodules.files.html import (
    DECLARED_WITHIN,
    decoded_html,
    first_bad_byte,
    flattened,
    html_encoding,
    visible_lines,
)
from datamodules.files.tables import new_table
from datamodules.search.bm25 import scores_of
from datamodules.text.terms import sentences_of, words_of
from lit_models.errors import run_guarded

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

SUFFIXES = (".html", ".htm", ".xhtml")
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*|[xi](?:-[A-Za-z0-9]{1,8})+")
LINK_KINDS = ("internal", "external", "fragment", "other", "unknown")
LONGEST_TITLE = 60  # characters
SHORTEST_DESCRIPTION, LONGEST_DESCRIPTION = 70, 160
LONGEST_EVIDENCE, LONGEST_ADDRESS = 200, 8192
LONGEST_HEADING = 1000  # characters that are kept of a heading or a link
MOST_FINDINGS = 20  # of one check, with their places
HEADINGS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6"})
SPEAKING = (*HEADINGS, "a", "title", "script")  # elements whose text is kept
NAMES = ("aria-label", "aria-labelledby", "title", "alt")  # attributes that stand for a text
FIRST_WORDS = 100  # in which keywords are counted
FEWEST_WORDS = 100  # on which both reading scores were made
WORDS_PER_SHINGLE = 5
NEAR = 0.8  # Jaccard similarity of the sets of shingles (Broder 1997)
WIDTH, LABEL = 80, 17
NAMED = "the pages named"
SNIPPETS = ("title", "description")
VOWELS = re.compile(r"[aeiouy]+")
# Two vowels that are two syllables: radio, serious, client, actual; not nation, special, million.
HIATUS = re.compile(
    r"(?<![tscgxln])i[ao](?!us)|iation|(?<![tscgx])iou|(?<![tc])(?<!fr)ie[tn]|iety|eo(?!u)"
    r"|eum$|^crea(?![mks])"
    r"|(?<![qg])ua(?!de)|iu|uou|[aeiouy]ing"
)
# An e that is not spoken: make, makes, jumped, completely; not table, bottles, wanted, boxes.
SILENT_E = re.compile(
    r"[^aeiouyl]e$|[aeiouy]le$|[qg]ue$|[^tdaeiouy]ed$|[^aeiouysxzgchl]es$|[aeiouy]les$"
    r"|[^aeiouyl]e(?:ly|ful|less|ment|ness)$"
)
KNOWN = {
    **{"the": 1, "be": 1, "he": 1, "she": 1, "we": 1, "me": 1, "people": 2, "business": 2},
    **{"something": 2, "someone": 2, "every": 2, "everything": 3, "sometimes": 2, "area": 3},
    **{"idea": 3, "real": 1, "really": 2, "one": 1, "are": 1, "were": 1, "there": 1, "where": 1},
    **{"being": 2, "create": 2, "created": 3, "science": 2, "quiet": 2, "poem": 2, "lion": 2},
    **{"usually": 4, "actually": 4, "evening": 2, "different": 3, "interesting": 4, "people's": 2},
}


class PageFinding(NamedTuple):
    """Something that breaks a rule, with its evidence.

    Args:
        check: what was looked at, such as "title".
        rule: what is wrong and what the rule is.
        evidence: the text or the element, shortened; "" where something is missing.
        place: path of the element in the tree, or where else it is.
    """

    check: str
    rule: str
    evidence: str = ""
    place: str = ""


class Element:
    """An element of a page: its attributes, the elements around it, and what it says.

    Args:
        tag: its name.
        attributes: by name; None where one has no value.
        parent: the element around it.
        number: among the elements of its kind below its parent, from 1.
    """

    __slots__ = ("attributes", "is_named", "number", "parent", "pieces", "speaker", "tag", "text")

    def __init__(
        self, tag: str, attributes: dict[str, str | None], parent: "Element | None", number: int
    ) -> None:
        self.tag, self.attributes, self.parent, self.number = tag, attributes, parent, number
        self.pieces: list[str] = []
        self.text, self.is_named = "", any(self.value(name) for name in NAMES)
        outer = None if parent is None else parent.speaker
        self.speaker: Element | None = self if tag in SPEAKING else outer

    def value(self, name: str) -> str:
        """Return an attribute without spaces around it; "" where there is none."""
        return (self.attributes.get(name) or "").strip()

    def close(self) -> None:
        """Join what was said inside; the element around it says the beginning of that, too."""
        outer = None if self.parent is None else self.parent.speaker
        if self.speaker is self:
            self.text, self.pieces = "".join(self.pieces), []
            if self.tag not in ("title", "script"):
                self.text = self.text[:LONGEST_HEADING]
                if outer is not None:
                    outer.pieces.append(self.text)
        if outer is not None:
            outer.is_named |= self.is_named

    @property
    def line(self) -> str:
        """What it says, on one line."""
        return " ".join(self.text.split())

    @property
    def opening(self) -> str:
        """The opening tag, as evidence."""
        pairs = (k if v is None else f'{k}="{v}"' for k, v in self.attributes.items())
        return shown(f"<{' '.join([self.tag, *pairs])}>")

    @property
    def place(self) -> str:
        """Where it stands in the tree, as a selector: `body > p:nth-of-type(2)`."""
        steps: list[str] = []
        at: Element | None = self
        while at is not None and at.tag != "html":
            is_one = at.tag in ("head", "body")
            steps.append(at.tag if is_one else f"{at.tag}:nth-of-type({at.number})")
            at = at.parent
        return " > ".join(reversed(steps)) or "html"


class Defect(NamedTuple):
    """A rule that an element breaks, and what shows it."""

    rule: str
    element: Element | None = None
    evidence: str = ""


@dataclass
class Page:
    """One page.

    Args:
        name: by which findings name it.
        html: its source.
        address: where it stands on the web, if that is known.
        findings: of reading it.
        facts: of reading it.
    """

    name: str
    html: str
    address: str | None = None
    findings: list[PageFinding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    num_flattened: int = 0

    @cached_property
    def parts(self) -> tuple[list[Element], list[str]]:
        """The elements in order, and the visible text, a line per block."""
        from selectolax.lexbor import LexborHTMLParser

        html, self.num_flattened = flattened(self.html)
        tree = LexborHTMLParser(html)
        return _elements(tree.root), visible_lines(tree)

    @cached_property
    def lines(self) -> list[str]:
        """The visible text, a line per block."""
        return self.parts[1]

    @cached_property
    def words(self) -> list[str]:
        """The words of the visible text, as they are written."""
        return words_of("\n".join(self.lines))

    def close(self) -> None:
        """Keep the lines and words, and let go of the source and its elements."""
        self.lines, self.words, self.html = self.lines, self.words, ""
        del self.parts


@dataclass
class PageReport:
    """What a page says of itself, and which rules it breaks.

    Args:
        name: of the page.
        address: of the page, if known.
        facts: plain values by name.
        findings: each with its evidence.
    """

    name: str
    address: str | None
    facts: dict[str, Any]
    findings: list[PageFinding]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        findings = [finding._asdict() for finding in self.findings]
        return {"page": self.name, "address": self.address, **self.facts, "findings": findings}


def page_of_bytes(content: bytes, name: str, address: str | None = None) -> Page:
    """Return a page of its bytes; a wrong encoding is a finding and no error."""
    findings: list[PageFinding] = []
    if not content.strip():
        findings.append(PageFinding("page", "the file is empty", "", name))
    found = html_encoding(content)
    if found.declared is not None and found.declared_name is None:
        rule = "the declared encoding is not known; declare utf-8"
        findings.append(PageFinding("encoding", rule, found.declared, "meta charset"))
    findings += _encoding_findings(content, found.declared_name, found.mark)
    facts = {"encoding_declared": found.declared_name or found.mark, "encoding_read": found.read}
    return Page(name, decoded_html(content), address, findings, facts)


def is_address(address: str) -> bool:
    """Whether this is a whole address of a page on the web."""
    try:
        parts = urlsplit(address)
    except ValueError:  # such as http://[
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def shown(text: str | None) -> str:
    """Return a text as evidence: on one line, and not too long."""
    line = " ".join((text or "").split())
    return line if len(line) <= LONGEST_EVIDENCE else line[: LONGEST_EVIDENCE - 1] + "…"


def check_page(page: Page, keywords: Sequence[str] = (), language: str | None = None) -> PageReport:
    """Return the report of one page.

    Args:
        page: to check.
        keywords: to count; none are guessed.
        language: of the text; `None` takes what the page declares.

    Raises:
        ValueError: a keyword has no word.
    """
    facts, findings = dict(page.facts), list(page.findings)
    elements: dict[str, list[Element]] = defaultdict(list)
    for element in page.parts[0]:
        elements[element.tag].append(element)
    if page.num_flattened:
        rule = "elements nest too deep, or have too many attributes, to be read as they stand"
        findings.append(PageFinding("page", rule, f"{page.num_flattened:,} tags"))
    for check in CHECKS:
        values, faults = check(page, elements)
        facts |= values
        name = check.__name__.strip("_").replace("_", " ")
        for fault in faults[:MOST_FINDINGS]:
            place = "" if fault.element is None else fault.element.place
            findings.append(PageFinding(name, fault.rule, shown(fault.evidence), place))
        if len(faults) > MOST_FINDINGS:
            findings.append(PageFinding(name, f"{len(faults) - MOST_FINDINGS:,} more of these"))
    facts["words"] = len(page.words)
    facts["readability"] = readability(page.lines, language or facts["language"])
    facts["keywords"] = {word: keyword_counts(page, word, facts) for word in keywords}
    return PageReport(page.name, page.address, facts, findings)


def check_site(
    pages: Iterable[Page], keywords: Sequence[str] = (), language: str | None = None
) -> list[PageReport]:
    """Return the reports of pages that belong together: with BM25 of the keywords over them, and
    what repeats. The pages are closed. Arguments and errors as `check_page`."""
    reports, kept = [], []
    for page in pages:
        reports.append(check_page(page, keywords, language))
        page.close()
        kept.append(page)
    for keyword in keywords:
        scores = scores_of(["\n".join(page.lines) for page in kept], keyword)
        for report, score in zip(reports, scores.tolist(), strict=True):
            report.facts["keywords"][keyword]["bm25"] = score
    repeated = duplicates(kept, [report.facts for report in reports])
    for report, found in zip(reports, repeated, strict=True):
        report.findings += found
    return reports


Elements = Mapping[str, list[Element]]
Checked = tuple[dict[str, Any], list[Defect]]


def _title(page: Page, elements: Elements) -> Checked:
    """Return the title, its length in characters, and what is wrong with it."""
    found = [e for e in elements["title"] if not _is_inside(e, "svg")]
    texts = [element.line for element in found]
    faults = _said_once("<title>", found, texts, elements)
    text = texts[0] if texts else None
    if text and len(text) > LONGEST_TITLE:
        rule = f"{len(text)} characters; results cut titles beyond about {LONGEST_TITLE}"
        faults.append(Defect(rule, found[0], text))
    return {"title": text, "title_length": len(text or "")}, faults


def _description(page: Page, elements: Elements) -> Checked:
    """Return the meta description, its length in characters, and what is wrong with it."""
    found = _meta(elements, "description")
    texts = [" ".join(element.value("content").split()) for element in found]
    faults = _said_once("meta description", found, texts, elements)
    text = texts[0] if texts else None
    if text and not SHORTEST_DESCRIPTION <= len(text) <= LONGEST_DESCRIPTION:
        rule = (
            f"{len(text)} characters; {SHORTEST_DESCRIPTION} to {LONGEST_DESCRIPTION} are shown "
            "whole and say enough"
        )
        faults.append(Defect(rule, found[0], text))
    return {"description": text, "description_length": len(text or "")}, faults


def _canonical(page: Page, elements: Elements) -> Checked:
    """Return the canonical address, made absolute where the page's is known."""
    found = [e for e in elements["link"] if "canonical" in e.value("rel").lower().split()]
    given = [element.value("href") for element in found]
    faults = []
    for element, href in zip(found, given, strict=True):
        if not href:
            faults.append(Defect("the canonical link names no address", element, element.opening))
        elif (target := _split(href)) is None:
            faults.append(Defect("the canonical address cannot be read", element, element.opening))
        elif not target.scheme:
            rule = "the canonical address is relative; write it whole, with https://"
            faults.append(Defect(rule, element, element.opening))
        elif _is_inside(element, "body"):
            rule = "the canonical link stands in the body, where search engines ignore it"
            faults.append(Defect(rule, element, element.opening))
    if len(set(given)) > 1:
        rule = "the canonical links name different addresses"
        faults.append(Defect(rule, found[1], ", ".join(given[:MOST_FINDINGS])))
    first = given[0] if given and _split(given[0]) is not None else ""
    return {"canonical": _joined(page.address or "", first) if first else None}, faults


def _robots(page: Page, elements: Elements) -> Checked:
    """Return what the page tells robots; noindex is a finding, since it may be a mistake."""
    said: dict[str, list[str]] = defaultdict(list)
    faults = []
    for name in ("robots", "googlebot", "bingbot"):
        for element in _meta(elements, name):
            content = element.value("content").lower()
            said[name] += [content] if content else []
            if {"noindex", "none"} & set(re.split(r"[\s,]+", content)):
                rule = "the page asks not to be listed in results"
                faults.append(Defect(rule, element, element.opening))
    return {"robots": {name: ", ".join(contents) for name, contents in said.items()}}, faults


def _language(page: Page, elements: Elements) -> Checked:
    """Return the language that the page declares."""
    root = elements["html"][0] if elements["html"] else None
    given = None if root is None else root.value("lang") or None
    faults = []
    if given is None:
        faults.append(Defect('no language is declared; write <html lang="en">', root))
    elif not LANGUAGE.fullmatch(given):
        faults.append(Defect("the language is no code such as en or pt-BR", root, given))
        given = None
    return {"language": given}, faults


def _headings(page: Page, elements: Elements) -> Checked:
    """Return level and text of all headings in order, and where the order breaks."""
    found = [element for element in page.parts[0] if element.tag in HEADINGS]
    listed = [(int(element.tag[1]), element.line) for element in found]
    faults = [] if found else [Defect("there is no heading")]
    before = 0
    for element, (level, text) in zip(found, listed, strict=True):
        if before and level > before + 1:
            faults.append(Defect(f"h{level} follows h{before}: levels are skipped", element, text))
        if not text and not element.is_named:
            faults.append(Defect("an empty heading", element, element.opening))
        before = level
    tops = [element for element in found if element.tag == "h1"]
    faults += [Defect("another h1; one names the page", e, e.text) for e in tops[1:]]
    if found and not tops:
        faults.append(Defect("there is no h1", found[0], listed[0][1]))
    return {"headings": listed}, faults


def _images(page: Page, elements: Elements) -> Checked:
    """Return how many images have an alternative text, an empty one (decoration), or none."""
    counts: Counter[str] = Counter({"described": 0, "decorative": 0, "without": 0})
    faults = []
    inputs = [e for e in elements["input"] if e.value("type").lower() == "image"]
    areas = [e for e in elements["area"] if "href" in e.attributes]
    for element in (*elements["img"], *areas, *inputs):
        is_labelled = bool(element.value("aria-label") or element.value("aria-labelledby"))
        if "alt" not in element.attributes and not is_labelled:
            counts["without"] += 1
            rule = 'no alternative text; describe it, or write alt="" where it decorates'
            faults.append(Defect(rule, element, element.opening))
        else:
            is_empty = "alt" in element.attributes and not element.value("alt")
            counts["decorative" if is_empty else "described"] += 1
    return {"images": dict(counts)}, faults


def _links(page: Page, elements: Elements) -> Checked:
    """Return how many links go where, and those that say nothing.

    Internal is the page's own host, with or without www; an address of a host counts as `unknown`
    where the page's own address is not known.
    """
    bases = [e.value("href") for e in elements["base"] if "href" in e.attributes]
    start = _joined(page.address or "", bases[0] if bases else "")
    counts = Counter(dict.fromkeys(LINK_KINDS, 0))
    faults = []
    for element in elements["a"]:
        if "href" not in element.attributes:
            continue
        href = element.value("href")
        if _split(href) is None:
            faults.append(Defect("the address cannot be read", element, href))
            continue
        counts[_kind(href, start)] += 1
        if not element.text.strip() and not element.is_named:
            rule = "a link without a text says nothing of its target"
            faults.append(Defect(rule, element, element.opening))
    return {"links": dict(counts)}, faults


def _structured_data(page: Page, elements: Elements) -> Checked:
    """Return which kinds of structured data there are, with their types."""
    types: list[str] = []
    faults = []
    for element in elements["script"]:
        if element.value("type").lower() != "application/ld+json":
            continue
        try:
            types += _types(json.loads(element.text))
        except (ValueError, RecursionError) as error:  # Python refuses numbers of 5,000 digits
            rule = f"JSON-LD that is no JSON ({error}): nobody can read it"
            faults.append(Defect(rule, element, element.text))
    held = {
        "json_ld": types,
        "microdata": [e.value("itemtype") for e in page.parts[0] if "itemscope" in e.attributes],
        "rdfa": [e.value("typeof") for e in page.parts[0] if "typeof" in e.attributes],
    }
    properties = [element.value("property") for element in elements["meta"]]
    held["open_graph"] = [name for name in properties if name.startswith("og:")]
    return {"structured_data": held}, faults


CHECKS: tuple[Callable[[Page, Elements], Checked], ...] = (
    *(_title, _description, _canonical, _robots, _language),
    *(_headings, _images, _links, _structured_data),
)


def _elements(root: "LexborNode | None") -> list[Element]:
    """Return the elements of a tree in order; each node is visited once."""
    found: list[Element] = []
    stack: list[tuple[LexborNode | None, Element | None, int]] = [(root, None, 1)] if root else []
    while stack:  # no recursion: a page may nest without end
        node, parent, number = stack.pop()
        if node is None:
            assert parent is not None
            parent.close()
            continue
        tag = node.tag or ""
        if tag == "-text":
            if parent is not None and parent.speaker is not None:
                parent.speaker.pieces.append(node.text_content or "")
            continue
        if tag.startswith("-"):  # a comment
            continue
        element = Element(tag, dict(node.attributes), parent, number)
        found.append(element)
        stack.append((None, element, 0))
        counts: Counter[str] = Counter()
        inside: list[tuple[LexborNode | None, Element | None, int]] = []
        for child in node.iter(include_text=True):
            counts[child.tag or ""] += 1
            inside.append((child, element, counts[child.tag or ""]))
        stack += inside[::-1]
    return found


def _is_inside(element: Element, tag: str) -> bool:
    """Whether an element stands in one of a tag; only the elements around it are looked at."""
    at = element.parent
    while at is not None and at.tag != tag:
        at = at.parent
    return at is not None


def _meta(elements: Elements, name: str) -> list[Element]:
    return [e for e in elements["meta"] if e.value("name").lower() == name]


def _said_once(
    what: str, found: list[Element], texts: list[str], elements: Elements
) -> list[Defect]:
    """Return faults where something is missing, empty, or there more than once."""
    if not found:
        return [Defect(f"there is no {what}", next(iter(elements["head"]), None))]
    faults = [] if texts[0] else [Defect(f"the {what} is empty", found[0], found[0].opening)]
    others = zip(found[1:], texts[1:], strict=True)
    return faults + [Defect(f"another {what}; one counts", e, text) for e, text in others]


def _split(address: str) -> Any:
    """Return the parts of an address; `None` where it cannot be read or is too long for any."""
    try:
        return urlsplit(address) if len(address) <= LONGEST_ADDRESS else None
    except ValueError:  # such as http://[
        return None


def _joined(start: str, href: str) -> str:
    """Return an address seen from another; where it cannot be read, that other one."""
    return start if _split(href) is None else urljoin(start, href)


def _kind(href: str, start: str) -> str:
    if href.startswith("#") or not href:
        return "fragment"
    target = urlsplit(_joined(start, href))
    if target.scheme not in ("", "http", "https"):
        return "other"
    if not target.netloc:
        return "internal"
    own = urlsplit(start).netloc
    if not own:
        return "unknown"
    return "internal" if _host(target.netloc) == _host(own) else "external"


def _host(netloc: str) -> str:
    return netloc.lower().rpartition("@")[2].removeprefix("www.")


def _types(value: Any) -> Iterator[str]:
    """Yield every @type of JSON-LD, nested ones too; one that is no text names no type."""
    if isinstance(value, list):
        for inner in value:
            yield from _types(inner)
    elif isinstance(value, dict):
        own = value.get("@type")
        named = own if isinstance(own, list) else [own]
        yield from (name for name in named if isinstance(name, str))
        for inner in value.values():
            yield from _types(inner)


def _encoding_findings(content: bytes, declared: str | None, mark: str | None) -> list[PageFinding]:
    bad = first_bad_byte(content)
    if mark == "utf-16" or content.isascii():
        return []
    expected = mark or declared
    if bad is not None and expected == "utf-8":
        rule = "UTF-8 is declared and the bytes are not UTF-8; save the page as UTF-8"
        return [PageFinding("encoding", rule, repr(content[bad : bad + 4]), f"byte {bad}")]
    if bad is None and expected not in (None, "utf-8"):
        rule = f"{expected} is declared and the bytes are UTF-8: letters appear garbled"
        place = next(i for i, byte in enumerate(content) if byte > 127)
        sample = content[place:].decode("utf-8", "replace")[:1]
        return [PageFinding("encoding", rule, sample, f"byte {place}")]
    if expected is None:
        rule = "no encoding is declared and the page has letters beyond ASCII; declare utf-8"
        return [PageFinding("encoding", rule, "", f"first {DECLARED_WITHIN} bytes")]
    return []


def readability(lines: Sequence[str], language: str | None) -> dict[str, Any]:
    """Return the scores of a text, or the reason why there are none.

    Args:
        lines: of the text; a sentence does not go over their ends.
        language: code such as en-GB, as the page declares it; none where it is not known.

    Returns:
        `reading_ease` (0 hard to 100 easy, beyond at extremes), `grade` (school years), with the
        counts `sentences`, `words`, `syllables`; or both scores none, and `why`.
    """
    none: dict[str, Any] = {"reading_ease": None, "grade": None}
    if language is None:
        return {**none, "why": "the page declares no language, and the formulas are for English"}
    if language.lower().replace("_", "-").split("-")[0] != "en":
        return {**none, "why": f'the language is "{language}", and the formulas are for English'}
    # A line without an end, such as a menu's or a heading's, is no sentence.
    sentences = [s for s in sentences_of(lines) if s.rstrip("\"'”’»)]")[-1:] in (*".!?…",)]
    words = [word for sentence in sentences for word in words_of(sentence)]
    if not words:
        return {**none, "why": "the page has no whole sentence"}
    num_syllables = sum(map(syllables, words))
    per_sentence, per_word = len(words) / len(sentences), num_syllables / len(words)
    scores: dict[str, Any] = {
        "reading_ease": 206.835 - 1.015 * per_sentence - 84.6 * per_word,
        "grade": 0.39 * per_sentence + 11.8 * per_word - 15.59,
        "sentences": len(sentences),
        "words": len(words),
        "syllables": num_syllables,
    }
    if len(words) < FEWEST_WORDS:
        scores["why"] = f"fewer than {FEWEST_WORDS} words in sentences: the scores are unsteady"
    return scores


def syllables(word: str) -> int:
    """Return the syllables of an English word by its spelling; a number counts one per digit."""
    word = word.lower().replace("’", "'")
    if word in KNOWN:
        return KNOWN[word]
    if "-" in word:
        return sum(syllables(part) for part in word.split("-"))
    digits = sum(c.isdecimal() for c in word)
    letters = word.removesuffix("'s").replace("'", "")
    groups = len(VOWELS.findall(letters)) + len(HIATUS.findall(letters))
    return digits + max(groups - bool(SILENT_E.search(letters)), 0 if digits else 1)


def keyword_counts(page: Page, keyword: str, facts: dict[str, Any]) -> dict[str, int]:
    """Return how often the words of a keyword follow each other in parts of a page.

    Case does not matter; word forms do: "cat" is not found in "cats".

    Args:
        page: where to look.
        keyword: one or more words.
        facts: of the page, with its title and headings.

    Raises:
        ValueError: the keyword has no word.
    """
    wanted = _words(keyword)
    if not wanted:
        raise ValueError(f'the keyword "{keyword}" has no word; give one such as "apple pie".')
    words = [word.casefold() for word in page.words]
    path = unquote(urlsplit(page.address).path) if page.address else ""
    return {
        "title": _count(_words(facts["title"] or ""), wanted),
        "headings": sum(_count(_words(text), wanted) for _, text in facts["headings"]),
        "first_words": _count(words[:FIRST_WORDS], wanted),
        "text": sum(_count(_words(line), wanted) for line in page.lines),
        "address": _count(_words(path.replace("_", " ").replace("-", " ")), wanted),
    }


def _words(text: str) -> list[str]:
    return [word.casefold() for word in words_of(text)]


def _count(words: Sequence[str], wanted: Sequence[str]) -> int:
    """Return how often a sequence occurs without overlap."""
    number, place = 0, 0
    while place + len(wanted) <= len(words):
        is_here = list(words[place : place + len(wanted)]) == list(wanted)
        number += is_here
        place += len(wanted) if is_here else 1
    return number


def duplicates(pages: Sequence[Page], facts: Sequence[dict]) -> list[list[PageFinding]]:
    """Return for each page the findings of what it shares with the pages before it.

    Args:
        pages: of one site.
        facts: of each page, with its title and description.
    """
    found: list[list[PageFinding]] = [[] for _ in pages]
    for name in ("title", "description"):
        first: dict[str, int] = {}
        for i, fact in enumerate(facts):
            key = " ".join((fact[name] or "").casefold().split())
            if key and first.setdefault(key, i) != i:
                rule = f"the same {name} as {pages[first[key]].name}"
                found[i].append(PageFinding("duplicates", rule, shown(fact[name]), f"<{name}>"))
    for i, (other, share) in near_duplicates([page.words for page in pages]).items():
        rule = f"{100 * share:.0f} % of the text is that of {pages[other].name}"
        found[i].append(PageFinding("duplicates", rule, shown(" ".join(pages[i].words)), "text"))
    return found


def near_duplicates(texts: Sequence[Sequence[str]]) -> dict[int, tuple[int, float]]:
    """Return for each text that nearly repeats earlier ones the most similar one, and how similar.

    Similarity is exact: shared over all different runs of five words, and 1 for equal texts that
    are shorter than one run. Texts are compared only where `earlier_candidates` names them.

    Args:
        texts: words of each.
    """
    numbers: defaultdict[tuple[str, ...], int] = defaultdict()
    numbers.default_factory = numbers.__len__  # a new run gets the next number
    runs = [frozenset(numbers[run] for run in shingles(words)) for words in texts]
    originals: dict[frozenset[int], int] = {}
    found = {i: (originals[r], 1.0) for i, r in enumerate(runs) if originals.setdefault(r, i) != i}
    firsts = [i for i in originals.values() if runs[i]]
    for i, others in earlier_candidates({i: runs[i] for i in firsts}).items():
        shared = {other: len(runs[i] & runs[other]) for other in others}
        similar = {o: n / (len(runs[o]) + len(runs[i]) - n) for o, n in shared.items()}
        best = max(similar, key=lambda o: (similar[o], -o), default=None)
        if best is not None and similar[best] >= NEAR:
            found[i] = (best, similar[best])
    return found


def earlier_candidates(runs: Mapping[int, frozenset[int]]) -> dict[int, set[int]]:
    """Return for each set the earlier ones that may be as similar as `NEAR`; none is missed.

    Such sets share at least `NEAR` of the runs of either, so that of all but one fewer of them,
    taken from one order, at least one is common (Chaudhuri, Ganti and Kaushik 2006, prefix
    filter). The order is from rare to frequent: a menu that all pages share comes last, and names
    no candidates unless it is most of a page.

    Args:
        runs: sets, each different from the others, in order.
    """
    frequency = Counter(run for own in runs.values() for run in own)
    holders: dict[int, list[int]] = defaultdict(list)
    found: dict[int, set[int]] = {}
    for i, own in runs.items():
        size = len(own)
        prefix = sorted(own, key=lambda run: (frequency[run], run))[: size - int(NEAR * size) + 1]
        near = set().union(*(holders[run] for run in prefix))
        sizes = {o: len(runs[o]) for o in near}
        found[i] = {o for o, n in sizes.items() if min(size, n) / max(size, n) >= NEAR}
        for run in prefix:
            holders[run].append(i)
    return found


def shingles(words: Sequence[str]) -> set[tuple[str, ...]]:
    """Return the different runs of five words, without case; a shorter text is one run."""
    folded = [word.casefold() for word in words]
    if not folded:
        return set()
    size = min(WORDS_PER_SHINGLE, len(folded))
    return {tuple(folded[i : i + size]) for i in range(len(folded) - size + 1)}


def shown_report(report: PageReport) -> str:
    """Return what a page says of itself, then its findings with their evidence, as lines."""
    facts, words = report.facts, report.facts["keywords"]
    scores, held = facts["readability"], facts["structured_data"]
    reading = f"no score: {scores.get('why')}"
    if scores["reading_ease"] is not None:
        ease, grade = scores["reading_ease"], scores["grade"]
        reading = f"Flesch reading ease {ease:.1f}, Flesch-Kincaid grade {grade:.1f}"
        reading += f" ({scores['why']})" if "why" in scores else ""
    kinds = {kind: sorted({name.rpartition("/")[2] for name in held[kind]} - {""}) for kind in held}
    rows = [
        *((n, f"{facts[n]} ({facts[f'{n}_length']} characters)") for n in SNIPPETS if facts[n]),
        ("canonical", facts["canonical"] or "–"),
        ("robots", "; ".join(f"{k}: {v}" for k, v in facts["robots"].items()) or "–"),
        ("language", facts["language"] or "–"),
        ("encoding", facts.get("encoding_read", "–")),
        ("words", f"{facts['words']:,}"),
        ("headings", " ".join(f"h{level}" for level, _ in facts["headings"]) or "–"),
        ("images", ", ".join(f"{v} {k}" for k, v in facts["images"].items())),
        ("links", ", ".join(f"{v} {k}" for k, v in facts["links"].items() if v) or "–"),
        ("structured data", "; ".join(f"{k}: {', '.join(v)}" for k, v in kinds.items() if v)),
        ("readability", reading),
        *((w, ", ".join(f"{n} {v:.4g}" for n, v in counts.items())) for w, counts in words.items()),
    ]
    lines = [
        textwrap.fill(f"── {report.name}", WIDTH),
        *(_row(label, text or "–") for label, text in rows),
    ]
    number = len(report.findings)
    lines.append(f"{number} finding{'s' * (number != 1)}")
    for finding in report.findings:
        lines.append(_row(finding.check, finding.rule))
        lines += [_row("", text) for text in (finding.evidence, finding.place) if text]
    return "\n".join([*lines, ""])


def shown_site(name: str, reports: Sequence[PageReport]) -> str:
    """Return how many pages of a site break which rules, most first, and where keywords stand."""
    sound = sum(not report.findings for report in reports)
    words = sum(report.facts["words"] for report in reports) / len(reports)
    lines = [
        textwrap.fill(f"── {name}: {len(reports):,} pages", WIDTH),
        f"{sound:,} without a finding; {words:,.0f} words in the mean",
    ]
    pages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in reports:
        for rule in dict.fromkeys((f.check, _general(f)) for f in report.findings):
            pages[rule].append(report.name)
    for (check, general), names in sorted(pages.items(), key=lambda item: -len(item[1])):
        lines.append(_row(check, f"{len(names):,} x {general} ({names[0]})"))
    for keyword in reports[0].facts["keywords"]:
        best = max(reports, key=lambda report: report.facts["keywords"][keyword]["bm25"])
        score = best.facts["keywords"][keyword]["bm25"]
        lines.append(_row(keyword, f"BM25 {score:.2f} on {best.name}" if score else "on no page"))
    return "\n".join([*lines, ""])


def _general(finding: PageFinding) -> str:
    """Return a rule without the numbers of a page and the name of another."""
    what, _, rule = finding.rule.partition("; ")
    rule = rule if rule and what[:1].isdigit() else what
    if finding.check == "duplicates":
        rule = re.sub(r" (as|that of) .*", r" \1 another page", rule)
    return re.sub(r"^\d[\d,.]* %", "much", rule)


def _row(label: str, text: str) -> str:
    """Return a label and a text beside it, in 80 columns."""
    indent = " " * (LABEL + 1)
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<{LABEL}} ", subsequent_indent=indent)


def write_tables(path: Path, sites: Mapping[str, Sequence[PageReport]]) -> list[Path]:
    """Write a row per page, and beside it a row per finding; return both paths."""
    pages: list[dict[str, Any]] = []
    findings: list[dict[str, Any]] = []
    for site, reports in sites.items():
        for report in reports:
            place = {"site": site, "page": report.name}
            numbers = {"address": report.address, "findings": len(report.findings)}
            pages.append({**place, **numbers, **dict(_cells(report.facts))})
            findings += [{**place, **finding._asdict()} for finding in report.findings]
    paths = [path, path.with_name(f"{path.stem}-findings{path.suffix}")]
    heads = [list(dict.fromkeys(name for row in pages for name in row))]
    heads.append(["site", "page", *PageFinding._fields])
    for target, rows, names in zip(paths, (pages, findings), heads, strict=True):
        with new_table(target, overwrite=True) as table:
            columns = {name: [row.get(name) for row in rows] for name in names}
            table.write(pa.RecordBatch.from_pydict(columns))
    return paths


def _cells(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield facts as cells of a table; of a list its length."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _cells(value, f"{before}{name}_")
        else:
            yield before + name, len(value) if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports of pages and a summary of each site; return 1 where one cannot be read."""
    parser = argparse.ArgumentParser(
        "python -m lit_models.seo.onpage",
        description="Check pages: what they say of themselves, and which rules they break. Files "
        "are taken as one site, each folder as another.",
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE_OR_FOLDER")
    for name, text in (
        ("address", "address of each page or folder, in their order: links are seen from there"),
        ("keyword", "words to count; repeat it for more"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], help=text)
    parser.add_argument("--language", help="of the texts, such as en; else as each page declares")
    parser.add_argument("--json", action="store_true", help="print plain values for programs")
    parser.add_argument(
        "--csv",
        type=Path,
        help="table with a row per page, written again; a second one, with -findings in its name, "
        "has a row per finding. A folder makes onpage.csv",
    )
    options = parser.parse_args(arguments)
    has_folder = any(path.is_dir() for path in options.pages)
    table = options.csv or (Path("onpage.csv") if has_folder and not options.json else None)
    try:
        sites = {
            name: check_site(pages, options.keyword, options.language)
            for name, pages in _sites(options.pages, options.address)
        }
        tables = [] if table is None else write_tables(table, sites)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        every = [report.to_dict() for reports in sites.values() for report in reports]
        print(json.dumps(every, ensure_ascii=False, indent=2))
        return 0
    for name, reports in sites.items():
        if name == NAMED:
            print("\n".join(map(shown_report, reports)))
        if name != NAMED or len(reports) > 1:
            print(shown_site(name, reports))
    if tables:
        print(f"each page in {tables[0]}, each finding in {tables[1]}")
    return 0


def _sites(paths: Sequence[Path], addresses: Sequence[str]) -> Iterator[tuple[str, Iterator[Page]]]:
    """Yield the name of each site and its pages, read one by one."""
    if addresses and len(addresses) != len(paths):
        raise ValueError(
            f"--address must be given once for each page: {len(paths)} pages, {len(addresses)} "
            "addresses; repeat it in the order of the pages, or leave it out."
        )
    for wrong in addresses:
        if not is_address(wrong):
            raise ValueError(
                f'the address "{wrong}" is none of a page; write it whole, such as '
                "https://example.org/page."
            )
    known: Sequence[str | None] = addresses or [None] * len(paths)
    given = list(zip(paths, known, strict=True))
    files = [(path, address) for path, address in given if not path.is_dir()]
    for path, _ in files:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; name a file of HTML, or a folder.")
    if files:
        yield NAMED, (page_of_bytes(p.read_bytes(), str(p), address) for p, address in files)
    for folder, address in given:
        if folder.is_dir():
            yield str(folder), pages_of(folder, address)


def pages_of(folder: Path, address: str | None = None) -> Iterator[Page]:
    """Yield the pages in a folder and below it, sorted, named by their paths in it.

    Args:
        folder: of a site.
        address: of the folder on the web, if that is known.

    Raises:
        FileNotFoundError: it holds no page, or a link that leads nowhere.
    """
    for path in files_in(folder, SUFFIXES, "the site"):
        name = path.relative_to(folder).as_posix()
        own = None if address is None else urljoin(address.rstrip("/") + "/", quote(name))
        yield page_of_bytes(path.read_bytes(), name, own)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
