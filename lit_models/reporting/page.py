"""The page itself: its look, its few lines of script, and the file that it becomes."""

import os
from collections.abc import Iterable
from pathlib import Path

from lit_models.reporting.markup import Html, joined, tag
from lit_models.reporting.style import SCRIPT, STYLE

GENERATOR = '<meta name="generator" content="unisono report">'
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def page(title: str, header: Html, sections: Iterable[Html]) -> str:
    """Return the whole page.

    Args:
        title: of the window.
        header: what stands on top, over the whole width.
        sections: below it.
    """
    body = joined(
        [
            tag("header", header),
            tag("main", *sections),
            tag("script", Html(SCRIPT)),
        ]
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
{tag("title", title)}
<style>{STYLE}</style>
</head>
<body>
{body}
</body>
</html>
"""


def section(title: str, *content: Html | str | None, wide: bool = False) -> Html:
    """Return a section with a heading; a wide one takes both columns."""
    return tag("section", tag("h2", title), *content, class_="wide" if wide else None)


def check_target(path: Path) -> None:
    """Refuse a file that a report must not become.

    Raises:
        ValueError: it exists and is no earlier report, or is a folder.
        FileNotFoundError: its folder does not exist.
    """
    if path.is_dir():
        raise ValueError(f"--to {path} is a folder; name a file, such as {path / 'report.html'}.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"--to {path}: there is no folder {path.parent}; make it.")
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as file:
            if GENERATOR not in file.read(1000):
                raise ValueError(
                    f"{path} exists and is no report of this command, so it is not replaced; move "
                    "it away, or name another file with --to."
                )


def write_page(path: Path, text: str) -> None:
    """Write a page as a whole, over an earlier report at most."""
    check_target(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
