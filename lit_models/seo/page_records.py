"""The on-page report of a row of prediction, as plain values."""

from typing import Any

from datamodules.json_rows import JsonRow
from lit_models.seo.onpage.checks import check_page
from lit_models.seo.onpage.page import Page


def onpage_record(row: JsonRow, snippet: str) -> dict[str, Any] | None:
    """Return the report of a row's html as it is, its query counted as a keyword; none without
    html.

    Args:
        row: with `html`, and perhaps `query` and `url`.
        snippet: what was written for it, which is not yet in the page.
    """
    html, query = row.values.get("html"), (row.values.get("query") or "").strip()
    if not html:
        return None
    page = Page(row.place, html, row.values.get("url"))
    keywords = [query] if any(c.isalnum() for c in query) else []
    return check_page(page, keywords).to_dict()
