"""Reports in headless Chromium: no errors, curves drawn, readable at any width, light and dark."""

import math
from itertools import pairwise
from pathlib import Path

import pytest

from lit_models.commands.report import report
from tests.commands import browser
from tests.commands.run_folders import run_folder

pytestmark = pytest.mark.slow
WIDTHS = (400, 1280)
CONTRAST, SMALLEST = 4.5, 11.0  # of text: WCAG 2, level AA; pixels
LONG = tuple((1, 300 * n, 300 * (n + 1)) for n in range(3))


@pytest.fixture(scope="module")
def chromium() -> None:
    reason = browser.install()
    if reason is not None:
        pytest.skip(reason)


def pages(folder: Path) -> dict[str, str]:
    """A run with all that is wide or odd, and two runs side by side."""
    losses = {step: 1 / step + step % 7 / 50 for step in range(1, 901)} | {450: math.nan}
    warning = f"a path: /{'very-long-folder/' * 12}x.csv"
    first = run_folder(folder / "one", losses, {"warnings": [warning]}, attempts=LONG)
    row = ",".join(["a text " * 40, "en", "12345 " * 12, "x" * 300, "17", "3.25"])
    heads = "input,language,truth,answer,sample,loss"
    (first / "errors-test.csv").write_text("\n".join([heads, *[row] * 3, ""]))
    second = run_folder(folder / "two", topology={"world_size": 4})
    assert report(first) == report(first, second, to=folder / "both.html") == 0
    return {"run": (first / "report.html").read_text(), "both": (folder / "both.html").read_text()}


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "both"])
def test_a_report_is_drawn_and_readable(
    chromium: None, tmp_path: Path, kind: str, is_dark: bool
) -> None:
    found, console = browser.seen(pages(tmp_path)[kind], tmp_path / "browser", WIDTHS, is_dark)
    assert console == []
    for seen, width in zip(found, WIDTHS, strict=True):
        assert seen["needed"] <= seen["width"] <= width
        assert seen["contrast"] >= CONTRAST, seen["worst"]
        assert seen["size"] >= SMALLEST
        assert seen["columns"] == (2 if width == 1280 else 1)
        brightness = sum(map(int, seen["background"][4:-1].split(",")))
        assert brightness < 200 if is_dark else brightness > 700
        levels = seen["headings"]
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))
        assert len(seen["curves"]) >= 5
        assert all(curve["colours"] > 1 for curve in seen["curves"])
        assert all(300 < curve["width"] <= width for curve in seen["curves"])
        names = ["train/loss", "val/loss"] if kind == "run" else ["one", "two"]
        assert all(name in seen["curves"][0]["legend"] for name in names)
