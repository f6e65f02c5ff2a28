"""The visible text of an HTML page, line by line."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from selectolax.lexbor import LexborHTMLParser, LexborNode

UNSEEN = frozenset(
    {
        *("head", "script", "style", "noscript", "template", "svg", "math", "iframe", "object"),
        *("canvas", "select", "textarea", "datalist", "audio", "video"),
    }
)
BREAKING = frozenset(
    {
        *("address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "details"),
        *("dialog", "div", "dl", "dt", "fieldset", "figcaption", "figure", "footer", "form", "h1"),
        *("h2", "h3", "h4", "h5", "h6", "header", "hgroup", "hr", "legend", "li", "main", "menu"),
        *("nav", "ol", "p", "pre", "search", "section", "summary", "table", "tbody", "td", "tfoot"),
        *("th", "thead", "tr", "ul"),
    }
)
HIDING = ("display:none", "visibility:hidden")


def parsed(html: str) -> "LexborHTMLParser":
    """Return the tree that a browser would make of a page; nothing is refused."""
    from selectolax.lexbor import LexborHTMLParser

    return LexborHTMLParser(html)


def visible_lines(tree: "LexborHTMLParser") -> list[str]:
    """Return what the body shows, one line per block, spaces collapsed; no empty line.

    Scripts, styles, drawings, form fields and elements that are hidden by an attribute of their
    own are left out; a style sheet is not read.
    """
    lines, pieces = [], []
    for text in _pieces(tree.body):
        if text is not None:
            pieces.append(text)
            continue
        line = " ".join("".join(pieces).split())
        if line:
            lines.append(line)
        pieces = []
    return lines


def _pieces(body: "LexborNode | None") -> Iterator[str | None]:
    """Yield the texts below the body in order, and none where a line ends."""
    stack = [] if body is None else [(body, False)]  # no recursion: a page may nest without end
    while stack:
        node, is_closing = stack.pop()
        tag = node.tag
        if tag == "-text":
            yield node.text_content
            continue
        if tag in BREAKING:
            yield None
        if is_closing or tag in UNSEEN or _is_hidden(node):
            continue
        stack.append((node, True))
        stack += [(child, False) for child in node.iter(include_text=True)][::-1]


def _is_hidden(node: "LexborNode") -> bool:
    attributes = node.attributes
    if not attributes:
        return False
    style = (attributes.get("style") or "").lower().replace(" ", "")
    return "hidden" in attributes or any(hiding in style for hiding in HIDING)
