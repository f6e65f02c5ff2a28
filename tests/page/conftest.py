"""A simulated visitor of the page of `unisono show`: the server's own code without a browser."""

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
    """Lets a visitor, NiceGUI's `User`, open the page of a folder."""

    def walk_through(place: Path, visit: Visit, *also: Path) -> None:
        shelf = Shelf(place, also)
        shelf.uploads = place

        async def walk() -> None:
            async with user_simulation(lambda: page(shelf)) as user:
                try:
                    await visit(user)
                finally:  # a loop that is cancelled while it wakes up would run for ever
                    for client in list(Client.instances.values()):
                        client.delete()

        asyncio.run(walk())

    return walk_through


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until the page has finished what was requested."""
    for _ in range(600):
        if is_so():
            return
        await asyncio.sleep(0.1)
    raise AssertionError("it never came to be")


def fit(folder: Path, config: str, run: str, *options: str) -> None:
    """Trains a run in this folder."""
    where = (f"--config={config}", f"--trainer.default_root_dir={run}", "--trainer.accelerator=cpu")
    run_in(folder, "fit", *where, "--trainer.devices=1", "--test_after_fit=false", *options)
