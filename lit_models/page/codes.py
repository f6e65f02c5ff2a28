"""Codes of titles and tables by an occupation coder, corrections, and what a test found wrong."""

import asyncio
import shutil
import tempfile
import time
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from nicegui import PageArguments, ui
from pyarrow import csv

from datamodules.files.tables import Table, write_table
from lit_models.page.parts import action, address, chosen_model, facts, rows_table, view, words
from lit_models.page.shelf import Model, Shelf

MOST_TITLES, NUM_SETS, NUM_NEAREST = 20, 4, 5
ERRORS, MOST_ROWS, NUM_PAIRS = "errors-test.csv", 100, 25
TEXTS = ("input", "truth", "answer", "language", "seen in training")
# Quasar's own button to add a file has no name.
UPLOAD = """<label><q-uploader-add-trigger /><q-btn flat @click=props.pickFiles
label="upload csv, tsv, parquet or xlsx" /></label>"""


@view
async def code_view(shelf: Shelf, args: PageArguments) -> None:
    """Show codes of titles beside the nearest training rows; take corrections and tables."""
    words("h1", "Code")
    query, folder = args.query_parameters, Path(tempfile.mkdtemp(dir=shelf.uploads))
    ui.context.client.on_delete(lambda: shutil.rmtree(folder))
    model = chosen_model(shelf, args, "LitOccupationCoder")
    module = await shelf.module(model)
    from datamodules import Columns, OccupationDataModule  # with torch, as the module

    try:
        data = await shelf.data(model)
    except (KeyError, OSError, ValueError):  # of which the nearest rows tell
        data = OccupationDataModule(columns=Columns(language="language"))
    book, own = module.recipe["code_book"], data.options.columns
    named = {c: f"{c} {d}" for c, d in zip(book["codes"], book["descriptions"], strict=True)}
    names = own.codes or [f"code_{place + 1}" for place in range(book["system"]["max_codes"])]
    corrections: dict[str, tuple[str, list[str]]] = {}  # title -> its language and right codes

    async def code_titles() -> None:
        texts, spoken = list(filter(str.strip, titles.value.splitlines())), language.value
        if not 0 < len(texts) <= MOST_TITLES:
            raise ValueError(f"{len(texts)} titles: write 1 to {MOST_TITLES}; a table holds more.")
        for found in await shelf.compute(lambda: module.code(texts, spoken, k_best=NUM_SETS)):
            words("h2", found.text)
            each = zip(found.codes, found.confidences, strict=True)
            sets = [([f"{named[c]} ({p:.1%})" for c, p in each], found.set_confidence)]
            sets += [([named[c] for c in codes], share) for codes, share in found.next_sets]
            with ui.element("div").classes("figures"):
                facts((f"{share:.1%}", "; ".join(codes)) for codes, share in sets)
                await show_nearest(shelf, model, found.text)
            right = ui.select(named, value=found.codes, multiple=True, with_input=True)
            right.props('label="right codes" use-chips').classes("wide").on_value_change(
                lambda event, title=found.text: corrections.update({title: (spoken, event.value)})
            )

    def offer_corrections() -> None:
        rows = [[own.text, own.language or "language", own.split or "split", *names]]
        for title, (spoken, codes) in corrections.items():
            cells = [own.code_separator.join(codes)] if own.code_separator else codes
            rows.append([title, spoken, "train", *cells, *[""] * (len(names) - len(cells))])
        write_table(folder / "corrections", rows)
        ui.download.file(folder / "corrections", "corrections.csv")

    @view
    async def take(event: Any) -> None:
        path = Path(tempfile.mkdtemp(dir=folder), event.file.name)
        await event.file.save(path)
        _, first = await asyncio.to_thread(lambda: next(Table(path).rows()))
        shown = {name: f"{name}: {value:.40}" for name, value in first.items()}
        likely = own.text if own.text in first else max(first, key=lambda name: len(first[name]))
        text = ui.select(shown, value=likely, label=f"titles of {path.name} are in")
        likely = next((name for name in first if name in (own.language, "language")), None)
        spoken = ui.select(shown, value=likely, label="languages are in", clearable=True)
        action("code the table", lambda: code_table(path, text.value, spoken.value))

    async def code_table(path: Path, text: str, spoken: str | None) -> None:
        left, begun = words("p", "", "note").props("aria-live=off"), time.monotonic()
        columns = Columns(text, spoken, default_language=language.value)
        sizes = {"global_batch_size": data.global_batch_size, "plan": data.plan_options}
        work = OccupationDataModule(predict_files=str(path), columns=columns, **sizes)
        work.recipe = module.recipe
        await asyncio.to_thread(work.setup, "predict")
        ui.context.client.on_delete(lambda: shutil.rmtree(work.index.folder, ignore_errors=True))
        loader, parts = work.predict_dataloader(), list[dict[str, Any]]()
        for batch in loader:
            parts.append(await shelf.compute(module.predict_step, batch, 0))
            if left.is_deleted:
                return  # the visitor has gone
            seconds = (time.monotonic() - begun) * (len(loader) / len(parts) - 1)
            left.text = f"{len(parts):,} of {len(loader):,} batches, {seconds:,.0f} s left"
        order, coded = work.plan("predict", 0).order.argsort(), path.parent / work.default_output
        results = {n: np.concatenate([part[n] for part in parts])[order] for n in parts[0]}
        await asyncio.to_thread(work.write_predictions, results, coded)
        shutil.rmtree(work.index.folder)
        path.unlink()
        words("p", " ".join(work.index.notes), "warn")
        ui.button(f"download {coded.name}", on_click=lambda: ui.download.file(coded))

    titles = ui.textarea("titles, one on each line", value=query.get("title", "")).classes("wide")
    spoken = query.get("language") or module.recipe["default_language"]
    language = ui.select(module.recipe["languages"], value=spoken, label="language")
    action("code the titles", code_titles)
    if titles.value:
        await code_titles()
    ui.button("download the corrections", on_click=offer_corrections)
    words("h2", "A table")
    ui.upload(auto_upload=True, on_upload=take).classes("wide").add_slot("header", UPLOAD)


@view
async def show_nearest(shelf: Shelf, model: Model, text: str) -> None:
    """Show the training rows whose letters are nearest to those of a text."""
    data, key = await shelf.data(model), (model.run, "training texts")
    rows, ids, ngrams, known = await shelf.compute(shelf.once, key, training_texts, data)
    likeness = await shelf.compute(lambda: (known @ ngrams.transform([text]).T).toarray()[:, 0])
    near = [rows.describe(ids[place], 0) for place in likeness.argsort()[: -NUM_NEAREST - 1 : -1]]
    rows_table(list(near[0]), near, f"training rows nearest to {text}")


def training_texts(data: Any) -> tuple[Any, ...]:
    """Return the training rows, the number of one of each text, n-grams and weights of theirs."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    from datamodules.tokenizers.codes import decode

    data.setup("fit")
    rows = data.datasets["train"]
    rows.augmentation = None  # they are shown as they were written
    numbers = {decode(text): n for n, text in enumerate(rows.store.texts(rows.row_ids))}
    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
    return rows, list(numbers.values()), ngrams, ngrams.fit_transform(numbers)


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
    model = shelf.models("LitOccupationCoder").get(name)

    def chosen(page: dict[str, Any]) -> pa.Table:
        found, order = whole, "descending" if page["descending"] else "ascending"
        for column, field in fields.items():
            if field.value and column == "confidence":
                found = found.filter(pc.greater_equal(found[column], field.value))
            elif field.value:
                fits = pc.match_substring(found[column], field.value, ignore_case=True)
                found = found.filter(fits)
        return found.sort_by([(page["sortBy"], order)]) if page["sortBy"] else found

    async def open_row(row: dict[str, Any]) -> None:
        title = row["input"]
        with ui.dialog(value=True) as panel, ui.card():
            panel.props["aria-label"] = title
            ui.button("close", on_click=panel.close)
            words("h2", title)
            await show_nearest(shelf, model, title)
            ui.link(
                "its codes", address("/code", model=name, title=title, language=row["language"])
            )

    async def turn(page: dict[str, Any]) -> None:
        found = await asyncio.to_thread(chosen, page)
        size = min(page["rowsPerPage"] or MOST_ROWS, MOST_ROWS)
        rows = found.slice((page["page"] - 1) * size, size).to_pylist()
        table.rows = [{**row, "opens": model is not None} for row in rows]
        table.pagination = {**page, "rowsPerPage": size, "rowsNumber": len(found)}

    with ui.element("div").classes("line"):
        texts = [column for column in TEXTS if column in whole.column_names]
        fields: dict[str, Any] = {column: ui.input(f"{column} contains") for column in texts}
        if "confidence" in whole.column_names:
            fields["confidence"] = ui.number("least confidence", min=0, max=1, step=0.1)
    for field in fields.values():
        field.on_value_change(lambda: turn({**table.pagination, "page": 1}))
    table = rows_table(whole.column_names, [], "errors").props("row-key=sample")
    table.props(remove="hide-pagination").on("request", lambda e: turn(e.args["pagination"]))
    table.on("open", lambda e: open_row(e.args))
    await turn({"page": 1, "rowsPerPage": 25, "sortBy": None, "descending": False})
    if model is not None:
        confused = Counter[tuple[str, str]]()
        for row in whole.group_by(["truth", "answer"]).aggregate([([], "count_all")]).to_pylist():
            true, given = set(row["truth"].split()), set(row["answer"].split())
            pairs = product(sorted(true - given), sorted(given - true))
            confused.update(dict.fromkeys(pairs, row["count_all"]))
        found = confused.most_common(NUM_PAIRS)
        most = [{"true": t, "given": g, "count": n} for (t, g), n in found]
        words("h2", "Codes that are confused")
        rows_table(("true", "given", "count"), most, "confused codes")
