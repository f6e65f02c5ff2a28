"""Reports in headless Chromium: no errors, curves drawn, readable at any width, light and dark."""

import json
import math
import re
import shlex
import shutil
import subprocess
from html import escape, unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lit_models.commands.report import report
from tests.commands.run_folders import run_folder

pytestmark = pytest.mark.slow
WIDTHS = (400, 1280)
CONTRAST, SMALLEST = 4.5, 11.0  # WCAG 2, level AA, for text; pixels
LONG = tuple((1, 300 * n, 300 * (n + 1)) for n in range(3))
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = shlex.split("""
--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run
--disable-extensions --enable-logging=stderr --virtual-time-budget=5000
""")
DARK = "--blink-settings=preferredColorScheme=0"
# Looks at the page inside frames, since a browser's window cannot be as narrow as a telephone.
LOOK = """
const parse = text => text.match(/[\\d.]+/g).map(Number);
const light = rgb => { const [r, g, b] = rgb.slice(0, 3).map(v => (v /= 255) <= 0.04045
  ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const solid = text => { const c = parse(text); return c.length < 4 || c[3] === 1; };
function look(frame) {
  const page = frame.contentDocument, root = page.documentElement, view = frame.contentWindow;
  const style = element => view.getComputedStyle(element);
  const behind = element => { while (element && !solid(style(element).backgroundColor))
    element = element.parentElement;
    return element ? style(element).backgroundColor : "rgb(0,0,0)"; };
  page.querySelectorAll("details").forEach(d => { d.open = true; });
  let contrast = 99, size = 99, worst = "";
  for (const element of page.body.querySelectorAll("*")) {
    const has = [...element.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!has || !element.getClientRects().length) continue;
    const [a, b] = [style(element).color, behind(element)].map(c => light(parse(c)));
    const found = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    size = Math.min(size, parseFloat(style(element).fontSize));
    if (found < contrast) { contrast = found; worst = element.outerHTML.slice(0, 80); }
  }
  const ink = canvas => new Set(new Uint32Array(canvas.getContext("2d").getImageData(0, 0,
    canvas.width, canvas.height).data.buffer)).size;
  return {
    width: root.clientWidth, needed: root.scrollWidth, contrast, worst, size,
    background: style(page.body).backgroundColor,
    columns: style(page.querySelector("main")).gridTemplateColumns.split(" ").length,
    headings: [...page.querySelectorAll("h1, h2, h3")].map(h => +h.tagName[1]),
    curves: [...page.querySelectorAll(".plot")].map(plot => ({
      colours: ink(plot.querySelector("canvas")),
      legend: plot.querySelector(".u-legend").textContent,
      width: plot.querySelector("canvas").getBoundingClientRect().width})),
  };
}
"""


def look_at(
    browser: str, page: str, folder: Path, widths: tuple[int, ...], is_dark: bool
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return how a browser renders a page at each width, and its console messages.

    Args:
        browser: its program.
        page: HTML.
        folder: for the browser's files.
        widths: in pixels.
        is_dark: whether the reader prefers dark.

    Raises:
        RuntimeError: the browser does not answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frames = "".join(
        f'<iframe srcdoc="{escape(page)}" style="border:0;width:{width}px;height:900px"></iframe>'
        for width in widths
    )
    script = f"""{LOOK}
addEventListener("load", () => {{
  const found = [...document.querySelectorAll("iframe")].map(look);
  document.body.innerHTML = "";
  document.body.append(Object.assign(document.createElement("pre"),
    {{id: "found", textContent: JSON.stringify(found)}}));
}});"""
    path = folder / "frames.html"
    path.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}<script>{script}</script>")
    command = [
        browser,
        *FLAGS,
        *([DARK] if is_dark else []),
        "--window-size=1400,1000",
        f"--user-data-dir={folder / 'profile'}",
        "--dump-dom",
        path.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    answer = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    if answer is None:
        raise RuntimeError(f"no answer from {browser}: {done.stderr[-2000:]}")
    return json.loads(unescape(answer[1])), console


@pytest.fixture(scope="module")
def chromium() -> str:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed")
    return found


def pages(folder: Path) -> dict[str, str]:
    """Pages of a run with everything wide or unusual, and of two runs side by side."""
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
def test_a_report_is_drawn_and_readable(chromium, tmp_path, kind, is_dark):
    found, console = look_at(chromium, pages(tmp_path)[kind], tmp_path / "browser", WIDTHS, is_dark)
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
