"""Views of search (four ways side by side, on a folder of pages and for one of its documents), of
pages and of a scorer; the writer's is seen in a real browser."""

from contextlib import chdir
from pathlib import Path

import pytest
from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement
from nicegui.testing import User

from tests.page.conftest import fit

GOODS = ("salt", "bread", "wool", "iron", "ship", "hay", "ale", "clay", "oak", "corn")
PAGE = "<title>&lt;i&gt;All of {0}</title><h3>On {0}</h3><p>Here is {0} with {1}.<img src=a></p>"
SHORT = ["--trainer.max_steps=2", "--data.collection.split.validation_share=0.3"]
HEADS = "{num_parameters: {kind: ordinal}, has_default: {kind: binary}}"
MANY = {"retries": 100}  # polls, one each tenth of a second


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pages, queries for them, and runs of a retriever and a ranker."""
    folder = tmp_path_factory.mktemp("search")
    (folder / "pages").mkdir()
    for before, name in zip(("corn", *GOODS), GOODS, strict=False):
        (folder / "pages" / f"{name}.html").write_text(PAGE.format(name, before))
    rows = [f"{verb} {name},{name}.html,2" for name in GOODS for verb in ("sell", "carry")]
    (folder / "pages" / "queries.csv").write_text("\n".join(["query,page,grade", *rows]))
    for name, own in (("retriever", ["--model.fusion.weight=0.5"]), ("ranker", [])):
        options = [*SHORT, *own, "--data.collection.folder=pages"]
        fit(folder, f"seo/{name}_debug.yaml", f"runs/{name}", *options)
    return folder


async def ask(user: User, query: str) -> None:
    await user.should_see("10 documents", **MANY)
    user.find(ui.input).type(query)
    user.find(ui.button).click()
    await user.should_see("BM25", **MANY)


def test_what_each_way_finds_stands_side_by_side_and_a_document_opens(place, visited):
    async def visit(user: User) -> None:
        await user.open("/search")
        await ask(user, "sell salt")
        for seen in ("Retriever", "Fused, BM25 weighs 0.5", "Re-ranked", "grade 2"):
            await user.should_see(seen, **MANY)
        assert {e.text for e in user.find(TextElement).elements if e.tag == "mark"} == {"salt"}
        user.find("<i>All of salt").click()
        await user.should_see("no alternative text", **MANY)

    with chdir(place):
        visited(place / "runs", visit, place / "pages")


def test_a_ranker_alone_orders_what_bm25_finds_and_says_where_nothing_is_found(place, visited):
    async def visit(user: User) -> None:
        await user.open("/search")
        await ask(user, "wool")
        await user.should_see("Re-ranked", **MANY)
        await user.should_not_see("Retriever")
        user.find(ui.input).clear().type("zyx")
        user.find(ui.button).click()
        await user.should_not_see("Re-ranked", **MANY)

    with chdir(place):
        visited(place / "runs" / "ranker", visit, place / "pages")


def test_an_unknown_model_and_one_without_its_run_are_sentences(place, visited):
    async def visit_runs(user: User) -> None:
        await user.open("/search?model=<b>")
        await user.should_see("there is no model '<b>' to show here", **MANY)

    async def visit_weights(user: User) -> None:
        await user.open("/search")
        await user.should_see("show the folder of its run", **MANY)

    with chdir(place):
        visited(place / "runs", visit_runs)
        visited(place / "runs" / "retriever" / "checkpoints" / "last.ckpt", visit_weights)


def test_a_scorer_says_what_it_makes_of_a_page(tmp_path, visited):
    rows = [f"{good} of {n},{n % 4},{n % 2}" for n in range(9) for good in GOODS]
    (tmp_path / "rows.csv").write_text("\n".join(["text,num_parameters,has_default", *rows]))
    own = ["--data.files={train: rows.csv}", f"--data.heads={HEADS}", "--trainer.max_steps=1"]
    fit(tmp_path, "seo/scorer_debug.yaml", "runs/scorer", *own)

    async def visit(user: User) -> None:
        await user.open("/pages")
        user.find(ui.textarea).type("<b>Salt</b> from the sea, sold by the pound.")
        user.find(ui.button).click()
        await user.should_see("predicted_num_parameters", **MANY)
        await user.should_see("probability_has_default", **MANY)
        await user.should_not_see("error")

    visited(tmp_path / "runs", visit)
