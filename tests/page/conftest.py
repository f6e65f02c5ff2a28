"""A visitor of the page of `unisono show`, simulated: the server's own code without a browser."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from nicegui import Client
from nicegui.testing import User, user_simulation

from lit_models.page.shelf import Shelf
from lit_models.page.views import page
from tests.wrong_inputs import run_in

Visit = Callable[[User], Awaitable[None]]


@pytest.fixture
def visited() -> Callable[..., None]:
    """Lets a visitor, NiceGUI's `User`, walk through the page on a place."""

    def walk_through(place: Path, visit: Visit, *also: Path) -> None:
        shelf = Shelf(place, also)
        shelf.uploads = place

        async def walk() -> None:
            async with user_simulation(lambda: page(shelf)) as user:
                try:
                    await visit(user)
                finally:  # a loop that is cancelled as it wakes would go on for ever
                    for client in list(Client.instances.values()):
                        client.delete()

        asyncio.run(walk())

    return walk_through


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until the page has done what was asked of it."""
    for _ in range(600):
        if is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never came to be")


def fit(folder: Path, config: str, run: str, *options: str) -> None:
    """Trains a run in this folder."""
    where = (f"--config={config}", f"--trainer.default_root_dir={run}", "--trainer.accelerator=cpu")
    run_in(folder, "fit", *where, "--trainer.devices=1", "--test_after_fit=false", *options)
