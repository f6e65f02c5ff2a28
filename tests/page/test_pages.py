"""The view of pages, of a scorer; what writers call one is seen in a real browser."""

from pathlib import Path

import pytest
from nicegui import ui
from nicegui.testing import User

from tests.page.conftest import fit

MANY = {"retries": 100}  # looks, one each tenth of a second


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    fit(folder, "seo/scorer_debug.yaml", "runs/scorer", "--trainer.max_steps=1")
    return folder / "runs"


def test_a_scorer_says_what_it_makes_of_a_page(place, visited):
    async def visit(user: User) -> None:
        await user.open("/pages")
        user.find(ui.textarea).type("<b>Salt</b> from the sea, sold by the pound.")
        user.find(ui.button).click()
        await user.should_see("predicted_num_parameters", **MANY)
        await user.should_see("probability_has_default", **MANY)
        await user.should_not_see("error")

    visited(place, visit)
