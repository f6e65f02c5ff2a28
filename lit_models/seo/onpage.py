"""On-page checks of HTML: facts about pages and the rules that they break; see onpage.md.

`python -m lit_models.seo.onpage page.html FOLDER …`. No model and no network access.
"""

import argparse
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

import pyarrow as pa

from datamodules.files.documents import (
    decoded_html,
    files_in,
    html_encoding,
    line_of,
    page_bytes,
    parsed,
    visible_lines,
)
from datamodules.files.tables import first_bad_byte, write_batches
from datamodules.search.cleaning import library
from datamodules.search.formats import HTML_SUFFIXES
from datamodules.text.encoding import sentences_of, words_of
from lit_models.errors import run_guarded

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*|[xi](?:-[A-Za-z0-9]{1,8})+")
LIMITS = {"title": (1, 60), "description": (70, 160)}  # characters
CANONICAL = 'link[rel~="canonical" i]'
ROBOTS = ", ".join(f'meta[name="{name}" i]' for name in ("robots", "googlebot", "bingbot"))
LONGEST_EVIDENCE, LONGEST_ADDRESS, LONGEST_HEADING = 200, 8192, 1000  # characters
MOST_FINDINGS = 20  # listed per check
NAMED_BY = ", ".join(  # attributes that can replace the text of an element or of one inside it
    f'[{name}]:not([{name}=""])' for name in ("aria-label", "aria-labelledby", "title", "alt")
)
WIDTH, LABEL = 80, 17
FLESCH = {  # base, per word of a sentence, per syllable of a word
    "en": (206.835, 1.015, 84.6),  # Flesch 1948
    "de": (180.0, 1.0, 58.5),  # Amstad 1978
    "fr": (207.0, 1.015, 73.6),  # Kandel & Moles 1958
    "es": (206.84, 1.02, 60.0),  # Fernández Huerta 1959
    "it": (217.0, 1.3, 60.0),  # Franchina & Vacca 1972
    "nl": (206.84, 0.93, 77.0),  # Douma 1960
}


class PageFinding(NamedTuple):
    """A broken rule.

    Args:
        check: name of the check, such as "title".
        rule: what is wrong and what the rule is, in the same words on every page.
        evidence: the text or the element, shortened; "" if something is missing.
        place: path of the element in the tree.
    """

    check: str
    rule: str
    evidence: str = ""
    place: str = ""


@dataclass
class PageReport:
    """Report of one page: facts (name -> plain value), findings, words of the visible text."""

    name: str
    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[PageFinding] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def add(
        self,
        check: str,
        rule: str,
        element: "LexborNode | None" = None,
        evidence: str | None = None,
    ) -> None:
        """Add a finding; the default evidence is the element's opening tag."""
        number = sum(finding.check == check for finding in self.findings)
        if number == MOST_FINDINGS:
            self.findings.append(PageFinding(check, "more of these"))
        if number < MOST_FINDINGS:
            if evidence is None and element is not None:
                pairs = (k if v is None else f'{k}="{v}"' for k, v in element.attributes.items())
                evidence = f"<{' '.join([element.tag or '', *pairs])}>"
            line = " ".join((evidence or "").split())
            if len(line) > LONGEST_EVIDENCE:
                line = line[: LONGEST_EVIDENCE - 1] + "…"
            self.findings.append(PageFinding(check, rule, line, _place(element)))


def check_page(content: bytes, name: str, with_ease: bool = False) -> PageReport:
    """Return the report of one page.

    Args:
        content: of the file; a wrong encoding is a finding, not an error.
        with_ease: include the `reading_ease`.
    """
    report = PageReport(name)
    if not content.strip():
        report.add("page", "the file is empty")
    _check_encoding(report, content)
    tree = parsed(decoded_html(content))
    for check in (_check_texts, _check_head, _check_headings, _check_images, _check_links):
        check(report, tree)
    _check_structured_data(report, tree)
    report.words = words_of("\n".join(lines := visible_lines(tree.body)))
    report.facts["words"] = len(report.words)
    if with_ease:
        report.facts["reading_ease"] = reading_ease(lines, report.facts["language"])
    return report


def reading_ease(lines: list[str], language: str | None) -> float | None:
    """Return the Flesch reading ease, adapted to the language: about 30 is hard, 60 plain, 90 easy;
    `None` for unsupported languages and without words.

    Syllables are counted by pyphen's hyphenation points.
    """
    code = (language or "").lower().replace("_", "-").partition("-")[0]
    words, sentences = words_of("\n".join(lines)), sentences_of(lines)
    if code not in FLESCH or not words:
        return None
    pyphen = library("pyphen")
    hyphens = pyphen.Pyphen(lang=pyphen.language_fallback(code))
    syllables = sum(1 + len(hyphens.positions(word)) for word in words)
    base, of_sentence, of_word = FLESCH[code]
    mean_words, mean_syllables = len(words) / len(sentences), syllables / len(words)
    return round(base - of_sentence * mean_words - of_word * mean_syllables, 1)


def check_site(pages: Iterable[tuple[str, bytes]], with_ease: bool = False) -> list[PageReport]:
    """Return the reports of the pages (name, content) of a site, with findings for duplicate
    titles, descriptions and texts."""
    reports = [check_page(content, name, with_ease) for name, content in pages]
    for name in ("title", "description", "text"):
        first: dict[str, PageReport] = {}
        for report in reports:
            text = " ".join(report.words) if name == "text" else report.facts[name] or ""
            original = first.setdefault(" ".join(text.casefold().split()), report)
            if text and original is not report:
                evidence = f"{original.name}: {text}"
                report.add("duplicates", f"the same {name} as another page", evidence=evidence)
    return reports


def _check_encoding(report: PageReport, content: bytes) -> None:
    encoding, is_utf8 = html_encoding(content), first_bad_byte(content) is None
    expected = encoding.mark or encoding.declared_name
    report.facts |= {"encoding_declared": expected, "encoding_read": encoding.read}
    if encoding.declared is not None and encoding.declared_name is None:
        rule = "the declared encoding is not known; declare utf-8"
        report.add("encoding", rule, evidence=encoding.declared)
    elif expected is None and not content.isascii():
        rule = "no encoding is declared and the page has letters beyond ASCII; declare utf-8"
        report.add("encoding", rule)
    elif encoding.mark == "utf-16" or content.isascii():
        return
    elif (expected == "utf-8") != is_utf8:
        are = "are not" if expected == "utf-8" else "are"
        rule = f"{expected} is declared and the bytes {are} UTF-8: letters appear garbled"
        report.add("encoding", rule)


def _check_texts(report: PageReport, tree: "LexborHTMLParser") -> None:
    """Title and description: exactly one, neither empty nor too short or long."""
    titles = [(e, line_of(e)) for e in tree.css("title:not(svg *)")]
    metas = tree.css('meta[name="description" i]')
    descriptions = [(e, " ".join(_value(e, "content").split())) for e in metas]
    kinds = ("title", "<title>", titles), ("description", "meta description", descriptions)
    for name, what, pairs in kinds:
        element, text = pairs[0] if pairs else (tree.head, None)
        report.facts |= {name: text, f"{name}_length": len(text or "")}
        shortest, longest = LIMITS[name]
        if text is None:
            report.add(name, f"there is no {what}", element, "")
        elif not text:
            report.add(name, f"the {what} is empty", element)
        elif not shortest <= len(text) <= longest:
            rule = f"{shortest} to {longest} characters are shown whole and say enough"
            report.add(name, rule, element, f"{len(text)}: {text}")
        for element, text in pairs[1:]:
            report.add(name, f"another {what}; one counts", element, text)


def _check_head(report: PageReport, tree: "LexborHTMLParser") -> None:
    """Canonical address, robots (noindex is a finding, as it may be a mistake), language."""
    elements = tree.css(CANONICAL)
    links = [_value(element, "href") for element in elements]
    targets = [_address(link) if link else None for link in links]
    in_body = {element.mem_id for element in tree.css(f"body {CANONICAL}")}
    for element, target in zip(elements, targets, strict=True):
        if target is None:
            report.add("canonical", "the canonical link has no address that can be read", element)
        elif not target.scheme:
            rule = "the canonical address is relative; write it whole, with https://"
            report.add("canonical", rule, element)
        if element.mem_id in in_body:
            rule = "the canonical link stands in the body, where search engines ignore it"
            report.add("canonical", rule, element)
    if len(set(links)) > 1:
        rule = "the canonical links name different addresses"
        report.add("canonical", rule, elements[1], ", ".join(links[:MOST_FINDINGS]))
    report.facts["canonical"] = links[0] if links and targets[0] is not None else None
    robots = defaultdict(list)
    for element in tree.css(ROBOTS):
        content = _value(element, "content").lower()
        robots[_value(element, "name").lower()].append(content)
        if {"noindex", "none"} & set(re.split(r"[\s,]+", content)):
            report.add("robots", "the page asks not to be listed in results", element)
    report.facts["robots"] = {name: ", ".join(filter(None, robots[name])) for name in robots}
    root = tree.css_first("html")
    code = "" if root is None else _value(root, "lang")
    is_code = LANGUAGE.fullmatch(code) is not None
    report.facts["language"] = code if is_code else None
    if not is_code:
        rule = 'no language is declared by a code such as en or pt-BR; write <html lang="en">'
        report.add("language", rule, root, code or None)


def _check_headings(report: PageReport, tree: "LexborHTMLParser") -> None:
    elements = tree.css("h1, h2, h3, h4, h5, h6")
    listed = [(int((e.tag or "h1")[1]), line_of(e)[:LONGEST_HEADING]) for e in elements]
    report.facts["headings"] = listed
    before, has_top = 6, False
    for element, (level, text) in zip(elements, listed, strict=True):
        if level > before + 1:
            evidence = f"h{level} after h{before}: {text}"
            report.add("headings", "levels are skipped", element, evidence)
        if not text and element.css_first(NAMED_BY) is None:
            report.add("headings", "an empty heading", element)
        if level == 1 and has_top:
            report.add("headings", "another h1; one names the page", element, text)
        before, has_top = level, has_top or level == 1
    if not elements:
        report.add("headings", "there is no heading")
    elif not has_top:
        report.add("headings", "there is no h1", elements[0], listed[0][1])


def _check_images(report: PageReport, tree: "LexborHTMLParser") -> None:
    """Images: with alternative text, with an empty one (decoration), or without."""
    counts = report.facts["images"] = {"described": 0, "decorative": 0, "without": 0}
    for element in tree.css('img, area[href], input[type="image" i]'):
        is_labelled = _value(element, "aria-label") or _value(element, "aria-labelledby")
        if "alt" in element.attributes or is_labelled:
            is_empty = "alt" in element.attributes and not _value(element, "alt")
            counts["decorative" if is_empty else "described"] += 1
        else:
            counts["without"] += 1
            rule = 'no alternative text; describe it, or write alt="" where it decorates'
            report.add("images", rule, element)


def _check_links(report: PageReport, tree: "LexborHTMLParser") -> None:
    """Links with an invalid address, and links without a text."""
    elements = tree.css("a[href]")
    report.facts["links"] = len(elements)
    for element in elements:
        link = _value(element, "href")
        if _address(link) is None:
            report.add("links", "the address cannot be read", element, link)
            continue
        has_text = element.text(deep=False).strip() or element.text(deep=True).strip()
        if not has_text and element.css_first(NAMED_BY) is None:
            report.add("links", "a link without a text says nothing of its target", element)


def _check_structured_data(report: PageReport, tree: "LexborHTMLParser") -> None:
    types: list[Any] = []

    def note(value: dict[str, Any]) -> None:
        own = value.get("@type")
        types.extend(own if isinstance(own, list) else [own])

    for element in tree.css('script[type^="application/ld+json" i]'):
        text = element.text(deep=True)
        try:
            json.loads(text, object_hook=note)
        except (ValueError, RecursionError) as error:  # Python refuses numbers of 5,000 digits
            rule = "JSON-LD that is no JSON: nobody can read it"
            report.add("structured data", rule, element, f"{error}: {text}")
    report.facts["structured_data"] = {
        "json_ld": sorted(name for name in types if isinstance(name, str)),
        "microdata": [_value(element, "itemtype") for element in tree.css("[itemscope]")],
        "rdfa": [_value(element, "typeof") for element in tree.css("[typeof]")],
        "open_graph": [_value(e, "property") for e in tree.css('meta[property^="og:"]')],
    }


def _value(element: "LexborNode", name: str) -> str:
    """Return a stripped attribute; "" if it is missing."""
    return (element.attributes.get(name) or "").strip()


def _place(element: "LexborNode | None") -> str:
    """Return the path of an element in the tree as a selector: `body > p:nth-of-type(2)`."""
    steps: list[str] = []
    at = element
    while at is not None and at.tag not in ("html", "-document"):
        number, before = 1, at.prev
        while before is not None:
            number += before.tag == at.tag
            before = before.prev
        is_part = at.tag in ("head", "body")
        steps.append(str(at.tag) if is_part else f"{at.tag}:nth-of-type({number})")
        at = at.parent
    return " > ".join(reversed(steps)) or ("" if element is None else "html")


def _address(link: str) -> SplitResult | None:
    """Return the parts of a link; `None` if it is invalid or too long."""
    try:
        return urlsplit(link) if len(link) <= LONGEST_ADDRESS else None
    except ValueError:  # such as http://[
        return None


def shown_report(report: PageReport) -> str:
    """Return a page's report as text: its facts, then its findings with their evidence."""
    lines = [textwrap.fill(f"── {report.name}", WIDTH)]
    for name, fact in report.facts.items():
        if name == "headings":
            fact = " ".join(f"h{level}" for level, _ in fact)
        lines.append(_row(name.replace("_", " "), _in_words(fact) or "–"))
    lines.append(f"{len(report.findings)} finding{'s' * (len(report.findings) != 1)}")
    for finding in report.findings:
        lines.append(_row(finding.check, finding.rule))
        lines += [_row("", text) for text in (finding.evidence, finding.place) if text]
    return "\n".join([*lines, ""])


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_in_words(v)}" for name, v in value.items() if v)
    return " ".join(sorted(set(value))) if isinstance(value, list) else str(value or "")


def shown_site(reports: Sequence[PageReport]) -> str:
    """Return a site's summary as text: broken rules and number of pages, most pages first."""
    sound = sum(not report.findings for report in reports)
    words = sum(report.facts["words"] for report in reports) / len(reports)
    pages: dict[tuple[str, str], list[str]] = defaultdict(list)
    for report in reports:
        for rule in dict.fromkeys((f.check, f.rule) for f in report.findings):
            pages[rule].append(report.name)
    lines = [f"── {len(reports):,} pages"]
    lines += [f"{sound:,} without a finding; {words:,.0f} words in the mean"]
    for (check, broken), names in sorted(pages.items(), key=lambda item: -len(item[1])):
        lines.append(_row(check, f"{len(names):,} x {broken} ({names[0]})"))
    return "\n".join([*lines, ""])


def _row(label: str, text: str) -> str:
    """Return a label and a text beside it, wrapped to 80 columns."""
    indent = " " * (LABEL + 1)
    return textwrap.fill(text, WIDTH, initial_indent=f"{label:<{LABEL}} ", subsequent_indent=indent)


def write_tables(path: Path, reports: Sequence[PageReport]) -> list[Path]:
    """Write one table with a row per page and one with a row per finding; return both paths."""
    pages = [
        {"page": one.name, "findings": len(one.findings), **dict(_cells(one.facts))}
        for one in reports
    ]
    findings = [
        {"page": one.name, **finding._asdict()} for one in reports for finding in one.findings
    ]
    paths = [path, path.with_name(re.sub(r"(\.\w+(\.gz)?)$", r"-findings\1", path.name))]
    heads = dict.fromkeys(name for row in pages for name in row), ("page", *PageFinding._fields)
    for target, rows, names in zip(paths, (pages, findings), heads, strict=True):
        columns = {name: [row.get(name) for row in rows] for name in names}
        write_batches(target, [pa.RecordBatch.from_pydict(columns)], way_out=None)
    return paths


def _cells(facts: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield facts as cells of a table; a list becomes its length."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from _cells(value, f"{before}{name}_")
        else:
            yield before + name, len(value) if isinstance(value, list) else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report of a page, or the summary of a site and write the tables of its pages."""
    parser = argparse.ArgumentParser("python -m lit_models.seo.onpage", description=main.__doc__)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE_OR_FOLDER")
    text = "table of a site, a row per page, written again; beside it -findings, a row per finding"
    parser.add_argument("--csv", type=Path, default=Path("onpage.csv"), help=text)
    parser.add_argument("--ease", action="store_true", help="say how easily each text is read")
    options = parser.parse_args(arguments)
    named = [files_in(p, HTML_SUFFIXES, "the site") if p.is_dir() else [p] for p in options.pages]
    paths = {path.resolve(): path for path in chain(*named)}  # a page named twice is no duplicate
    contents = ((str(path), page_bytes(path)) for path in paths.values())
    reports = check_site(contents, options.ease)
    if len(reports) == 1:
        print(shown_report(reports[0]))
    else:
        print(shown_site(reports))
        of_pages, of_findings = write_tables(options.csv, reports)
        print(f"each page in {of_pages}, each finding in {of_findings}")


if __name__ == "__main__":
    sys.exit(run_guarded(main))
