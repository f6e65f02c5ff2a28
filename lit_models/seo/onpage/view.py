"""A page's report on a terminal, 80 columns wide."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lit_models.seo.onpage.checks import PageReport

WIDTH, LABEL = 80, 17


def show(console: Console, report: PageReport) -> None:
    """Print what a page says of itself, then its findings with their evidence."""
    console.rule(Text(report.name, "bold"), align="left", style="dim")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=LABEL, style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in _facts(report.facts):
        table.add_row(label, Text(text))
    console.print(table)
    if report.facts["keywords"]:
        _show_keywords(console, report.facts["keywords"])
    number = len(report.findings)
    style = "bold yellow" if number else "bold green"
    console.print(Text(f"{number} findings" if number != 1 else "1 finding", style))
    for finding in report.findings:
        _show_finding(console, finding.check, finding.rule, finding.evidence, finding.place)
    console.print()


def _facts(facts: dict[str, Any]) -> list[tuple[str, str]]:
    images, links = facts["images"], facts["links"]
    rows = [
        ("title", _counted(facts["title"], facts["title_length"])),
        ("description", _counted(facts["description"], facts["description_length"])),
        ("canonical", facts["canonical"] or "–"),
        ("robots", "; ".join(f"{k}: {v}" for k, v in facts["robots"].items()) or "–"),
        ("language", facts["language"] or "–"),
        ("words", f"{facts['words']:,}"),
        ("headings", " ".join(f"h{level}" for level, _ in facts["headings"]) or "–"),
        ("images", ", ".join(f"{v} {k}" for k, v in images.items())),
        ("links", ", ".join(f"{v} {k}" for k, v in links.items() if v) or "–"),
        ("structured data", _structured(facts["structured_data"])),
        ("readability", _readability(facts["readability"])),
    ]
    if "encoding_read" in facts:
        rows.insert(5, ("encoding", facts["encoding_read"]))
    return rows


def _counted(text: str | None, length: int) -> str:
    return "–" if text is None else f"{text} ({length} characters)"


def _structured(held: dict[str, list[str]]) -> str:
    named = {
        "json_ld": "JSON-LD",
        "microdata": "microdata",
        "rdfa": "RDFa",
        "open_graph": "Open Graph",
    }
    parts = []
    for kind, types in held.items():
        names = sorted({t.rpartition("/")[2] for t in types if t and kind != "open_graph"})
        if types:
            parts.append(f"{named[kind]} ({', '.join(names)})" if names else named[kind])
    return "; ".join(parts) or "none"


def _readability(scores: dict[str, Any]) -> str:
    why = scores.get("why", "")
    if scores["reading_ease"] is None:
        return f"no score: {why}"
    ease, grade = scores["reading_ease"], scores["grade"]
    said = f"Flesch reading ease {ease:.1f}, Flesch-Kincaid grade {grade:.1f}"
    return f"{said} ({why})" if why else said


def _show_keywords(console: Console, keywords: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(keywords.values())))
    table = Table(box=None, width=WIDTH, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("keyword", overflow="fold")
    for name in names:
        table.add_column(name.replace("first_words", "first 100"), justify="right", no_wrap=True)
    for keyword, counts in keywords.items():
        cells = (f"{v:.2f}" if isinstance(v, float) else str(v) for v in counts.values())
        table.add_row(Text(keyword), *cells)
    console.print(table)


def _show_finding(console: Console, check: str, rule: str, evidence: str, place: str) -> None:
    line = Table.grid(padding=(0, 1))
    line.add_column(width=LABEL, style="yellow", no_wrap=True)
    line.add_column(overflow="fold")
    line.add_row(Text(check), Text(rule))
    if evidence:
        line.add_row("", Text(evidence, "italic"))
    if place:
        line.add_row("", Text(place, "dim"))
    console.print(line)
