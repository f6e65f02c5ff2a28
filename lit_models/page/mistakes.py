"""Errors: what a test found wrong, as a table with filters, and the codes that are confused."""

import asyncio
from collections import Counter
from itertools import product
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pyarrow.compute as pc
from nicegui import PageArguments, ui
from pyarrow import csv

from lit_models.page.parts import rows_table, view, words
from lit_models.page.shelf import Shelf

ERRORS, MOST, NUM_PAIRS = "errors-test.csv", 100, 25
TEXTS = ("input", "truth", "answer", "language", "seen in training")
LINK = "<q-td :props=props><a :href=props.row.href>{{ props.value }}</a></q-td>"


@view
async def errors_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the errors of a run's test in pages, with filters, and the codes that are confused."""
    files = {n: run / ERRORS for n, run in shelf.runs().items() if (run / ERRORS).exists()}
    name = args.query_parameters.get("name") or next(iter(files), "")
    if name not in files:
        raise ValueError(f"{name!r} has no errors of a test; these have: {', '.join(files)}.")
    words("h1", f"Errors of {name}")
    lines = csv.ParseOptions(newlines_in_values=True)
    types = csv.ConvertOptions(column_types=dict.fromkeys(TEXTS, pa.string()))
    whole = await asyncio.to_thread(csv.read_csv, files[name], None, lines, types)

    def chosen(page: dict[str, Any]) -> pa.Table:
        found, order = whole, "descending" if page["descending"] else "ascending"
        for name, field in fields.items():
            part = field.value or ""
            found = found.filter(pc.match_substring(found[name], part, ignore_case=True))
        if least.value and "confidence" in whole.column_names:
            found = found.filter(pc.greater_equal(found["confidence"], least.value))
        return found.sort_by([(page["sortBy"], order)]) if page["sortBy"] else found

    async def turn(page: dict[str, Any]) -> None:
        found, size = await asyncio.to_thread(chosen, page), min(page["rowsPerPage"] or MOST, MOST)
        counts = {"rowsPerPage": size, "rowsNumber": len(found)}
        rows = found.slice((page["page"] - 1) * size, size).to_pylist()
        for row in rows:  # to where its input is coded, beside the training rows nearest to it
            title = {"title": row.get("input"), "language": row.get("language")}
            row["href"] = f"/code?{urlencode({'model': name, **title})}"
        table.rows, table.pagination = rows, {**page, **counts}

    with ui.element("div").classes("row"):
        fields = {c: ui.input(f"{c} contains") for c in TEXTS if c in whole.column_names}
        least: Any = ui.number("least confidence", min=0, max=1, step=0.1)
    for field in (*fields.values(), least):
        field.on_value_change(lambda: turn({**table.pagination, "page": 1}))
    table = rows_table(whole.column_names, [], "errors").props("row-key=sample")
    table.props(remove="hide-pagination").on("request", lambda e: turn(e.args["pagination"]))
    await turn({"page": 1, "rowsPerPage": 25, "sortBy": None, "descending": False})
    if name in shelf.models("LitOccupationCoder"):
        table.add_slot("body-cell-input", LINK)
        confused = Counter[tuple[str, str]]()
        for row in whole.group_by(["truth", "answer"]).aggregate([([], "count_all")]).to_pylist():
            true, given = set(row["truth"].split()), set(row["answer"].split())
            pairs = product(sorted(true - given), sorted(given - true))
            confused.update(dict.fromkeys(pairs, row["count_all"]))
        most = [
            {"true": t, "given": g, "count": n} for (t, g), n in confused.most_common(NUM_PAIRS)
        ]
        words("h2", "Codes that are confused")
        rows_table(("true", "given", "count"), most, "confused codes")
