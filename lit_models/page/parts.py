"""What all views are made of: words, buttons and sentences on what failed."""

import functools
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

from nicegui import PageArguments, ui
from nicegui.elements.mixins.text_element import TextElement

from lit_models.page.shelf import Model, Shelf

for field in (ui.input, ui.number, ui.select, ui.textarea):
    field.default_props("outlined dense")
ui.button.default_props("unelevated")
# A head that sorts by the keyboard too; cells that scroll; the first leads to what a row has.
HEAD = """<q-th :props=props tabindex=0 @keyup.enter="props.sort(props.col)">{{ props.col.label }}
</q-th>"""
CELL = """<q-td :props=props><component v-if="(props.row.href || props.row.opens) &&
props.col.name === props.cols[0].name" :is="props.row.href ? 'a' : 'button'" class=nicegui-link
:href=props.row.href @click="$parent.$emit('open', props.row)">{{ props.value }}</component>
<div v-else class=cell>{{ props.value }}</div></q-td>"""
View = Callable[..., Awaitable[None]]
EXPECTED = (ValueError, OSError, RuntimeError, KeyError)  # by a user's file; written for them


def words(tag: str, text: str, classes: str = "") -> TextElement:
    """Return a new element with plain text: markup in it is shown as it was written."""
    return TextElement(tag=tag, text=text).classes(classes)


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Show names and values."""
    with ui.element("dl"):
        for name, value in pairs:
            words("dt", name)
            words("dd", value)


def address(path: str, **query: Any) -> str:
    """Return where a view stands with the values of a query."""
    return f"{path}?{urlencode(query, doseq=True)}"


def view(function: View) -> View:
    """Return a view that shows a sentence in its place where it fails; what nobody expected goes to
    the terminal in full."""

    @functools.wraps(function)
    async def guarded(*arguments: Any, **named: Any) -> None:
        try:
            await function(*arguments, **named)
        except Exception as error:
            if not isinstance(error, EXPECTED):
                traceback.print_exception(error)
            name = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
            words("p", f"{name}{error}", "alert").props("role=alert")

    return guarded


def action(label: str, handler: View) -> ui.button:
    """Return a button, with a place below it that its handler fills; it waits while that works."""

    async def act() -> None:
        button.props("loading")
        result.clear()
        with result:
            await view(handler)()
        button.props(remove="loading")

    button = ui.button(label, on_click=act)
    result = ui.element("div").classes("result").props("aria-live=polite")
    return button


def chosen_model(shelf: Shelf, args: PageArguments, *kinds: str) -> Model:
    """Return the model that the address names, else the first of these classes, with a field for
    another where there are several; ValueError: there is none."""
    models = {name: model for kind in kinds for name, model in shelf.models(kind).items()}
    name = args.query_parameters.get("model") or next(iter(models), "")
    if name not in models:
        there = ", ".join(models) or "no model of this kind"
        raise ValueError(f"there is no model {name!r} to show here; there is {there}.")
    if len(models) > 1:
        field = ui.select(list(models), value=name, label="model")
        field.on_value_change(lambda event: ui.navigate.to(address(args.path, model=event.value)))
    return models[name]


def rows_table(names: Sequence[str], rows: list[dict[str, Any]], label: str) -> ui.table:
    """Return a table of plain text by its columns' names, of which the first is a row's own: it
    leads to its "href", or "open" is emitted; it sorts by its heads, and a long one is paged."""
    columns = [
        {"name": n, "label": n, "field": n, "sortable": True, "align": "left"} for n in names
    ]
    paged = 25 if len(rows) > 25 else None
    table = ui.table(rows=rows, columns=columns, row_key=names[0], pagination=paged)
    table.add_slot("header-cell", HEAD)
    table.add_slot("body-cell", CELL)
    table.props["aria-label"] = label  # which may hold any sign, so that nobody parses it
    return table.props("flat bordered wrap-cells role=region").classes("wide")
