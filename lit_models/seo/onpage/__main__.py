"""python -m lit_models.seo.onpage page.html [more.html …]: what pages say, and what is wrong."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_models.cli_errors import run_guarded
from lit_models.seo.onpage.checks import check_site
from lit_models.seo.onpage.page import Page, read_page


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports; return 1 where a page cannot be read, else 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        pages = _pages(options.pages, options.address)
        reports = check_site(pages, options.keyword, options.language)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([report.to_dict() for report in reports], ensure_ascii=False, indent=2))
        return 0
    from rich.console import Console

    from lit_models.seo.onpage.view import WIDTH, show

    console = Console(width=WIDTH, highlight=False)
    for report in reports:
        show(console, report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m lit_models.seo.onpage",
        description="Check pages: what they say of themselves, and which rules they break. "
        "Several pages are taken as one site.",
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="page.html")
    for name, text in (
        ("address", "address of each page, in their order: links are seen from there"),
        ("keyword", "words to count; repeat it for more"),
    ):
        parser.add_argument(f"--{name}", action="append", default=[], help=text)
    parser.add_argument("--language", help="of the texts, such as en; else as each page declares")
    parser.add_argument("--json", action="store_true", help="print plain values for programs")
    return parser


def _pages(paths: Sequence[Path], addresses: Sequence[str]) -> list[Page]:
    if addresses and len(addresses) != len(paths):
        raise ValueError(
            f"--address must be given once for each page: {len(paths)} pages, {len(addresses)} "
            "addresses; repeat it in the order of the pages, or leave it out."
        )
    given: Sequence[str | None] = addresses or [None] * len(paths)
    return [read_page(path, address) for path, address in zip(paths, given, strict=True)]


if __name__ == "__main__":
    sys.exit(run_guarded(main))
