"""All checks of a page, and of the pages of a site together; there is no score over all."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from datamodules.relevance.bm25 import scores_of
from lit_models.seo.onpage.duplicates import duplicates
from lit_models.seo.onpage.elements import CHECKS
from lit_models.seo.onpage.keywords import keyword_counts
from lit_models.seo.onpage.page import Finding, Page
from lit_models.seo.onpage.readability import readability


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
    findings: list[Finding]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON values."""
        findings = [finding._asdict() for finding in self.findings]
        return {"page": self.name, "address": self.address, **self.facts, "findings": findings}


def check_page(page: Page, keywords: Sequence[str] = (), language: str | None = None) -> PageReport:
    """Return the report of one page.

    Args:
        page: to check.
        keywords: to count; none are guessed.
        language: of the text; none takes what the page declares.

    Raises:
        ValueError: a keyword has no word.
    """
    facts, findings = dict(page.facts), list(page.findings)
    for check in CHECKS:
        values, found = check(page)
        facts |= values
        findings += found
    facts["words"] = len(page.words)
    facts["readability"] = readability(page.lines, language or facts["language"])
    facts["keywords"] = {word: keyword_counts(page, word, facts) for word in keywords}
    return PageReport(page.name, page.address, facts, findings)


def check_site(
    pages: Sequence[Page], keywords: Sequence[str] = (), language: str | None = None
) -> list[PageReport]:
    """Return the reports of pages that belong together: with BM25 of the keywords over them, and
    what repeats. Arguments and errors as `check_page`."""
    reports = [check_page(page, keywords, language) for page in pages]
    for keyword in keywords:
        scores = scores_of(["\n".join(page.lines) for page in pages], keyword)
        for report, score in zip(reports, scores.tolist(), strict=True):
            report.facts["keywords"][keyword]["bm25"] = score
    repeated = duplicates(pages, [report.facts for report in reports])
    for report, found in zip(reports, repeated, strict=True):
        report.findings += found
    return reports
