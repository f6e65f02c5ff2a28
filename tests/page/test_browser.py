"""Every view of `unisono show`, on a run of each family, and reports, in headless Chromium."""

import math
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from lit_models.commands.report import report
from tests.commands.run_folders import run_folder
from tests.distributed.launch import ROOT, free_port
from tests.page.conftest import fit

pytestmark = pytest.mark.slow
CONFIGS = ("occupation_coder/debug", "causal_lm/debug", "consistency_lens/debug")
CONFIGS += ("seo/retriever_debug", "seo/ranker_debug", "seo/scorer_debug", "seo/writer_debug")
CONFIGS += ("seq2seq/debug",)
VIEWS = ("/", "/run?name=occupation_coder-debug&beside=causal_lm-debug", "/code", "/search")
VIEWS += ("/language", "/lens", "/pages", "/translate", "/errors?name=occupation_coder-debug")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync")
MOST_S = 60.0  # for the page to answer while other tests run
SETTLED_S = 10.0  # for everything to be drawn and labelled, and colours to settle
CONTRAST, SMALLEST = 4.5, 11.0  # WCAG 2, level AA, for text; pixels
WIDTHS = (400, 1280)
LONG = tuple((1, 300 * n, 300 * (n + 1)) for n in range(3))  # attempts of a run
LOOK = """() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const light = rgb => { const [r, g, b] = rgb.slice(0, 3).map(v => (v /= 255) <= 0.04045
    ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const solid = text => { const c = parse(text); return c.length < 4 || c[3] === 1; };
  const behind = e => { while (e && !solid(getComputedStyle(e).backgroundColor))
    e = e.parentElement; return e ? getComputedStyle(e).backgroundColor : "rgb(255,255,255)"; };
  document.querySelectorAll("details").forEach(d => { d.open = true; });
  let contrast = 99, size = 99, worst = "";
  for (const e of document.body.querySelectorAll("*")) {
    const has = [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());
    if (!has || !e.getClientRects().length || e.closest("svg, [disabled], [aria-hidden=true]"))
      continue;
    const style = getComputedStyle(e);
    const [a, b] = [style.color, behind(e)].map(c => light(parse(c)));
    const found = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    size = Math.min(size, parseFloat(style.fontSize));
    if (found < contrast) { contrast = found; worst = e.outerHTML.slice(0, 120); }
  }
  const named = e => e.labels?.length || e.ariaLabel || e.getAttribute("aria-labelledby");
  return {contrast, size, worst, needed: document.documentElement.scrollWidth,
    unnamed: [...document.querySelectorAll("input, select, textarea")]
      .filter(e => e.getClientRects().length && !named(e)).map(e => e.outerHTML.slice(0, 120)),
    heads: document.querySelectorAll("h1").length, alerts:
      [...document.querySelectorAll("[role=alert]")].map(e => e.textContent).filter(Boolean)};
}"""
LOOK_AT_REPORT = """() => {
  const colours = canvas => new Set(new Uint32Array(canvas.getContext("2d")
    .getImageData(0, 0, canvas.width, canvas.height).data.buffer)).size;
  return {background: getComputedStyle(document.body).backgroundColor,
    columns: getComputedStyle(document.querySelector("main")).gridTemplateColumns.split(" ").length,
    headings: [...document.querySelectorAll("h1, h2, h3")].map(h => +h.tagName[1]),
    legend: document.querySelector(".u-legend").textContent,
    colours: [...document.querySelectorAll("canvas")].map(colours)};
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """Address of a page with a short run of each family, and the folder of the runs."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    folder = tmp_path_factory.mktemp("page")
    # NiceGUI serves another page if it detects a test.
    outside = {name: text for name, text in os.environ.items() if "PYTEST" not in name}
    environment = {**outside, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lit_models"]
    for config in CONFIGS:
        run = f"runs/{config.replace('/', '-')}"
        fit(folder, f"{config}.yaml", run, "--test_after_fit=true")
    port = free_port()
    show = [*command, "show", "runs", f"--port={port}"]
    began = time.monotonic()
    with subprocess.Popen(show, cwd=folder, env=environment) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            while not is_there(address):
                assert time.monotonic() < began + MOST_S, "the page did not start in time"
                time.sleep(0.2)
            yield address, folder
        finally:
            server.terminate()


def is_there(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def tab(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A browser tab; the test fails on console messages, fetches from other hosts and dialogs."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    faults: list[str] = []
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        page = browser.new_page(color_scheme=getattr(request, "param", "light"))
        page.set_default_timeout(60_000)
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.on("request", lambda r: None if "//127.0.0.1" in r.url else faults.append(r.url))
        yield page
        browser.close()
    assert not [fault for fault in faults if not fault.startswith(("data:", "blob:", "file:"))]


@pytest.mark.parametrize("tab", ["light", "dark"], indirect=True)
def test_every_view_is_readable_and_named_at_any_width(served, tab):
    for view in VIEWS:
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            tab.goto(served[0] + view)
            tab.wait_for_selector("h1")
            tab.wait_for_load_state("networkidle")
            end = time.monotonic() + SETTLED_S
            while (seen := tab.evaluate(LOOK))["contrast"] < CONTRAST or seen["unnamed"]:
                assert time.monotonic() < end, (view, seen)
                tab.wait_for_timeout(200)
            assert seen["needed"] <= width, view
            assert seen["size"] >= SMALLEST, view
            assert seen["heads"] == 1, view
            assert seen["alerts"] == [], view


def test_a_chart_zooms_and_what_is_clicked_on_says_more(served, tab):
    tab.goto(served[0] + VIEWS[1])
    plot = tab.locator(".plot").first
    axes = plot.text_content()
    plot.hover()
    tab.mouse.wheel(0, -600)
    tab.wait_for_timeout(500)
    assert plot.text_content() != axes
    tab.goto(served[0] + "/lens")
    tab.get_by_label("text", exact=True).fill("the cat")
    tab.get_by_role("button", name="tokens").click()
    tab.get_by_role("button", name="cat").click()
    tab.get_by_text("shuffled words").wait_for()
    tab.goto(served[0] + "/pages")
    tab.get_by_label("text of a page").fill("a <b>cat</b>")
    tab.get_by_role("button", name="write and score").click()
    tab.locator("dd").first.wait_for()
    tab.goto(served[0] + VIEWS[-1])
    tab.locator("td button").first.click()
    tab.get_by_role("link", name="its codes").wait_for()


def test_a_table_of_a_hostile_name_is_coded_and_comes_back(served, tab):
    tab.goto(served[0] + "/code")
    content = "job,n\n<script>alert(1)</script>,1\nsmed og husmand,2\n"
    file = {"name": "<img src=x onerror=alert(1)>.csv", "mimeType": "text/csv"}
    tab.set_input_files("input[type=file]", {**file, "buffer": content.encode()})
    tab.get_by_role("button", name="code the table").click()
    with tab.expect_download() as found:
        tab.get_by_role("button", name="download <img").click()
    rows = Path(found.value.path()).read_text(encoding="utf-8").splitlines()
    titles = [row.split(",")[:2] for row in rows[1:]]
    assert titles == [["<script>alert(1)</script>", "1"], ["smed og husmand", "2"]]
    assert "code_1" in rows[0]


def reports(folder: Path) -> dict[Path, list[str]]:
    """Page -> names of its first curves: a run with everything wide or unusual, and two runs."""
    losses = {step: 1 / step + step % 7 / 50 for step in range(1, 901)} | {450: math.nan}
    warning = f"a path: /{'very-long-folder/' * 12}x.csv"
    first = run_folder(folder / "one", losses, {"warnings": [warning]}, attempts=LONG)
    (first / "errors-test.csv").touch()
    second, both = run_folder(folder / "two", topology={"world_size": 4}), folder / "both.html"
    assert report(first) == report(first, second, to=both) == 0
    return {first / "report.html": ["train/loss", "val/loss"], both: ["one", "two"]}


@pytest.mark.parametrize("tab", ["light", "dark"], indirect=True)
def test_a_report_is_drawn_and_readable_at_any_width(request, tab, tmp_path):
    for page, names in reports(tmp_path).items():
        for width in WIDTHS:
            tab.set_viewport_size({"width": width, "height": 900})
            tab.goto(page.as_uri())
            seen = tab.evaluate(LOOK) | tab.evaluate(LOOK_AT_REPORT)
            assert seen["needed"] <= width
            assert seen["contrast"] >= CONTRAST, seen["worst"]
            assert seen["size"] >= SMALLEST
            assert seen["columns"] == (2 if width == 1280 else 1)
            brightness = sum(map(int, seen["background"][4:-1].split(",")))
            assert brightness < 200 if "dark" in request.node.name else brightness > 700
            assert seen["headings"][0] == 1
            assert all(after - before <= 1 for before, after in pairwise(seen["headings"]))
            assert len(seen["colours"]) >= 5
            assert min(seen["colours"]) > 1  # each curve is drawn
            assert all(name in seen["legend"] for name in names)
