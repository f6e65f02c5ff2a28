"""What all views are made of: words, buttons and sentences on what failed."""

import functools
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from nicegui import ui
from nicegui.elements.mixins.text_element import TextElement

from lit_models.page.shelf import Model, Shelf

# A head that sorts by the keyboard too.
HEAD = """<q-th :props=props tabindex=0 @keyup.enter="props.sort(props.col)">{{ props.col.label }}
</q-th>"""
View = Callable[..., Awaitable[None]]
# What a user's file or value causes; its text is written for them.
EXPECTED = (ValueError, OSError, RuntimeError, KeyError)


def words(tag: str, text: str, classes: str = "") -> TextElement:
    """Return a new element with plain text: markup in it is shown as it was written."""
    element = TextElement(tag=tag, text=text)
    return element.classes(classes) if classes else element


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Show names and values."""
    with ui.element("dl"):
        for name, value in pairs:
            words("dt", name)
            words("dd", value)


def alert(error: BaseException) -> None:
    """Show what failed as a sentence; what nobody expected goes to the terminal in full."""
    if not isinstance(error, EXPECTED):
        traceback.print_exception(error)
    name = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    words("p", f"{name}{error}", "alert").props("role=alert")


def view(function: View) -> View:
    """Return a view that shows a sentence in its place where it fails."""

    @functools.wraps(function)
    async def guarded(*arguments: Any, **named: Any) -> None:
        try:
            await function(*arguments, **named)
        except Exception as error:
            alert(error)

    return guarded


def action(label: str, handler: Callable[[], Awaitable[None]]) -> ui.button:
    """Return a button, with a place below it that its handler fills; it waits while the handler
    works, and what fails is a sentence there."""

    async def act() -> None:
        button.disable()
        result.clear()
        with result:
            spinner = ui.spinner().props('role=status aria-label="working"')
            try:
                await handler()
            except Exception as error:
                alert(error)
            spinner.delete()
        button.enable()

    button = ui.button(label, on_click=act).props("no-caps unelevated")
    result = ui.element("div").classes("result").props("aria-live=polite")
    return button


def chosen_model(shelf: Shelf, kinds: tuple[str, ...], name: str, path: str) -> Model:
    """Return the model of this name, "" the first, of these classes, with a field for another where
    there are several, with which the view's path is opened again; ValueError: there is none."""
    models = shelf.models(*kinds)
    if not models or (name and name not in models):
        there = ", ".join(models) or "no model of this kind"
        raise ValueError(f"there is no model {name!r} to show here; there is {there}.")
    model = models[name] if name else next(iter(models.values()))
    if len(models) > 1:
        ui.select(
            list(models),
            value=model.name,
            label="model",
            on_change=lambda event: ui.navigate.to(f"{path}?{urlencode({'model': event.value})}"),
        ).props("outlined dense").classes("field")
    return model


def rows_table(names: Sequence[str], rows: list[dict[str, Any]], label: str) -> ui.table:
    """Return a table of plain text by its columns' names, of which the first is a row's own; it
    sorts by its heads, is paged from 25 rows on, and has a label where it is read aloud."""
    columns = [
        {"name": n, "label": n, "field": n, "sortable": True, "align": "left"} for n in names
    ]
    table = ui.table(rows=rows, columns=columns, row_key=names[0], pagination=25)
    table.add_slot("header-cell", HEAD)
    if len(rows) <= 25:
        table.props("hide-pagination")
    table.props["aria-label"] = label  # which may hold any sign, so that nobody parses it
    return table.props("flat wrap-cells role=region").classes("wide")
