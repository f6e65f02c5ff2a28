"""On-page checks: what pages say of themselves and which rules they break; see onpage.md.

`python -m lit_models.seo.onpage page.html FOLDER …`. No model and no network.
"""

import argparse
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from datamodules.text.terms import words_of
from lit_models.errors import run_guarded

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

SUFFIXES = (".html", ".htm", ".xhtml")
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*|[xi](?:-[A-Za-z0-9]{1,8})+")
LINK_KINDS = ("internal", "external", "fragment", "other", "unknown")
LONGEST_TITLE = 60  # characters
SHORTEST_DESCRIPTION, LONGEST_DESCRIPTION = 70, 160
LONGEST_EVIDENCE, LONGEST_ADDRESS = 200, 8192
LONGEST_HEADING = 1000  # characters that are kept of a heading
MOST_FINDINGS = 20  # of one check, with their places
NAMED_BY = ", ".join(  # an element that stands for a text
    f'[{name}]:not([{name}=""])' for name in ("aria-label", "aria-labelledby", "title", "alt")
)
FIRST_WORDS = 100  # in which keywords are counted
WIDTH, LABEL = 80, 17
NAMED = "the pages named"


class PageFinding(NamedTuple):
    """Something that breaks a rule, with its evidence.

    Args:
        check: what was looked at, such as "title".
        rule: what is wrong and what the rule is, the same words on every page.
        evidence: the text or the element, shortened; "" where something is missing.
        place: path of the element in the tree, or where else it is.
    """

    check: str
    rule: str
    evidence: str = ""
    place: str = ""


class Defect(NamedTuple):
    """A rule that an element breaks, and what shows it; else the opening tag."""

    rule: str
    element: "LexborNode | None" = None
    evidence: str | None = None


@dataclass
class Page:
    """A page: its name in findings, its source, its address where that is known, and what reading
    its bytes has shown."""

    name: str
    html: str
    address: str | None = None
    findings: list[PageFinding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass
class PageReport:
    """What a page says of itself: plain values by name, findings, and the words of its visible
    text."""

    name: str
    address: str | None
    facts: dict[str, Any]
    findings: list[PageFinding]
    words: list[str]

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
    bad, expected = first_bad_byte(content), found.mark or found.declared_name
    if found.mark == "utf-16" or content.isascii():
        pass
    elif bad is not None and expected == "utf-8":
        rule = "UTF-8 is declared and the bytes are not UTF-8; save the page as UTF-8"
        evidence = repr(content[bad : bad + 4])
        findings.append(PageFinding("encoding", rule, evidence, f"byte {bad}"))
    elif bad is None and expected not in (None, "utf-8"):
        rule = f"{expected} is declared and the bytes are UTF-8: letters appear garbled"
        place = next(i for i, byte in enumerate(content) if byte > 127)
        evidence = content[place:].decode("utf-8", "replace")[:1]
        findings.append(PageFinding("encoding", rule, evidence, f"byte {place}"))
    elif expected is None:
        rule = "no encoding is declared and the page has letters beyond ASCII; declare utf-8"
        findings.append(PageFinding("encoding", rule, "", f"first {DECLARED_WITHIN} bytes"))
    facts = {"encoding_declared": expected, "encoding_read": found.read}
    return Page(name, decoded_html(content), address, findings, facts)


def check_page(page: Page, keywords: Sequence[str] = ()) -> PageReport:
    """Return the report of one page.

    Args:
        page: to check.
        keywords: to count; None are guessed.

    Raises:
        ValueError: a keyword has no word.
    """
    from selectolax.lexbor import LexborHTMLParser

    facts, findings = dict(page.facts), list(page.findings)
    html, num_changed = flattened(page.html)
    tree = LexborHTMLParser(html)
    if num_changed:
        rule = "elements nest too deep, or have too many attributes, to be read as they stand"
        findings.append(PageFinding("page", rule, f"{num_changed:,} tags"))
    for check in CHECKS:
        values, defects = check(page, tree)
        facts |= values
        name = check.__name__.strip("_").replace("_", " ")
        for rule, element, evidence in defects[:MOST_FINDINGS]:
            text = evidence if evidence is not None or element is None else opening(element)
            findings.append(PageFinding(name, rule, shown(text), place_of(element)))
        if len(defects) > MOST_FINDINGS:
            more = f"{len(defects) - MOST_FINDINGS:,}"
            findings.append(PageFinding(name, "more of these", more))
    lines = visible_lines(tree)
    words = words_of("\n".join(lines))
    facts["words"] = len(words)
    places = {
        "title": [facts["title"] or ""],
        "headings": [text for _, text in facts["headings"]],
        "first_words": [" ".join(words[:FIRST_WORDS])],
        "text": lines,
        "address": [re.sub("[_-]", " ", unquote(urlsplit(page.address or "").path))],
    }
    facts["keywords"] = {word: keyword_counts(word, places) for word in keywords}
    return PageReport(page.name, page.address, facts, findings, words)


def check_site(pages: Iterable[Page], keywords: Sequence[str] = ()) -> list[PageReport]:
    """Return the reports of pages that belong together, with what repeats among them. Arguments and
    errors as `check_page`."""
    reports = [check_page(page, keywords) for page in pages]
    for name in ("title", "description", "text"):
        first: dict[str, int] = {}
        for i, report in enumerate(reports):
            text = " ".join(report.words) if name == "text" else report.facts[name] or ""
            original = first.setdefault(" ".join(text.casefold().split()), i)
            if text and original != i:
                rule = f"the same {name} as another page"
                evidence = shown(f"{reports[original].name}: {text}")
                report.findings.append(PageFinding("duplicates", rule, evidence))
    return reports


Checked = tuple[dict[str, Any], list[Defect]]


def _title(page: Page, tree: "LexborHTMLParser") -> Checked:
    titles = [e for e in tree.css("title") if not _is_inside(e, "svg")]
    texts = [_line(element) for element in titles]
    defects = _said_once("<title>", titles, texts, tree)
    text = texts[0] if texts else None
    if text and len(text) > LONGEST_TITLE:
        rule = f"longer than {LONGEST_TITLE} characters; results cut it"
        defects.append(Defect(rule, titles[0], f"{len(text)}: {text}"))
    return {"title": text, "title_length": len(text or "")}, defects


def _description(page: Page, tree: "LexborHTMLParser") -> Checked:
    elements = _meta(tree, "description")
    texts = [" ".join(_value(element, "content").split()) for element in elements]
    defects = _said_once("meta description", elements, texts, tree)
    text = texts[0] if texts else None
    if text and not SHORTEST_DESCRIPTION <= len(text) <= LONGEST_DESCRIPTION:
        rule = f"{SHORTEST_DESCRIPTION} to {LONGEST_DESCRIPTION} characters are shown whole and "
        rule += "say enough"
        defects.append(Defect(rule, elements[0], f"{len(text)}: {text}"))
    return {"description": text, "description_length": len(text or "")}, defects


def _canonical(page: Page, tree: "LexborHTMLParser") -> Checked:
    elements = [e for e in tree.css("link[rel]") if "canonical" in _value(e, "rel").lower().split()]
    links = [_value(element, "href") for element in elements]
    defects = []
    for element, link in zip(elements, links, strict=True):
        if not link:
            defects.append(Defect("the canonical link names no address", element))
        elif (target := _split(link)) is None:
            defects.append(Defect("the canonical address cannot be read", element))
        elif not target.scheme:
            rule = "the canonical address is relative; write it whole, with https://"
            defects.append(Defect(rule, element))
        elif _is_inside(element, "body"):
            rule = "the canonical link stands in the body, where search engines ignore it"
            defects.append(Defect(rule, element))
    if len(set(links)) > 1:
        evidence = ", ".join(links[:MOST_FINDINGS])
        defects.append(
            Defect("the canonical links name different addresses", elements[1], evidence)
        )
    first = links[0] if links and _split(links[0]) is not None else ""
    return {"canonical": _joined(page.address or "", first) if first else None}, defects


def _robots(page: Page, tree: "LexborHTMLParser") -> Checked:
    """Return what the page tells robots; noindex is a finding, since it may be a mistake."""
    told, defects = {}, []
    for name in ("robots", "googlebot", "bingbot"):
        elements = _meta(tree, name)
        contents = [_value(element, "content").lower() for element in elements]
        if any(contents):
            told[name] = ", ".join(filter(None, contents))
        for element, content in zip(elements, contents, strict=True):
            if {"noindex", "none"} & set(re.split(r"[\s,]+", content)):
                defects.append(Defect("the page asks not to be listed in results", element))
    return {"robots": told}, defects


def _language(page: Page, tree: "LexborHTMLParser") -> Checked:
    root = tree.css_first("html")
    code = "" if root is None else _value(root, "lang")
    if not code:
        return {"language": None}, [Defect('no language is declared; write <html lang="en">', root)]
    if not LANGUAGE.fullmatch(code):
        rule = "the language is no code such as en or pt-BR"
        return {"language": None}, [Defect(rule, root, code)]
    return {"language": code}, []


def _headings(page: Page, tree: "LexborHTMLParser") -> Checked:
    """Return level and text of all headings in order, and where the order breaks."""
    elements = tree.css("h1, h2, h3, h4, h5, h6")
    listed = [(int((e.tag or "h1")[1]), _line(e)[:LONGEST_HEADING]) for e in elements]
    defects = [] if elements else [Defect("there is no heading")]
    before, num_tops = 0, 0
    for element, (level, text) in zip(elements, listed, strict=True):
        if before and level > before + 1:
            rule = "levels are skipped"
            defects.append(Defect(rule, element, f"h{level} after h{before}: {text}"))
        if not text and not _is_named(element):
            defects.append(Defect("an empty heading", element))
        num_tops += level == 1
        if level == 1 and num_tops > 1:
            defects.append(Defect("another h1; one names the page", element, text))
        before = level
    if elements and not num_tops:
        defects.append(Defect("there is no h1", elements[0], listed[0][1]))
    return {"headings": listed}, defects


def _images(page: Page, tree: "LexborHTMLParser") -> Checked:
    """Return how many images have an alternative text, an empty one (decoration), or none."""
    counts = {"described": 0, "decorative": 0, "without": 0}
    defects = []
    for element in tree.css('img, area[href], input[type="image" i]'):
        is_labelled = _value(element, "aria-label") or _value(element, "aria-labelledby")
        if "alt" not in element.attributes and not is_labelled:
            counts["without"] += 1
            rule = 'no alternative text; describe it, or write alt="" where it decorates'
            defects.append(Defect(rule, element))
        else:
            is_empty = "alt" in element.attributes and not _value(element, "alt")
            counts["decorative" if is_empty else "described"] += 1
    return {"images": counts}, defects


def _links(page: Page, tree: "LexborHTMLParser") -> Checked:
    """Return how many links go where, and those that say nothing.

    Internal is the page's own host, with or without www; an address of a host counts as `unknown`
    where the page's own address is not known.
    """
    base = tree.css_first("base[href]")
    start = _joined(page.address or "", "" if base is None else _value(base, "href"))
    counts, defects = dict.fromkeys(LINK_KINDS, 0), []
    for element in tree.css("a[href]"):
        link = _value(element, "href")
        if _split(link) is None:
            defects.append(Defect("the address cannot be read", element, link))
            continue
        counts[_kind(link, start)] += 1
        has_text = element.text(deep=False).strip() or element.text(deep=True).strip()
        if not has_text and not _is_named(element):
            defects.append(Defect("a link without a text says nothing of its target", element))
    return {"links": counts}, defects


def _structured_data(page: Page, tree: "LexborHTMLParser") -> Checked:
    """Return which kinds of structured data there are, with their types."""
    types: list[str] = []
    defects = []
    for element in tree.css('script[type="application/ld+json" i]'):
        text = element.text(deep=True)
        try:
            types += _types(json.loads(text))
        except (ValueError, RecursionError) as error:  # Python refuses numbers of 5,000 digits
            rule = "JSON-LD that is no JSON: nobody can read it"
            defects.append(Defect(rule, element, f"{error}: {text}"))
    held = {
        "json_ld": types,
        "microdata": [_value(element, "itemtype") for element in tree.css("[itemscope]")],
        "rdfa": [_value(element, "typeof") for element in tree.css("[typeof]")],
        "open_graph": [_value(e, "property") for e in tree.css('meta[property^="og:"]')],
    }
    return {"structured_data": held}, defects


CHECKS: tuple[Callable[[Page, "LexborHTMLParser"], Checked], ...] = (
    *(_title, _description, _canonical, _robots, _language),
    *(_headings, _images, _links, _structured_data),
)


def _value(element: "LexborNode", name: str) -> str:
    """Return an attribute without spaces around it; "" where there is none."""
    return (element.attributes.get(name) or "").strip()


def _line(element: "LexborNode") -> str:
    return " ".join(element.text(deep=True).split())


def _is_named(element: "LexborNode") -> bool:
    """Whether attributes of an element or below it stand for a text."""
    return element.css_first(NAMED_BY) is not None


def _is_inside(element: "LexborNode", tag: str) -> bool:
    at = element.parent
    while at is not None and at.tag != tag:
        at = at.parent
    return at is not None


def _meta(tree: "LexborHTMLParser", name: str) -> list["LexborNode"]:
    return tree.css(f'meta[name="{name}" i]')


def _said_once(
    what: str, elements: list["LexborNode"], texts: list[str], tree: "LexborHTMLParser"
) -> list[Defect]:
    """Return defects where something is missing, empty, or there more than once."""
    if not elements:
        return [Defect(f"there is no {what}", tree.head, "")]
    defects = [] if texts[0] else [Defect(f"the {what} is empty", elements[0])]
    others = zip(elements[1:], texts[1:], strict=True)
    return defects + [Defect(f"another {what}; one counts", e, text) for e, text in others]


def opening(element: "LexborNode") -> str:
    """Return the opening tag of an element."""
    pairs = (k if v is None else f'{k}="{v}"' for k, v in element.attributes.items())
    return f"<{' '.join([element.tag or '', *pairs])}>"


def place_of(element: "LexborNode | None") -> str:
    """Return where an element stands in the tree, as a selector: `body > p:nth-of-type(2)`."""
    steps: list[str] = []
    at = element
    while at is not None and at.tag not in ("html", "-document"):
        number, before = 1, at.prev
        while before is not None:
            number += before.tag == at.tag
            before = before.prev
        steps.append(
            at.tag or "" if at.tag in ("head", "body") else f"{at.tag}:nth-of-type({number})"
        )
        at = at.parent
    return " > ".join(reversed(steps)) or ("" if element is None else "html")


def shown(text: str | None) -> str:
    """Return a text as evidence: on one line, and not too long."""
    line = " ".join((text or "").split())
    return line if len(line) <= LONGEST_EVIDENCE else line[: LONGEST_EVIDENCE - 1] + "…"


def _split(address: str) -> Any:
    """Return the parts of an address; None where it cannot be read or is too long for any."""
    try:
        return urlsplit(address) if len(address) <= LONGEST_ADDRESS else None
    except ValueError:  # such as http://[
        return None


def _joined(start: str, link: str) -> str:
    """Return an address seen from another; where it cannot be read, that other one."""
    return start if _split(link) is None else urljoin(start, link)


def _kind(link: str, start: str) -> str:
    if link.startswith("#") or not link:
        return "fragment"
    target, own = (urlsplit(address) for address in (_joined(start, link), start))
    if target.scheme not in ("", "http", "https"):
        return "other"
    if target.netloc and not own.netloc:
        return "unknown"
    hosts = {p.netloc.lower().rpartition("@")[2].removeprefix("www.") for p in (target, own)}
    return "external" if target.netloc and len(hosts) > 1 else "internal"


def _types(value: Any) -> Iterator[str]:
    """Yield every @type of JSON-LD, nested ones too; one that is no text names no type."""
    if isinstance(value, list):
        for inner in value:
            yield from _types(inner)
    elif isinstance(value, dict):
        own = value.get("@type")
        yield from (n for n in (own if isinstance(own, list) else [own]) if isinstance(n, str))
        for inner in value.values():
            yield from _types(inner)


def keyword_counts(keyword: str, places: Mapping[str, Iterable[str]]) -> dict[str, int]:
    """Return how often the words of a keyword follow each other in each part of a page.

    Case does not matter; word forms do: "cat" is not found in "cats".

    Args:
        keyword: one or more words.
        places: part of the page -> its lines; a phrase does not go over their ends.

    Raises:
        ValueError: the keyword has no word.
    """

    def marked(text: str) -> str:
        # A line break cannot stand in a word, so that whole words alone are equal; those beside
        # each other share none.
        return "".join(f"\n{word.casefold()}\n" for word in words_of(text))

    wanted = marked(keyword)
    if not wanted:
        raise ValueError(f'the keyword "{keyword}" has no word; give one such as "apple pie".')
    return {
        name: sum(marked(line).count(wanted) for line in lines) for name, lines in places.items()
    }


def shown_report(report: PageReport) -> str:
    """Return what a page says of itself, then its findings with their evidence, as lines."""
    number = len(report.findings)
    lines = [textwrap.fill(f"── {report.name}", WIDTH)]
    for name, fact in report.facts.items():
        if name == "headings":
            fact = " ".join(f"h{level}" for level, _ in fact)
        for label, value in (fact if name == "keywords" else {name: fact}).items():
            lines.append(_row(label.replace("_", " "), _in_words(value) or "–"))
    lines.append(f"{number} finding{'s' * (number != 1)}")
    for finding in report.findings:
        lines.append(_row(finding.check, finding.rule))
        lines += [_row("", text) for text in (finding.evidence, finding.place) if text]
    return "\n".join([*lines, ""])


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(v)}" for name, v in value.items() if v)
    return " ".join(sorted(set(value))) if isinstance(value, list) else str(value or "")


def shown_site(name: str, reports: Sequence[PageReport]) -> str:
    """Return how many pages of a site break which rules, most first."""
    sound = sum(not report.findings for report in reports)
    words = sum(report.facts["words"] for report in reports) / len(reports)
    pages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in reports:
        for rule in dict.fromkeys((f.check, f.rule) for f in report.findings):
            pages[rule].append(report.name)
    lines = [
        textwrap.fill(f"── {name}: {len(reports):,} pages", WIDTH),
        f"{sound:,} without a finding; {words:,.0f} words in the mean",
    ]
    for (check, broken), names in sorted(pages.items(), key=lambda item: -len(item[1])):
        lines.append(_row(check, f"{len(names):,} x {broken} ({names[0]})"))
    return "\n".join([*lines, ""])


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
            name: check_site(pages, options.keyword)
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
    """Yield the name of each site and its pages, read one by one and named by their paths in it."""
    if addresses and len(addresses) != len(paths):
        raise ValueError(
            f"--address must be given once for each page: {len(paths)} pages, {len(addresses)} "
            "addresses; repeat it in the order of the pages, or leave it out."
        )
    for wrong in addresses:
        parts = _split(wrong)
        if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
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
            yield str(folder), _pages_of(folder, address)


def _pages_of(folder: Path, address: str | None) -> Iterator[Page]:
    for path in files_in(folder, SUFFIXES, "the site"):
        name = path.relative_to(folder).as_posix()
        own = None if address is None else urljoin(address.rstrip("/") + "/", quote(name))
        yield page_of_bytes(path.read_bytes(), name, own)


if __name__ == "__main__":
    sys.exit(run_guarded(main))
