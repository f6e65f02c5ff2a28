"""A visitor of the page of `unisono show`, simulated: the server's own code without a browser."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from nicegui.testing import User, user_simulation

from lit_models.cli import built_part
from lit_models.page.shelf import Shelf
from lit_models.page.views import page

Visit = Callable[[User], Awaitable[None]]


@pytest.fixture
def visited() -> Callable[..., None]:
    """Lets a visitor, NiceGUI's `User`, walk through the page on a place."""

    def walk_through(place: Path, visit: Visit, *also: Path) -> None:
        shelf = Shelf(place, also, built_part)
        shelf.uploads = place

        async def walk() -> None:
            async with user_simulation(lambda: page(shelf)) as user:
                await visit(user)

        asyncio.run(walk())

    return walk_through
