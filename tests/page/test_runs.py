"""The views of runs: the table, one run, several over each other; the door of the page."""

from pathlib import Path
from urllib.parse import urlencode

import pytest
from nicegui import ui

from lit_models.errors import UsageError
from lit_models.page.shelf import Shelf
from tests.commands.run_folders import CONFIG, run_folder

HOSTILE = '<b>" onclick="alert(1)'


def runs_of(folder: Path) -> Path:
    """Makes two runs, of which one has a name that is markup and another rate."""
    run_folder(folder / "a")
    run_folder(folder / HOSTILE, config=CONFIG.replace("0.003", "0.01"))
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
        assert "Finished after 6 steps" in rows["a"]["state"]

    visited(runs_of(tmp_path), visit)


def test_a_run_shows_its_proof_when_asked_and_what_differs_from_another(tmp_path, visited):
    async def visit(user):
        await user.open(f"/run?{urlencode({'name': 'a', 'beside': HOSTILE})}")
        await user.should_see(f"What differs from {HOSTILE}")
        (table,) = user.find(ui.table).elements
        assert table.props["aria-label"] == f"differences from {HOSTILE}"  # and no onclick
        await user.should_see("Training loss")
        user.find("verify each step").click()
        await user.should_see("6 of 6 steps verified.")

    visited(runs_of(tmp_path), visit)


def test_an_unknown_run_is_a_sentence(tmp_path, visited):
    async def visit(user):
        await user.open("/run?name=c")
        await user.should_see("there is no run 'c' here")

    visited(runs_of(tmp_path), visit)


def test_a_place_without_runs_is_refused_with_the_way_out(tmp_path):
    with pytest.raises(UsageError, match="holds no run"):
        Shelf(tmp_path)
    with pytest.raises(UsageError, match="there is no"):
        Shelf(tmp_path / "gone")
