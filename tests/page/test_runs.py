"""Views of runs: the table, one run, several over each other; access to the page."""

import asyncio
from pathlib import Path
from urllib.parse import urlencode

import pytest
from nicegui import ui
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient, WebSocketDenialResponse

from lit_models.errors import UsageError
from lit_models.page.shelf import Model, Shelf
from lit_models.page.views import COOKIE, MOST_BYTES, Guard
from tests.commands.run_folders import CONFIG, run_folder

HOSTILE = '<b>" onclick="alert(1)'
HERE, FOREIGN = "http://testserver", {"origin": "http://testserver.evil.example"}
DATA = "data:\n  class_path: datamodules.OccupationDataModule\n  init_args:\n    train_files: "
ASKED = [
    ("GET", {"origin": HERE}, 200),
    ("GET", FOREIGN, 403),
    ("GET", {"origin": "http://["}, 403),
    ("POST", {"content-length": "0"}, 200),
    ("POST", {"transfer-encoding": "chunked"}, 413),
    ("PUT", {"transfer-encoding": "chunked"}, 413),
    ("POST", {"content-length": str(MOST_BYTES + 1)}, 413),
]


def runs_of(folder: Path) -> Path:
    """Makes two runs, one with markup as its name and another rate."""
    run_folder(folder / "a")
    gpus = {"host_rank_device": ["here:0:cuda:0", "here:1:cuda:1"]}
    run_folder(folder / HOSTILE, config=CONFIG.replace("0.003", "0.01"), topology=gpus)
    return folder


def test_the_table_of_runs_says_how_each_stands(tmp_path, visited):
    async def visit(user):
        await user.open("/")
        await user.should_see(ui.table, retries=600)
        table = next(iter(user.find(ui.table).elements))
        rows = {row["run"]: row for row in table.rows}
        assert list(rows) == [HOSTILE, "a"]
        assert rows["a"]["family"] == "OccupationCoder"
        assert rows["a"]["best"] == "val/f1 0.5"
        assert rows["a"]["steps"] == 6
        assert (rows["a"]["devices"], rows[HOSTILE]["devices"]) == ("2 cpu", "2 cuda")
        assert "Finished after 6 steps" in rows["a"]["state"]

    visited(runs_of(tmp_path), visit)


def test_a_run_shows_its_proof_when_asked_and_what_differs_from_another(tmp_path, visited):
    async def visit(user):
        await user.open(f"/run?{urlencode({'name': 'a', 'beside': HOSTILE})}")
        await user.should_see(f"What differs from {HOSTILE}")
        (table,) = user.find(ui.table).elements
        assert table.props["aria-label"] == f"differences from {HOSTILE}"  # no onclick
        await user.should_see("Training loss")
        user.find("verify each step").click()
        await user.should_see("6 of 6 steps verified.")
        await user.open("/run?name=c")
        await user.should_see("there is no run 'c' here")

    visited(runs_of(tmp_path), visit)


def test_a_place_without_runs_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UsageError, match="holds no run"):
        Shelf(tmp_path)
    with pytest.raises(UsageError, match="there is no"):
        Shelf(tmp_path / "gone")


def door(token: str = "") -> TestClient:
    return TestClient(Guard(PlainTextResponse("in"), token), follow_redirects=False)


@pytest.mark.parametrize(("method", "headers", "status"), ASKED)
def test_other_pages_and_uploads_of_no_fitting_length_stay_out(method, headers, status):
    assert door().request(method, "/", headers=headers).status_code == status


def test_another_page_opens_no_socket():
    with pytest.raises(WebSocketDenialResponse), door().websocket_connect("/", headers=FOREIGN):
        pass


@pytest.mark.parametrize("cookie", [b"", b"secre", b"secretly", b"s\xe9cret", b"secret"])
def test_the_token_opens_the_page_and_nothing_like_it_does(cookie):
    headers = {b"cookie": COOKIE.encode() + b"=" + cookie}
    answer = door("secret").get("/", headers=headers)
    assert answer.status_code == (200 if cookie == b"secret" else 401)
    answer = door("secret").get(f"{HERE}//evil.example?token=secret")
    assert answer.headers["location"] == "/evil.example"  # this page's address, not another host's


@pytest.mark.parametrize("named", ["{}", "{}/*.jsonl", "~/plan.json", "outside", "runs/link.csv"])
def test_the_run_of_a_stranger_names_nothing_outside(own_folder, monkeypatch, named):
    outside, runs = own_folder / "outside", own_folder / "runs"
    run_folder(outside)  # some files
    run = run_folder(runs / "a", config=f"{CONFIG}{DATA}'{named.format(outside)}'")
    (runs / "link.csv").symlink_to(outside / "plan.json")
    monkeypatch.setenv("HOME", str(outside))
    monkeypatch.setattr("lit_models.cli.built", lambda *given: "read")
    model = Model("a", "LitOccupationCoder", run, run)
    with pytest.raises(ValueError, match="lies outside of what this page was given"):
        asyncio.run(Shelf(runs).data(model))
    assert asyncio.run(Shelf(runs, [outside]).data(model)) == "read"


def test_the_run_of_an_earlier_version_is_refused_by_a_sentence(tmp_path):
    run = run_folder(tmp_path / "a", config=f"{CONFIG}{DATA}x.csv\n    gone: 1\n")
    model = Model("a", "LitOccupationCoder", run, run)
    with pytest.raises(ValueError, match="there is no option `gone`"):
        asyncio.run(Shelf(tmp_path).data(model))
