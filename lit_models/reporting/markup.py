"""HTML that cannot forget to escape: a string is text unless it is `Html`."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

LONG = 60  # characters from which a cell keeps some width, however narrow the page


class Html(str):
    """Markup as it stands."""


def tag(element: str, *children: Any, **attributes: Any) -> Html:
    """Return an element; children that are no `Html` are escaped, None leaves an attribute out.

    Args:
        element: such as p.
        children: texts, numbers and `Html`.
        attributes: `class_` is written class, `data_x` data-x.
    """
    given = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{element}{given}>{joined(children)}</{element}>")


def joined(children: Iterable[Any]) -> Html:
    """Return children one after the other; None is nothing."""
    return Html("".join(c if isinstance(c, Html) else escape(str(c)) for c in children
                        if c is not None))  # fmt: skip


def table(heads: Sequence[Any], rows: Iterable[Sequence[Any]], label: str, texts: int = 1) -> Html:
    """Return a table in a box of its own that scrolls where it is too wide.

    Args:
        heads: of the columns.
        rows: of cells.
        label: what the table is, for those who do not see it.
        texts: columns from the left that hold words; the others are numbers, set to the right.
    """

    def cell(element: str, place: int, content: Any) -> Html:
        scope = "col" if element == "th" else None
        kind = "number" if place >= texts else "long" if len(f"{content}") > LONG else None
        return tag(element, content, class_=kind, scope=scope)

    head = tag("tr", *(cell("th", place, content) for place, content in enumerate(heads)))
    body = (tag("tr", *(cell("td", i, content) for i, content in enumerate(r))) for r in rows)
    inner = tag("table", tag("thead", head), tag("tbody", *body))
    return tag("div", inner, class_="scroll", role="region", aria_label=label, tabindex="0")


def facts(pairs: Iterable[tuple[Any, Any]]) -> Html:
    """Return a list of names and values; a value of None or "" leaves its name out."""
    kept = [(name, value) for name, value in pairs if value not in (None, "")]
    return tag("dl", *(part for n, v in kept for part in (tag("dt", n), tag("dd", v))))
