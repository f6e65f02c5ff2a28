"""Views of an occupation coder: codes of titles and tables, corrections, errors of a test."""

import asyncio
import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from nicegui import ui
from nicegui.elements.upload_files import SmallFileUpload
from nicegui.testing import User

from datamodules import Columns, OccupationDataModule
from datamodules.files.tables import write_table
from datamodules.tokenizers.codes import decode
from lit_models.page.shelf import Shelf
from tests.page.conftest import until
from tests.wrong_inputs import CODES

LONG = 600  # polls of the page, a tenth of a second each
HOSTILE = "<script>alert('1')</script>"
TABLE = f'id;job;lang\n1;smith a;en\n2;wéaver é;sv\n3;;en\n4;"{HOSTILE}; x";xq\n5;smith a;en\n'


@pytest.fixture
def run(copied_run, own_cache) -> Path:
    """A copy of a trained run, with its table in the working folder."""
    return copied_run / "runs" / "mine"


def elements(user: User, kind: type, label: str = "") -> list:
    """The elements of a kind whose label begins so, from the top of the page."""
    found = [e for e in user.client.elements.values() if isinstance(e, kind)]
    return [e for e in found if str(e.props.get("label", "")).startswith(label)]


async def code(user: User, title: str) -> None:
    """Opens the view and codes a title there."""
    await user.open("/code")
    await user.should_see("code the titles", retries=LONG)
    elements(user, ui.textarea)[0].set_value(title)
    user.find("code the titles").click()


def test_a_title_gets_its_codes_the_next_sets_and_the_nearest_training_rows(run, visited):
    async def visit(user):
        await code(user, "smith  BA")
        await user.should_see(ui.table, retries=LONG)
        answer, *others = [e.text for e in elements(user, ui.element) if e.tag == "dd"]
        assert (answer.endswith("%)"), "%" in "".join(others), len(others)) == (True, False, 3)
        assert list(elements(user, ui.table)[0].rows[0].values()) == ["smith ba", "en", "83110"]
        elements(user, ui.textarea)[0].set_value("\n".join(map(str, range(30))))
        user.find("code the titles").click()
        await user.should_see("30 titles: write 1 to 20; a table holds more.", retries=LONG)

    visited(run, visit, Path("train.csv"))


def test_titles_are_coded_where_the_data_cannot_be_read(run, visited):
    async def visit(user):
        await code(user, "smith")
        await user.should_see("start it again with --also", retries=LONG)
        assert elements(user, ui.select)[-1].value

    visited(run, visit)


def test_the_coded_table_is_that_of_predict_byte_by_byte(run, visited, unisono):
    name = "a '<b>[1].tsv.gz"
    Path(name).write_bytes(gzip.compress(TABLE.encode("windows-1252")))
    options = [f"--data.predict_files={name}", "--data.predict_output=out.tsv.gz"]
    options += ["--data.columns.text=job", "--data.columns.language=lang", "--ckpt_path=auto"]
    write_table(Path("walk.csv"), [["code", "hisclass"], *([code, "3"] for code in CODES)])
    config = Path("runs/mine/config.yaml")
    config.write_text(config.read_text().replace("crosswalk: null", "crosswalk: {path: walk.csv}"))
    assert unisono("predict", "--config=runs/mine/config.yaml", *options)[0] == 0

    async def visit(user):
        await user.open("/code")
        await user.should_see("A table", retries=LONG)
        upload = elements(user, ui.upload)[0]
        await upload.handle_uploads([SmallFileUpload("mine.png", "", b"\x89PNG")])
        await user.should_see("is none of .csv", retries=LONG)
        await upload.handle_uploads([SmallFileUpload(name, "", Path(name).read_bytes())])
        await user.should_see("code the table", retries=LONG)
        assert elements(user, ui.select, "titles")[0].value == "job"
        elements(user, ui.select, "languages")[0].set_value("lang")
        user.find("code the table").click()
        await user.should_see("no known code", retries=LONG)  # a message about a row
        coded = next(run.glob("*/*/*coded*"))
        assert coded.read_bytes() == Path("out.tsv.gz").read_bytes()
        assert [path.name for path in coded.parent.iterdir()] == ["a '<b>[1].coded.tsv.gz"]

    visited(run, visit, Path("train.csv"), Path("walk.csv"))
    assert b"hisclass_1" in gzip.decompress(Path("out.tsv.gz").read_bytes())
    assert len([*Path("cache", "predict").iterdir()]) == 1  # only the command's
    assert not list(run.glob("*/*/*coded*"))


def test_corrections_are_rows_that_training_takes(run, visited):
    title = f'{HOSTILE}, "x"'

    async def visit(user):
        await code(user, title)
        await user.should_see(ui.table, retries=LONG)
        await user.should_not_see("download the corrections")
        elements(user, ui.select)[-1].set_value(list(CODES[:2]))
        user.find("download the corrections").click()
        shutil.copy(next(run.glob("*/corrections")), "corrections.csv")

    visited(run, visit, Path("train.csv"))
    files = ["train.csv", "corrections.csv"]
    data = OccupationDataModule(train_files=files, columns=Columns(language="language"))
    data.setup("fit")
    texts = [decode(text) for text in data.store.texts(np.arange(61))]
    ids = data.store.code_sets(np.array([texts.index(title.lower())]))[0]
    assert [data.recipe["code_book"]["codes"][i] for i in ids] == list(CODES[:2])


def test_errors_are_paged_sorted_filtered_and_counted(run, visited):
    rows = [["input", "language", "truth", "answer", "confidence", "sample"]]
    for n in range(90):
        codes = ["83110", "01110"] if n % 3 == 0 else ["01110", "83110 71105"]
        rows.append([f"{HOSTILE}{n}", "en", *codes, str(n / 100), str(n)])
    write_table(run / "errors-test.csv", rows)

    async def visit(user):
        await user.open("/errors?name=mine")
        await user.should_see("Codes that are confused", retries=LONG)
        table, pairs = elements(user, ui.table)
        assert [row["input"] for row in table.rows] == [f"{HOSTILE}{n}" for n in range(25)]
        assert table.rows[1]["truth"] == "01110", "a leading zero stays"
        assert list(pairs.rows[0].values()) == ["01110", "71105", 60]
        elements(user, ui.input, "truth")[0].set_value("831")
        elements(user, ui.number)[0].set_value(0.5)
        await until(lambda: len(table.rows) == 13)
        page = {"page": 2, "rowsPerPage": 5, "sortBy": "confidence", "descending": True}
        user.find(ui.table).trigger("request", {"pagination": page})
        await until(lambda: [row["sample"] for row in table.rows] == [72, 69, 66, 63, 60])
        user.find(ui.table).trigger("open", table.rows[0])
        await user.should_see("its codes", retries=LONG)
        assert list(elements(user, ui.table)[-1].rows[0]) == ["text", "language", "codes"]

    visited(run, visit, Path("train.csv"))


def test_errors_of_another_family_have_their_own_columns(run, visited):
    write_table(run / "errors-test.csv", [["document 1", "sample"], ["a\nb", "3"]])

    async def visit(user):
        await user.open("/errors")
        await user.should_see(ui.table, retries=LONG)
        (table,) = elements(user, ui.table)
        await until(lambda: [row["document 1"] for row in table.rows] == ["a\nb"])
        await user.should_not_see("KeyError")

    visited(run, visit, Path("train.csv"))


def test_weights_that_a_training_replaces_are_loaded_again(run):
    shelf = Shelf(run)
    (model,) = shelf.models().values()
    first = asyncio.run(shelf.module(model))
    assert asyncio.run(shelf.module(model)) is first
    os.utime(model.weights, ns=(0, 0))
    assert asyncio.run(shelf.module(model)) is not first
