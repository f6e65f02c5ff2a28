"""The elements of one page: what they say, and where they break a rule."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from lit_models.seo.onpage.page import Finding, Page, opening_tag, path_of, shown

if TYPE_CHECKING:
    from selectolax.lexbor import LexborNode

LONGEST_TITLE = 60  # characters
SHORTEST_DESCRIPTION, LONGEST_DESCRIPTION = 70, 160
LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8})*|[xi](?:-[A-Za-z0-9]{1,8})+")
MOST_FINDINGS = 20  # of one check, with their places
LINK_KINDS = ("internal", "external", "fragment", "other", "unknown")


class Fault(NamedTuple):
    """A rule that an element breaks, and what shows it."""

    rule: str
    node: "LexborNode"
    evidence: str


def title(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return the title, its length in characters, and what is wrong with it."""
    nodes = [n for n in page.tree.css("title") if n.css_matches(":not(svg title)")]
    texts = [" ".join(node.text().split()) for node in nodes]
    found = _said_once("title", "<title>", nodes, texts)
    text = texts[0] if texts else None
    if text and len(text) > LONGEST_TITLE:
        rule = f"{len(text)} characters; results cut titles beyond about {LONGEST_TITLE}"
        found.append(Finding("title", rule, shown(text), path_of(nodes[0])))
    return {"title": text, "title_length": len(text or "")}, found


def description(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return the meta description, its length in characters, and what is wrong with it."""
    nodes = _meta(page, "description")
    texts = [" ".join((node.attributes.get("content") or "").split()) for node in nodes]
    found = _said_once("description", "meta description", nodes, texts)
    text = texts[0] if texts else None
    if text and not SHORTEST_DESCRIPTION <= len(text) <= LONGEST_DESCRIPTION:
        rule = (
            f"{len(text)} characters; {SHORTEST_DESCRIPTION} to {LONGEST_DESCRIPTION} are shown "
            "whole and say enough"
        )
        found.append(Finding("description", rule, shown(text), path_of(nodes[0])))
    return {"description": text, "description_length": len(text or "")}, found


def canonical(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return the canonical address, made absolute where the page's is known."""
    nodes = [n for n in page.tree.css("link[rel]") if "canonical" in _tokens(n, "rel")]
    given = [(node.attributes.get("href") or "").strip() for node in nodes]
    found = []
    for node, href in zip(nodes, given, strict=True):
        rule: str | None = None
        if not href:
            rule = "the canonical link names no address"
        elif _split(href) is None:
            rule = "the canonical address cannot be read"
        elif not urlsplit(href).scheme:
            rule = "the canonical address is relative; write it whole, with https://"
        elif "body" in path_of(node).split(" > "):
            rule = "the canonical link stands in the body, where search engines ignore it"
        if rule is not None:
            found.append(Finding("canonical", rule, opening_tag(node), path_of(node)))
    if len(set(given)) > 1:
        rule = "the canonical links name different addresses"
        found.append(Finding("canonical", rule, shown(", ".join(given)), path_of(nodes[1])))
    first = given[0] if given and _split(given[0]) is not None else ""
    return {"canonical": _joined(page.address or "", first) if first else None}, found


def robots(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return what the page tells robots; noindex is a finding, since it may be a mistake."""
    said: dict[str, str] = {}
    found = []
    for name in ("robots", "googlebot", "bingbot"):
        for node in _meta(page, name):
            content = (node.attributes.get("content") or "").strip().lower()
            said[name] = ", ".join(filter(None, (said.get(name), content)))
            if {"noindex", "none"} & set(re.split(r"[\s,]+", content)):
                rule = "the page asks not to be listed in results"
                found.append(Finding("robots", rule, opening_tag(node), path_of(node)))
    return {"robots": said}, found


def language(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return the language that the page declares."""
    root = page.tree.css_first("html")
    given = None if root is None else (root.attributes.get("lang") or "").strip() or None
    found = []
    if given is None:
        found.append(
            Finding("language", 'no language is declared; write <html lang="en">', "", "html")
        )
    elif not LANGUAGE.fullmatch(given):
        rule = "the language is no code such as en or pt-BR"
        found.append(Finding("language", rule, shown(given), "html"))
        given = None
    return {"language": given}, found


def headings(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return level and text of all headings in order, and where the order breaks."""
    nodes = page.tree.css("h1, h2, h3, h4, h5, h6")
    listed = [(int((node.tag or "h0")[1]), " ".join(node.text().split())) for node in nodes]
    faults: list[Fault] = []
    before = 0
    for node, (level, text) in zip(nodes, listed, strict=True):
        if before and level > before + 1:
            faults.append(Fault(f"h{level} follows h{before}: levels are skipped", node, text))
        if not text and not node.css_first("img[alt]"):
            faults.append(Fault("an empty heading", node, opening_tag(node)))
        before = level
    tops = [node for node, (level, _) in zip(nodes, listed, strict=True) if level == 1]
    faults += [Fault("another h1; one names the page", node, node.text()) for node in tops[1:]]
    if nodes and not tops:
        faults.append(Fault("there is no h1", nodes[0], listed[0][1]))
    missing = [] if nodes else [Finding("headings", "there is no heading")]
    return {"headings": listed}, missing + _findings("headings", faults)


def images(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return how many images have an alternative text, an empty one (decoration), or none."""
    counts: Counter[str] = Counter()
    faults = []
    for node in page.tree.css("img, area[href], input[type=image]"):
        text, is_named = node.attributes.get("alt", ""), "alt" in node.attributes
        is_labelled = any(node.attributes.get(n) for n in ("aria-label", "aria-labelledby"))
        kind = "decorative" if is_named and not (text or "").strip() else "described"
        kind = kind if is_named or is_labelled else "without"
        counts[kind] += 1
        if kind == "without":
            rule = 'no alternative text; describe it, or write alt="" where it decorates'
            faults.append(Fault(rule, node, opening_tag(node)))
    kinds = ("described", "decorative", "without")
    return {"images": {kind: counts[kind] for kind in kinds}}, _findings("images", faults)


def links(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return how many links go where, and those that say nothing.

    Internal is the page's own host, with or without www; an address of a host counts as `unknown`
    where the page's own address is not known.
    """
    base = page.tree.css_first("base[href]")
    start = _joined(page.address or "", (base.attributes.get("href") or "") if base else "")
    counts: Counter[str] = Counter()
    faults = []
    for node in page.tree.css("a[href]"):
        href = (node.attributes.get("href") or "").strip()
        if _split(href) is None:
            faults.append(Fault("the address cannot be read", node, href))
            continue
        counts[_kind(href, start)] += 1
        if not _says_something(node):
            rule = "a link without a text says nothing of its target"
            faults.append(Fault(rule, node, opening_tag(node)))
    return {"links": {kind: counts[kind] for kind in LINK_KINDS}}, _findings("links", faults)


def structured_data(page: Page) -> tuple[dict[str, Any], list[Finding]]:
    """Return which kinds of structured data there are, with their types."""
    types: list[str] = []
    found = []
    for node in page.tree.css("script"):
        if (node.attributes.get("type") or "").strip().lower() != "application/ld+json":
            continue
        text = node.text()
        try:
            types += _types(json.loads(text))
        except (ValueError, RecursionError) as error:  # Python refuses numbers of 5,000 digits
            rule = f"JSON-LD that is no JSON ({error}): nobody can read it"
            found.append(Finding("structured data", rule, shown(text), path_of(node)))
    items = [node.attributes.get("itemtype") or "" for node in page.tree.css("[itemscope]")]
    rdfa = [node.attributes.get("typeof") or "" for node in page.tree.css("[typeof]")]
    held = {"json_ld": types, "microdata": items, "rdfa": rdfa}
    held["open_graph"] = [
        n.attributes.get("property") or "" for n in page.tree.css('meta[property^="og:"]')
    ]
    return {"structured_data": held}, found


CHECKS = (
    *(title, description, canonical, robots, language),
    *(headings, images, links, structured_data),
)


def _findings(check: str, faults: list[Fault]) -> list[Finding]:
    """Return the first faults as findings, and how many more there are."""
    first = faults[:MOST_FINDINGS]
    found = [Finding(check, f.rule, shown(f.evidence), path_of(f.node)) for f in first]
    num_more = len(faults) - len(first)
    return found + [Finding(check, f"{num_more:,} more of these")] * bool(num_more)


def _meta(page: Page, name: str) -> list["LexborNode"]:
    nodes = page.tree.css("meta[name]")
    return [n for n in nodes if (n.attributes.get("name") or "").strip().lower() == name]


def _tokens(node: "LexborNode", name: str) -> list[str]:
    return (node.attributes.get(name) or "").lower().split()


def _said_once(check: str, what: str, nodes: list["LexborNode"], texts: list[str]) -> list[Finding]:
    """Return findings where something is missing, empty, or there more than once."""
    if not nodes:
        return [Finding(check, f"there is no {what}", "", "head")]
    found = []
    if not texts[0]:
        found.append(
            Finding(check, f"the {what} is empty", opening_tag(nodes[0]), path_of(nodes[0]))
        )
    for node, text in zip(nodes[1:], texts[1:], strict=True):
        found.append(Finding(check, f"another {what}; one counts", shown(text), path_of(node)))
    return found


def _split(address: str) -> Any:
    try:
        return urlsplit(address)
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


def _says_something(node: "LexborNode") -> bool:
    if node.text().strip():
        return True
    named = [node, *node.css("[aria-label], [title], img[alt]")]
    names = ("aria-label", "aria-labelledby", "title", "alt")
    return any((n.attributes.get(name) or "").strip() for n in named for name in names)


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
