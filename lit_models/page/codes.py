"""Codes of titles and tables by an occupation coder, and corrections that it can learn from."""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from nicegui import PageArguments, ui

import datamodules
from datamodules.files.tables import Table, write_table
from datamodules.tokenizers.codes import decode
from lit_models.page.parts import EXPECTED, action, chosen_model, facts, rows_table, view, words
from lit_models.page.shelf import Model, Shelf

CODERS, MOST_TITLES, NUM_SETS, NUM_NEAREST = ("LitOccupationCoder",), 20, 4, 5


@view
async def code_view(shelf: Shelf, args: PageArguments) -> None:
    """Show codes of titles beside the nearest training rows; take corrections and tables."""
    words("h1", "Code")
    query, folder = args.query_parameters, Path(tempfile.mkdtemp(dir=shelf.uploads))
    ui.context.client.on_delete(lambda: shutil.rmtree(folder))
    model = chosen_model(shelf, CODERS, query.get("model", ""), args.path)
    module = await shelf.module(model)
    try:
        data = await shelf.data(model)
    except EXPECTED:  # of which the nearest rows tell
        data = datamodules.OccupationDataModule(columns=datamodules.Columns(language="language"))
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
            sets = [(found.codes, found.set_confidence), *found.next_sets]
            with ui.element("div").classes("figures"):
                facts((f"{share:.1%}", "; ".join(named[c] for c in codes)) for codes, share in sets)
                await show_nearest(shelf, model, found.text)
            right = ui.select(named, value=found.codes, multiple=True, with_input=True)
            right.props('label="right codes" use-chips').classes("wide")
            right.on_value_change(
                lambda e, t=found.text: corrections.update({t: (spoken, e.value)})
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
        columns = datamodules.Columns(text, spoken, default_language=language.value)
        sizes = {"global_batch_size": data.global_batch_size, "plan": data.plan_options}
        work = datamodules.OccupationDataModule(predict_files=str(path), columns=columns, **sizes)
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
    ui.upload(label="csv, tsv, parquet or xlsx", auto_upload=True, on_upload=take).classes("wide")


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

    data.setup("fit")
    rows = data.datasets["train"]
    rows.augmentation = None  # they are shown as they were written
    numbers = {decode(text): n for n, text in enumerate(rows.store.texts(rows.row_ids))}
    ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(2, 4))
    return rows, list(numbers.values()), ngrams, ngrams.fit_transform(numbers)
