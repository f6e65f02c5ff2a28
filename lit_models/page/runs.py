"""Runs: a live table of all; curves, facts, proof and configuration of one, or of several."""

import asyncio
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from nicegui import PageArguments, ui

from lit_models.commands.report import (
    RunRecord,
    best_of,
    chart,
    differences,
    drawn_metrics,
    ending,
    facts_of,
    read_run,
    shown,
    tests_of,
)
from lit_models.page.parts import action, facts, rows_table, view, words
from lit_models.page.shelf import Shelf

EVERY_S = 2.0  # between two looks at the runs' files
COLUMNS = ("run", "family", "state", "best", "steps", "samples/s", "devices")
LINK = """<q-td :props=props><a :href="'/run?name=' + encodeURIComponent(props.value)">
{{ props.value }}</a></q-td>"""
CURVES = {"Training loss": "loss", "Gradient norm": "grad_norm", "Learning rate": "learning_rate"}
COLOURS = ("#2f7ebc", "#c9622a", "#1f8a66", "#9a57a3", "#8a7a1f", "#b3446c")
LINE = {"lineStyle": {"color": "rgba(128, 128, 128, 0.25)"}}


@view
async def runs_view(shelf: Shelf) -> None:
    """Show the table of all runs, which follows their files."""
    words("h1", "Runs")
    known: dict[str, tuple[Any, dict[str, Any]]] = {}  # name -> times of its files, its row

    def rows() -> list[dict[str, Any]]:
        folders = shelf.runs()
        for name, folder in folders.items():
            times = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
            if name not in known or known[name][0] != times:
                known[name] = times, row_of(name, folder)
        return [known[name][1] for name in folders]

    async def follow() -> None:
        table.update_rows(await asyncio.to_thread(rows), clear_selection=False)

    table = rows_table(COLUMNS, await asyncio.to_thread(rows), "runs")
    table.add_slot("body-cell-run", LINK)
    ui.timer(EVERY_S, follow, immediate=False)


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the row of a run; one that cannot be read says why."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "–") | {"run": name}
    try:
        record = read_run(folder, time.time())
    except (OSError, ValueError, KeyError) as error:
        return row | {"state": f"cannot be read: {error}"}
    model = (record.config.get("model") or {}).get("class_path", "–")
    samples, top = sum(line["samples"] for line in record.steps), record.topology
    row["family"] = model.rpartition(".")[2].removeprefix("Lit")
    row |= {"state": ending(record)[1], "steps": len(record.lineage)}
    places = {place.rpartition(":")[2] for place in top.get("host_rank_device", [])}
    row["devices"] = f"{top.get('world_size', '–')} {', '.join(sorted(places))}"
    if best := best_of(record):
        row["best"] = f"{record.monitor[0]} {shown(best[1])}"
    if record.seconds:
        row["samples/s"] = round(samples / record.seconds, 1)
    return row


@view
async def run_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the run `name`, and over its curves those of each run `beside` it, live."""
    folders, query = shelf.runs(), args.query_parameters
    names = [query.get("name", ""), *query.getlist("beside")]
    if unknown := [name for name in names if name not in folders]:
        raise ValueError(f"there is no run {unknown[0]!r} here; there is {', '.join(folders)}.")

    def read() -> dict[str, RunRecord]:
        return {name: read_run(folders[name], time.time()) for name in names}

    def beside(event: Any) -> None:
        chosen = [("name", name), *(("beside", other) for other in event.value)]
        ui.navigate.to(f"{args.path}?{urlencode(chosen)}")

    async def follow() -> None:
        fresh = await asyncio.to_thread(read)
        for place, drawn in zip(charts, curves(fresh), strict=False):
            place.options["series"] = options_of(drawn)["series"]
            place.update()

    def checked() -> Any:
        from lit_models.commands.verify import verify_run  # with torch: the page starts without

        return verify_run(folders[name])

    async def prove() -> None:
        proof = await asyncio.to_thread(checked)
        planned = sum(use.planned_steps for use in proof.epochs)
        state = "bad" if proof.faults else "good"
        words("p", f"{proof.num_steps:,} of {planned:,} steps verified.", state)
        for line in [": ".join(pair) for pair in proof.epoch_lines()] + proof.faults:
            words("p", line, "note")

    runs, name = await asyncio.to_thread(read), names[0]
    run, (state, sentence) = runs[name], ending(runs[name])
    words("h1", name)
    words("p", sentence, state)
    tests = [(f"test {n}", f"{v}, baseline {b}" if b else v) for n, v, b in tests_of(run)]
    facts(tests[:3])
    action("verify each step", prove)
    if (folders[name] / "errors-test.csv").exists():
        ui.link("the samples that went wrong", f"/errors?{urlencode({'name': name})}")
    if others := [other for other in folders if other != name]:
        field = ui.select(others, value=names[1:], multiple=True, label="runs beside it")
        field.props("outlined dense use-chips").classes("field").on_value_change(beside)
    with ui.element("div").classes("figures"):
        charts = [figure(drawn) for drawn in curves(runs)]
    for other in names[1:]:
        words("h2", f"What differs from {other}")
        found = differences(run, runs[other]).items()
        columns = ("what", "key", name, other)
        rows = [
            dict(zip(columns, (k, *row), strict=True)) for k, more in found for row in more or ()
        ]
        rows_table(columns, rows, f"differences from {other}")
    if tests[3:]:
        with ui.expansion("all results of the test").classes("wide"):
            facts(tests)
    words("h2", "Facts")
    per_epoch = run.plan.get("steps_per_epoch")
    facts([("plan", f"{per_epoch} steps per epoch")] * (per_epoch is not None) + facts_of(run))
    for warning in [*run.topology.get("warnings", []), *run.notes]:
        words("p", warning, "note")
    with ui.expansion("configuration").classes("wide"):
        words("pre", run.config_text or "There is no config.yaml.")
    if state == "warn":
        ui.timer(EVERY_S, follow, immediate=False)


def curves(runs: dict[str, RunRecord]) -> list[dict[str, Any]]:
    """Return the charts of one run, or of several over each other."""
    names = dict.fromkeys(metric for run in runs.values() for metric in drawn_metrics(run)[:3])
    drawn = {
        title: {n: run.series(key) for n, run in runs.items()} for title, key in CURVES.items()
    }
    for name in (*names, "val/loss", "throughput/samples_per_s"):
        drawn[name] = {n: run.metrics.get(name, []) for n, run in runs.items()}
    is_log = {title: key != "learning_rate" for title, key in CURVES.items()}
    return [
        chart(t, lines, is_log.get(t, False)) for t, lines in drawn.items() if any(lines.values())
    ]


def figure(drawn: dict[str, Any]) -> ui.echart:
    """Return a chart that zooms, below its title."""
    with ui.element("figure"):
        words("h2", drawn["title"])
        place = ui.echart(options_of(drawn), renderer="svg").classes("plot")
        place.props("role=img").props["aria-label"] = f"{drawn['title']} by step"
        words("p", drawn["note"], "note")
    return place


def options_of(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return ECharts' options of a chart of the report."""
    lines = [
        {
            "type": "line",
            "name": line["name"],
            "data": list(zip(line["steps"], line["values"], strict=True)),
            "showSymbol": len(line["steps"]) < 60,
            "lineStyle": {"width": 1.5, "type": ("solid", "dashed", "dotted")[place % 3]},
        }
        for place, line in enumerate(drawn["series"])
    ]
    scale = {"type": "log" if drawn["is_log"] else "value", "scale": True, "splitLine": LINE}
    return {
        "animation": False,
        "color": COLOURS,
        "grid": {"left": 56, "right": 16, "top": 28, "bottom": 56},
        "legend": {"show": len(lines) > 1, "top": 0, "type": "scroll"},
        "tooltip": {"trigger": "axis"},
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "splitLine": {"show": False},
        },
        "yAxis": scale,
        "dataZoom": [{"type": "inside"}, {"type": "slider", "height": 16, "bottom": 8}],
        "series": lines,
    }
