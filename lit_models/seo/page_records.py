"""The on-page report of a row of prediction, as plain values."""

from typing import Any

from datamodules.files.rows import JsonRow
from lit_models.seo.onpage import Finding, Page, check_page, is_address, shown


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
    url = row.values.get("url") or None
    is_known = url is not None and is_address(url)
    page = Page(row.place, html, url if is_known else None)
    if url is not None and not is_known:
        rule = "the url is no whole address, such as https://example.org/page"
        page.findings.append(Finding("address", rule, shown(url)))
    keywords = [query] if any(c.isalnum() for c in query) else []
    return check_page(page, keywords).to_dict()
