"""Views of the page, their selection, and access to them."""

import asyncio
import functools
import math
import re
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from secrets import compare_digest
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pyarrow.compute as pc
from nicegui import PageArguments, ui
from nicegui.elements.mixins.text_element import TextElement
from pyarrow import csv
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from datamodules.files.tables import Table, write_table
from datamodules.search.formats import HTML_SUFFIXES
from lit_models.commands import report
from lit_models.page.shelf import Finder, Model, Shelf

for field in (ui.input, ui.number, ui.select, ui.textarea):
    field.default_props("outlined dense")
ui.button.default_props("unelevated")
ERRORS, MOST_ROWS, NUM_PAIRS = "errors-test.csv", 100, 25
TEXTS = ("input", "truth", "answer", "language", "seen in training")
EVERY_S = 2.0  # between two reads of the runs' files
COLUMNS = ("run", "family", "state", "best", "steps", "samples/s", "devices")
LINE = {"lineStyle": {"color": "rgba(128, 128, 128, 0.25)"}}
PLOT = {  # ECharts options of all plots
    "animation": False,
    "color": ["#2f7ebc", "#c9622a", "#1f8a66", "#9a57a3", "#8a7a1f", "#b3446c"],
    "grid": {"left": 56, "right": 16, "top": 28, "bottom": 56},
    "tooltip": {"trigger": "axis"},
    "xAxis": {"type": "value", "min": "dataMin", "max": "dataMax", "splitLine": {"show": False}},
    "dataZoom": [{"type": "inside"}, {"type": "slider", "height": 16, "bottom": 8}],
}
MOST_TITLES, NUM_SETS, NUM_NEAREST = 20, 4, 5
# Quasar's own upload button has no accessible name.
UPLOAD = """<label><q-uploader-add-trigger /><q-btn flat @click=props.pickFiles
label="upload csv, tsv, parquet or xlsx" /></label>"""
FIELDS, LARGEST = {"temperature": 0.8, "top_p": 1.0, "max_new_tokens": 200, "seed": 0}, 4096
LEGEND = [(f" {p:.1%} ", -math.log(p)) for p in (1, 0.5, 0.1, 0.01, 0.001)]
CONTROLS = ("shuffled_words", "shuffled_examples", "true_text", "token_mean", "mean")
PAGE_MODELS = ("LitSnippetWriter", "LitTextScorer")
MOST_BYTES, COOKIE = 200_000_000, "unisono_token"  # of one upload; holds the token
# The browser compiles the page's script, and its elements have inline styles.
POLICY = (
    b"default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; "
    b"frame-ancestors 'none'; base-uri 'self'; form-action 'self'"
)
EACH_COLUMN = {"sortable": True, "align": "left"}
# Heads also sort by keyboard, cells scroll, and a row's first cell opens what the row has.
HEAD = """<q-th :props=props tabindex=0 @keyup.enter="props.sort(props.col)">{{ props.col.label }}
</q-th>"""
CELL = """<q-td :props=props><component v-if="(props.row.href || props.row.opens) &&
props.col.name === props.cols[0].name" :is="props.row.href ? 'a' : 'button'" class=nicegui-link
:href=props.row.href @click="$parent.$emit('open', props.row)">{{ props.value }}</component>
<div v-else class=cell>{{ props.value }}</div></q-td>"""
View = Callable[..., Awaitable[None]]
EXPECTED = (ValueError, OSError, RuntimeError, KeyError)  # caused by users' files


def words(tag: str, text: str, classes: str = "") -> TextElement:
    """Return a new element with plain text: markup in it is shown as text."""
    return TextElement(tag=tag, text=text).classes(classes)


def facts(pairs: Iterable[tuple[str, str]]) -> None:
    """Show names and values."""
    with ui.element("dl"):
        for name, value in pairs:
            words("dt", name)
            words("dd", value)


def address(path: str, **query: Any) -> str:
    """Return the URL of a view with query values."""
    return f"{path}?{urlencode(query, doseq=True)}"


def view(function: View) -> View:
    """Return a view that shows its own errors; the traceback of an unexpected one is printed."""

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
    """Return a button whose handler fills an area below it; it is busy while the handler runs."""

    async def act() -> None:
        button.props("loading")
        result.clear()
        with result:
            await view(handler)()
        button.props(remove="loading")

    button = ui.button(label, on_click=act)
    result = ui.column().props("aria-live=polite")
    return button


def chosen_model(shelf: Shelf, args: PageArguments, *kinds: str) -> Model:
    """Return the model that the URL names, else the first of these classes, and show a field to
    choose another; ValueError if there is none."""
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
    """Return a sortable table of plain text with these columns, paged if long. A row's first cell
    names the row; it links to its "href" or, if the row "opens", emits "open"."""
    columns = [EACH_COLUMN | dict.fromkeys(("name", "label", "field"), name) for name in names]
    paged = 25 if len(rows) > 25 else None
    table = ui.table(rows=rows, columns=columns, row_key=names[0], pagination=paged)
    table.add_slot("header-cell", HEAD)
    table.add_slot("body-cell", CELL)
    table.props["aria-label"] = label  # any characters: not parsed
    return table.props("flat bordered wrap-cells role=region").classes("wide")


@view
async def runs_view(shelf: Shelf) -> None:
    """Show a table of all runs, updated as their files change."""
    words("h1", "Runs")

    def rows() -> list[dict[str, Any]]:
        entries = []
        for name, folder in shelf.runs().items():
            times = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
            entries.append(row_of(name, folder, int(time.time() // 60), *times))  # shows its age
        return entries

    async def follow() -> None:
        table.update_rows(await asyncio.to_thread(rows), clear_selection=False)

    table = rows_table(COLUMNS, await asyncio.to_thread(rows), "runs")
    ui.timer(EVERY_S, follow, immediate=False)


@functools.lru_cache(1000)
def row_of(name: str, folder: Path, *times: int) -> dict[str, Any]:
    """Return the table row of a run, cached for these times; an unreadable run says why."""
    row = {**dict.fromkeys(COLUMNS, "–"), "run": name, "href": address("/run", name=name)}
    try:
        run = report.read_run(folder, time.time())
    except (OSError, ValueError, KeyError) as error:
        return row | {"state": f"cannot be read: {error}"}
    kinds = {place.split(":")[2] for place in run.topology.get("host_rank_device", [])}
    model, best = (run.config.get("model") or {}).get("class_path", "–"), report.best_of(run)
    samples = sum(line["samples"] for line in run.steps)
    return row | {
        "family": model.rpartition(".")[2].removeprefix("Lit"),
        "state": report.ending(run)[1],
        "best": f"{run.monitor[0]} {report.shown(best[1])}" if best else "–",
        "steps": len(run.lineage),
        "samples/s": round(samples / run.seconds, 1) if run.seconds else "–",
        "devices": f"{run.topology.get('world_size', '–')} {', '.join(sorted(kinds))}",
    }


@view
async def run_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the run `name` live, with the curves of each run `beside` it in the same plots."""
    folders, query, plots = shelf.runs(), args.query_parameters, dict[str, ui.echart]()
    names = [query.get("name", ""), *query.getlist("beside")]
    if unknown := [name for name in names if name not in folders]:
        raise ValueError(f"there is no run {unknown[0]!r} here; there is {', '.join(folders)}.")

    def read() -> dict[str, report.RunRecord]:
        return {name: report.read_run(folders[name], time.time()) for name in names}

    async def prove() -> None:
        from lit_models.commands.verify import verify_run  # with torch

        proof = await asyncio.to_thread(verify_run, folders[name])
        done = sum(use.num_steps for use in proof.epochs)
        planned = sum(use.planned_steps for use in proof.epochs)
        words("p", f"{done:,} of {planned:,} steps verified.", "bad" if proof.faults else "good")
        for line in [": ".join(pair) for pair in proof.epoch_lines()] + proof.faults:
            words("p", line, "note")

    async def follow() -> None:
        fresh = await asyncio.to_thread(read)
        with figures:
            draw(fresh, plots)

    runs, name = await asyncio.to_thread(read), names[0]
    run, (state, sentence) = runs[name], report.ending(runs[name])
    words("h1", name)
    words("p", sentence, state)
    tests = [(f"test {n}", f"{v}, baseline {b}" if b else v) for n, v, b in report.tests_of(run)]
    facts(tests[:3])
    action("verify each step", prove)
    if (folders[name] / ERRORS).exists():
        ui.link("the samples that went wrong", address("/errors", name=name))
    if others := [other for other in folders if other != name]:
        field = ui.select(others, value=names[1:], multiple=True, label="runs beside it")
        field.props("use-chips").on_value_change(
            lambda event: ui.navigate.to(address(args.path, name=name, beside=event.value))
        )
    with ui.element("div").classes("figures") as figures:
        draw(runs, plots)
    for other in names[1:]:
        words("h2", f"What differs from {other}")
        columns, rows = ("what", "key", name, other), list[dict[str, str]]()
        for what, found in report.differences(run, runs[other]).items():
            rows += [dict(zip(columns, (what, *row), strict=True)) for row in found or ()]
        rows_table(columns, rows, f"differences from {other}")
    words("h2", "Facts")
    plan = ("plan", f"{run.plan.get('steps_per_epoch', '–')} steps per epoch")
    facts([*tests[3:], plan, *report.facts_of(run)])
    for warning in [*run.topology.get("warnings", []), *run.notes]:
        words("p", warning, "note")
    with ui.expansion("configuration").classes("wide"):
        words("pre", run.config_text or "There is no config.yaml.")
    if state == "warn":
        ui.timer(EVERY_S, follow, immediate=False)


def draw(runs: dict[str, report.RunRecord], plots: dict[str, ui.echart]) -> None:
    """Draw the curves of all runs into the plots, title -> plot, and add missing plots."""
    watched = dict.fromkeys(n for run in runs.values() for n in report.drawn_metrics(run)[:3])
    for drawn in report.curves(runs, [*watched, "val/loss", "throughput/samples_per_s"]):
        title = drawn["title"]
        if not any(line["steps"] for line in drawn["series"]):
            continue
        if title not in plots:
            scale = "log" if drawn["is_log"] else "value"
            options = {**PLOT, "yAxis": {"type": scale, "scale": True, "splitLine": LINE}}
            options |= {"legend": {"show": len(runs) > 1, "top": 0, "type": "scroll"}}
            with ui.element("figure"):
                words("h2", title)
                plots[title] = ui.echart(options, renderer="svg").classes("plot")
                plots[title].props("role=img").props["aria-label"] = f"{title} by step"
                words("p", drawn["note"], "note")
        plots[title].options["series"] = [
            {
                "type": "line",
                "name": line["name"],
                "data": list(zip(line["steps"], line["values"], strict=True)),
                "showSymbol": len(line["steps"]) < 60,
                "lineStyle": {"width": 1.5, "type": ("solid", "dashed", "dotted")[place % 3]},
            }
            for place, line in enumerate(drawn["series"])
        ]
        plots[title].update()


@view
async def errors_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the test errors of a run, paged and with filters, and the codes that are confused."""
    files = {n: run / ERRORS for n, run in shelf.runs().items() if (run / ERRORS).exists()}
    name = args.query_parameters.get("name") or next(iter(files), "")
    if name not in files:
        raise ValueError(f"{name!r} has no errors of a test; these have: {', '.join(files)}.")
    words("h1", f"Errors of {name}")
    contains = functools.partial(pc.match_substring, ignore_case=True)
    lines = csv.ParseOptions(newlines_in_values=True)
    types = csv.ConvertOptions(column_types=dict.fromkeys(TEXTS, "string"))
    whole = await asyncio.to_thread(csv.read_csv, files[name], None, lines, types)
    model = shelf.models("LitOccupationCoder").get(name)

    def chosen(page: dict[str, Any]) -> Any:
        selection, order = whole, "descending" if page["descending"] else "ascending"
        for column, field in fields.items():
            if field.value:
                fits = pc.greater_equal if column == "confidence" else contains
                selection = selection.filter(fits(selection[column], field.value))
        return selection.sort_by([(page["sortBy"], order)]) if page["sortBy"] else selection

    async def open_row(row: dict[str, Any]) -> None:
        title = row["input"]
        with ui.dialog(value=True) as panel, ui.card():
            panel.props["aria-label"] = title
            ui.button("close", on_click=panel.close)
            words("h2", title)
            await show_nearest(shelf, model, title)
            where = address("/code", model=name, title=title, language=row["language"])
            ui.link("its codes", where)

    async def turn(page: dict[str, Any]) -> None:
        selection = await asyncio.to_thread(chosen, page)
        size = min(page["rowsPerPage"] or MOST_ROWS, MOST_ROWS)
        rows = selection.slice((page["page"] - 1) * size, size).to_pylist()
        table.rows = [{**row, "opens": model is not None} for row in rows]
        table.pagination = {**page, "rowsPerPage": size, "rowsNumber": len(selection)}

    with ui.row(align_items="center"):
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
    if model is not None and "truth" in whole.column_names:
        confused = Counter[tuple[str, str]]()
        for row in whole.group_by(["truth", "answer"]).aggregate([([], "count_all")]).to_pylist():
            true, answer = set(row["truth"].split()), set(row["answer"].split())
            pairs = product(sorted(true - answer), sorted(answer - true))
            confused.update(dict.fromkeys(pairs, row["count_all"]))
        top = [{"true": t, "given": g, "count": n} for (t, g), n in confused.most_common(NUM_PAIRS)]
        words("h2", "Codes that are confused")
        rows_table(("true", "given", "count"), top, "confused codes")


@view
async def code_view(shelf: Shelf, args: PageArguments) -> None:
    """Show codes of titles beside the nearest training rows; take corrections and tables."""
    words("h1", "Code")
    query, folder = args.query_parameters, Path(tempfile.mkdtemp(dir=shelf.uploads))
    ui.context.client.on_delete(lambda: shutil.rmtree(folder))
    model = chosen_model(shelf, args, "LitOccupationCoder")
    module = await shelf.module(model)
    from datamodules import Columns, OccupationDataModule  # loads torch, like the module

    try:
        data = await shelf.data(model)
    except (KeyError, OSError, ValueError):  # show_nearest reports it
        data = OccupationDataModule(columns=Columns(language="language"))
    book, own = module.recipe["code_book"], data.options.columns
    named = {c: f"{c} {d}" for c, d in zip(book["codes"], book["descriptions"], strict=True)}
    names = own.codes or [f"code_{place + 1}" for place in range(book["system"]["max_codes"])]
    corrections: dict[str, tuple[str, list[str]]] = {}  # title -> its language and right codes

    async def code_titles() -> None:
        texts, spoken = list(filter(str.strip, titles.value.splitlines())), language.value
        if not 0 < len(texts) <= MOST_TITLES:
            raise ValueError(f"{len(texts)} titles: write 1 to {MOST_TITLES}; a table holds more.")
        for answer in await shelf.compute(lambda: module.code(texts, spoken, k_best=NUM_SETS)):
            words("h2", answer.text)
            each = zip(answer.codes, answer.confidences, strict=True)
            sets = [([f"{named[c]} ({p:.1%})" for c, p in each], answer.set_confidence)]
            sets += [([named[c] for c in codes], share) for codes, share in answer.next_sets]
            with ui.element("div").classes("figures"):
                facts((f"{share:.1%}", "; ".join(codes)) for codes, share in sets)
                await show_nearest(shelf, model, answer.text)
            right = ui.select(named, value=answer.codes, multiple=True, with_input=True)
            right.props('label="right codes" use-chips').classes("wide").on_value_change(
                lambda event, title=answer.text: corrections.update({title: (spoken, event.value)})
            ).on_value_change(lambda: offer.set_visibility(True))

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
        work.recipe, work.crosswalk = module.recipe, data.crosswalk
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
    offer = ui.button("download the corrections", on_click=offer_corrections)
    offer.set_visibility(False)
    words("h2", "A table")
    ui.upload(auto_upload=True, on_upload=take).classes("wide").add_slot("header", UPLOAD)


@view
async def show_nearest(shelf: Shelf, model: Model, text: str) -> None:
    """Show the training rows whose letters are nearest to those of a text."""
    data = await shelf.data(model)
    from datamodules.occupations.datamodule import NearestTexts  # loads torch

    known = await shelf.compute(shelf.once, (model.run, NearestTexts), None, NearestTexts, data)
    near = await shelf.compute(known.find, text, NUM_NEAREST)
    rows_table(list(near[0]), near, f"training rows nearest to {text}")


@view
async def search_view(shelf: Shelf, args: PageArguments) -> None:
    """Show a field for a query and the results of each method; a title opens its document."""
    words("h1", "Search")
    model = chosen_model(shelf, args, "LitRetriever", "LitRanker")
    state = words("p", "The collection is read and encoded, once …", "note").props("role=status")
    data, finders = await shelf.data(model), dict[str, Any]()
    folder = data.collection_request.folder
    for one in (*shelf.models("LitRanker").values(), model):
        with suppress(*EXPECTED if one != model else ()):  # shown when that model is chosen
            theirs = await shelf.data(one)
            if theirs.collection_request.folder == folder:
                parts = (Finder, one.weights), one.weights, Finder, await shelf.module(one), theirs
                finders[one.kind] = await shelf.compute(shelf.once, *parts)
    documents, judged = finders[model.kind].documents, finders[model.kind].grades
    state.text = f"{len(documents):,} documents{', no ranker' * ('LitRanker' not in finders)}"

    @view
    async def opened(number: int) -> None:
        from lit_models.seo.onpage import check_page

        document = documents[number]
        with ui.dialog(value=True).props("aria-label=document") as dialog, ui.card():
            ui.button("close", on_click=dialog.close)
            words("h2", document.title or document.id)
            words("pre", document.text)
            page = Path(folder or "") / document.id.replace("%20", " ")
            if data.collection.facts["format"] == "pages" and page.suffix.lower() in HTML_SUFFIXES:
                report = await shelf.compute(check_page, page.read_bytes(), document.id)
                facts((one.check, " · ".join(filter(None, one[1:]))) for one in report.findings)

    async def show() -> None:
        results, text = dict[str, Any](), query.value[:1000]
        for finder in reversed(finders.values()):
            results |= await shelf.compute(finder.find, text)
        marked = "|".join(re.findall(r"\w+", text)) or "$^"  # matches nothing
        marks = re.compile(rf"\b({marked})\b", re.IGNORECASE)
        grades = judged.get(text, {})
        with ui.element("div").classes("columns"):
            for way, hits in results.items():
                with ui.element("section").classes("nicegui-column"):
                    words("h2", way if hits else f"{way}: nothing")
                    for number, score, address, title, says in hits:
                        opens = words("button", title or address, "nicegui-link")
                        opens.on("click", functools.partial(opened, number))
                        with ui.element("p"):
                            for place, part in enumerate(marks.split(says)):
                                words("mark" if place % 2 else "span", part)
                        grade = f", grade {grades[number]:g}" if number in grades else ""
                        words("p", f"score {score:.3f}{grade}", "note")

    query = ui.input("query", autocomplete=list(judged)[:200]).classes("wide")
    button = action("search", show)
    query.on("keydown.enter", js_handler=f"() => getHtmlElement({button.id}).click()")


@view
async def language_view(shelf: Shelf) -> None:
    """Show fields for a prompt, and what one model or several write next."""
    words("h1", "Language model")
    models, talks = shelf.models("LitCausalLM"), dict[str, list[Any]]()
    if not models:
        raise ValueError("there is no language model here; show the folder of a run of one.")
    chosen = ui.select(list(models), value=list(models)[:1], multiple=True, label="models")
    text = ui.textarea("text").props("autogrow").classes("wide")
    with ui.row(align_items="center"):
        fields = {n: ui.number(n.replace("_", " "), value=v, min=0) for n, v in FIELDS.items()}
        chat = ui.switch("chat", on_change=lambda: talks.clear())

    async def show(writes: bool) -> None:
        options = {n: type(v)(fields[n].value or 0) for n, v in FIELDS.items()}
        if (most := options["max_new_tokens"]) > LARGEST:
            raise ValueError(f"max new tokens is {most:,}; write at most {LARGEST:,} at a time.")
        with ui.element("div").classes("figures"):
            for name in chosen.value:
                with ui.element("section"):
                    words("h2", name)
                    talk = talks.setdefault(name, []) if chat.value else None
                    await answer(shelf, models[name], text.value, talk, writes and options)

    with ui.row(align_items="center"):
        action("write", lambda: show(True))
        action("rate each token", lambda: show(False))
    module = await shelf.module(models[chosen.value[0]])
    chat.set_visibility(module.tokenizer.chat_template is not None)


@view
async def answer(shelf: Shelf, model: Model, text: str, talk: Any, options: Any) -> None:
    """Show the probability of each token; with `options`, stream an answer first."""
    module, token_ids = await shelf.module(model), list[list[int]]()
    prompt = text if talk is None else [*talk, {"role": "user", "content": text}]
    if options:
        stop = ui.button("stop", on_click=lambda: stop.set_visibility(False))
        shown = words("p", "", "tokens").props("aria-busy=true")

        def hear(rows: list[list[int]]) -> bool:
            token_ids[:] = rows
            return stop.is_deleted or not stop.visible

        writing = shelf.compute(lambda: module.generate([prompt], hear, **options))
        task = asyncio.create_task(writing)
        while not task.done():
            await asyncio.wait([task], timeout=0.1)
            shown.set_text(module.tokenizer.decode_continuation(token_ids[0] if token_ids else []))
        stop.delete()
        shown.delete()
        [written] = task.result()
        if talk is not None:
            talk[:] = [*prompt, {"role": "assistant", "content": written}]
    for tokens in (LEGEND, await shelf.compute(module.token_nats, prompt, *token_ids[:1])):
        with ui.element("p").classes("tokens"):
            for piece, nats in tokens:
                token = words("mark", piece).style(f"--share: {min(6 * nats, 40):.0f}%")
                known = "first" if math.isnan(nats) else f"{math.exp(-nats):.2%}"
                token.props(f'title="{known}"')


@view
async def lens_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the tokens of a text as buttons, and explain the activation at the chosen one."""
    words("h1", "Lens")
    model = chosen_model(shelf, args, "LitConsistencyLens")
    text = ui.textarea("text").props("autogrow").classes("wide")
    heat = ui.number("temperature of the samples", value=1.0, min=0, step=0.1)

    async def show_tokens() -> None:
        module, data = await shelf.module(model), await shelf.data(model)
        prompt, decode = text.value, module.tokenizer.decode_continuation
        pieces = [decode([i], skip_special_tokens=False) for i in module.tokenizer.encode(prompt)]

        async def explain(event: Any) -> None:
            shown.clear()
            with shown:
                where = (data, prompt, event.value - len(pieces), heat.value or 0)
                texts, fve = await shelf.compute(module.reading, *where)
                facts((name, f"{text} (FVE {fve[name]:.3f})") for name, text in texts.items())
                words("p", "FVE of the activation rebuilt from each control", "note")
                facts((name.replace("_", " "), f"{fve[name]:.3f}") for name in CONTROLS)

        ui.toggle(dict(enumerate(pieces)), on_change=view(explain)).props("unelevated")
        shown = ui.column().props("aria-live=polite")

    action("show its tokens", show_tokens)


@view
async def pages_view(shelf: Shelf) -> None:
    """Show a field for the text of a page, and the titles and scores that models give it."""
    words("h1", "Pages")
    text = ui.textarea("text of a page").props("autogrow").classes("wide")

    async def show() -> None:
        with ui.element("div").classes("figures"):
            for name, model in shelf.models(*PAGE_MODELS).items():
                with ui.element("section").classes("nicegui-column"):
                    words("h2", name)
                    await show_page(shelf, model, text.value)

    action("write and score", show)


@view
async def show_page(shelf: Shelf, model: Model, text: str) -> None:
    """Show the title that a model writes for a page, or its scores."""
    module = await shelf.module(model)
    if model.kind == "LitSnippetWriter":
        words("p", *await shelf.compute(module.write, [text]))
    else:
        scores = await shelf.compute(module.score, [text])
        first = {name: values[0].tolist() for name, values in scores.items()}
        facts(module.in_words(first).items())


@view
async def translate_view(shelf: Shelf, args: PageArguments) -> None:
    """Show a field for texts, and the translation of each with its probability."""
    words("h1", "Translate")
    module = await shelf.module(chosen_model(shelf, args, "LitSeq2Seq"))
    given = ui.textarea("texts, one on each line").props("autogrow").classes("wide")
    beams = ui.number("beams", value=module.decoding.num_beams, min=1)

    async def show() -> None:
        texts = list(filter(str.strip, given.value.splitlines()))
        if not 0 < len(texts) <= MOST_TITLES:
            raise ValueError(f"{len(texts)} texts: write 1 to {MOST_TITLES}.")
        options = {"num_beams": int(beams.value or 1)}
        translations = await shelf.compute(lambda: module.translations(texts, **options))
        pairs = zip(texts, translations, strict=True)
        rows = [{"text": a, "becomes": b, "probability": f"{p:.1%}"} for a, (b, p) in pairs]
        rows_table(("text", "becomes", "probability"), rows, "translations")

    action("translate", show)


# Path -> view, its name, the classes of the models that it shows.
VIEWS: dict[str, tuple[View, str, set[str]]] = {
    "/": (runs_view, "Runs", set()),
    "/run": (run_view, "", set()),
    "/code": (code_view, "Code", {"LitOccupationCoder"}),
    "/search": (search_view, "Search", {"LitRetriever", "LitRanker"}),
    "/language": (language_view, "Language", {"LitCausalLM"}),
    "/lens": (lens_view, "Lens", {"LitConsistencyLens"}),
    "/pages": (pages_view, "Pages", set(PAGE_MODELS)),
    "/translate": (translate_view, "Translate", {"LitSeq2Seq"}),
    "/errors": (errors_view, "Errors", set()),
}


def page(shelf: Shelf) -> None:
    """Builds the page of one visitor."""
    ui.add_css(Path(__file__).parent / "page.css")
    runs, kinds = shelf.runs().values(), {model.kind for model in shelf.models().values()}
    fits = {"/": bool(runs), "/errors": any((run / ERRORS).exists() for run in runs)}
    with ui.header(fixed=False):
        words("strong", "Unisono")
        words("small", str(shelf.place))
        with ui.element("nav").props("aria-label=views"):
            for path, (_, name, shown) in VIEWS.items():
                if shown & kinds or fits.get(path):
                    ui.link(name, path)
    ui.sub_pages({path: make for path, (make, *_) in VIEWS.items()}, data={"shelf": shelf})


class Guard:
    """Middleware that refuses other sites, large uploads and, unless `token` is "", visitors who do
    not bring it in the URL or later in a cookie; browsers load nothing from elsewhere."""

    def __init__(self, app: Any, token: str) -> None:
        self.app, self.token = app, token

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answers one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        request = HTTPConnection(scope)
        origin, offered = request.headers.get("origin"), request.query_params.get("token", "")
        cookie, token = request.cookies.get(COOKIE, "").encode(), self.token.encode()
        brings_nothing = scope.get("method", "GET") in ("GET", "HEAD")
        size = request.headers.get("content-length", "0" if brings_nothing else "")
        answer: Response | None = None
        if origin is not None and origin.partition("://")[2] != request.headers.get("host"):
            answer = PlainTextResponse(f"A page of {origin} may not query this one.", 403)
        elif not (size.isdecimal() and int(size) <= MOST_BYTES):
            answer = PlainTextResponse(f"An upload needs a length, at most {MOST_BYTES:,}.", 413)
        elif token and compare_digest(offered.encode(), token):
            answer = RedirectResponse("/" + scope["path"].lstrip("/"))  # "//name" is another site
            answer.set_cookie(COOKIE, offered, httponly=True, samesite="strict")
        elif token and not compare_digest(cookie, token):
            answer = PlainTextResponse("Open the address with the token that was printed.", 401)

        async def send_with_policy(message: Any) -> None:
            if message["type"] == "http.response.start":
                policy = (b"content-security-policy", POLICY)
                message["headers"] = [*message.get("headers", ()), policy]
            await send(message)

        await (answer or self.app)(scope, receive, send_with_policy)
