"""Runs: a live table of all, and the curves, facts, proof and configuration of one or several."""

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
    ending,
    facts_of,
    read_run,
    shown,
    tests_of,
)
from lit_models.commands.verify import verify_run
from lit_models.page.parts import action, facts, rows_table, view, words
from lit_models.page.shelf import Shelf

EVERY_S = 2.0  # between two looks at the runs' files
COLOURS = ("#2f7ebc", "#c9622a", "#1f8a66", "#9a57a3", "#8a7a1f", "#b3446c")
LINE = {"lineStyle": {"color": "rgba(128, 128, 128, 0.25)"}}
RUN_COLUMNS = ("run", "family", "state", "best", "steps", "per second", "devices")


@view
async def runs_view(shelf: Shelf) -> None:
    """Show the table of all runs, which follows their files."""
    words("h1", "Runs")
    known: dict[str, tuple[Any, dict[str, Any]]] = {}  # name -> times of its files, its row

    def rows() -> list[dict[str, Any]]:
        folders = shelf.runs()
        for name, folder in folders.items():
            times = tuple(p.stat().st_mtime_ns for p in sorted(folder.iterdir()) if p.is_file())
            if name not in known or known[name][0] != times:
                known[name] = times, row_of(name, folder)
        return [known[name][1] for name in folders]

    table = rows_table(RUN_COLUMNS, await asyncio.to_thread(rows), "runs")
    # The name opens the run; a key does too, since it is a link.
    table.add_slot(
        "body-cell-run",
        "<q-td :props=props><a :href=\"'/run?name=' + encodeURIComponent(props.value)\">"
        "{{ props.value }}</a></q-td>",
    )

    async def follow() -> None:
        table.update_rows(await asyncio.to_thread(rows), clear_selection=False)

    ui.timer(EVERY_S, follow, immediate=False)


def row_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the row of a run; one that cannot be read says why."""
    row: dict[str, Any] = dict.fromkeys(RUN_COLUMNS, "–") | {"run": name}
    try:
        record = read_run(folder, time.time())
    except (OSError, ValueError, KeyError) as error:
        return row | {"state": f"cannot be read: {error}"}
    model = (record.config.get("model") or {}).get("class_path", "–")
    best, seconds = best_of(record), record.seconds
    samples = sum(line["samples"] for line in record.steps)
    top = record.topology
    return row | {
        "family": model.rpartition(".")[2].removeprefix("Lit"),
        "state": ending(record)[1],
        "best": f"{record.monitor[0]} {shown(best[1])}" if best else "–",
        "steps": len(record.lineage),
        "per second": f"{samples / seconds:,.1f} samples" if seconds else "–",
        "devices": f"{top.get('world_size', '–')} {top.get('strategy', '')}",
    }


@view
async def run_view(shelf: Shelf, args: PageArguments) -> None:
    """Show one run, and beside it those that are named with it, live."""
    folders, query = shelf.runs(), args.query_parameters
    names = [query.get("name", ""), *query.getlist("beside")]
    if unknown := [name for name in names if name not in folders]:
        raise ValueError(f"there is no run {unknown[0]!r} here; there is {', '.join(folders)}.")
    records = [await asyncio.to_thread(read_run, folders[name], time.time()) for name in names]
    first, name = records[0], names[0]
    words("h1", name)
    kind, sentence = ending(first)
    words("p", sentence, kind)
    tests = [(f"test {n}", f"{v}, baseline {b}" if b else v) for n, v, b in tests_of(first)]
    facts(tests[:3])
    if others := [other for other in folders if other != name]:

        def beside(event: Any) -> None:
            ui.navigate.to(
                args.path + "?" + "&".join(f"beside={n}" for n in event.value) + f"&name={name}"
            )

        ui.select(others, value=names[1:], multiple=True, label="beside it", on_change=beside)
    charts: list[ui.echart] = []
    with ui.element("div").classes("figures"):
        for drawn in curves(records, names):
            charts.append(figure(drawn))
    proof_section(folders[name])
    if len(records) > 1:
        difference_sections(records, names)
    if (folders[name] / "errors-test.csv").exists():
        ui.link("the samples that went wrong", f"/errors?{urlencode({'name': name})}")
    words("h2", "Facts")
    facts(facts_of(first))
    for warning in [*first.topology.get("warnings", []), *first.notes]:
        words("p", warning, "note")
    with ui.expansion("configuration").classes("wide"):
        words("pre", first.config_text or "There is no config.yaml.")

    async def follow() -> None:
        fresh = [await asyncio.to_thread(read_run, folders[one], time.time()) for one in names]
        for place, drawn in zip(charts, curves(fresh, names), strict=False):
            place.options["series"] = options_of(drawn)["series"]
            place.update()

    if kind == "warn":
        ui.timer(EVERY_S, follow, immediate=False)


def proof_section(folder: Path) -> None:
    """Show a button that holds ledger, plan and checkpoints against each other."""

    async def prove() -> None:
        proof = await asyncio.to_thread(verify_run, folder)
        planned = sum(use.planned_steps for use in proof.epochs)
        words(
            "p", f"{proof.num_steps:,} of {planned:,} steps verified.", "good" * (not proof.faults)
        )
        for line in [": ".join(pair) for pair in proof.epoch_lines()] + proof.faults:
            words("p", line, "note")

    words("h2", "Proof")
    with ui.element("div").classes("row"):
        action("verify each step", prove)


def difference_sections(records: list[RunRecord], names: list[str]) -> None:
    """Show what each other run differs in from the first."""
    for record, name in zip(records[1:], names[1:], strict=True):
        words("h2", f"What differs from {name}")
        rows = [
            {"what": aspect, "key": key, names[0]: one, name: other}
            for aspect, found in differences(records[0], record).items()
            for key, one, other in found or ()
        ]
        rows_table(("what", "key", names[0], name), rows, f"differences from {name}")


def curves(records: list[RunRecord], names: list[str]) -> list[dict[str, Any]]:
    """Return the charts of one run or of several over each other."""

    def of(key: str) -> dict[str, Any]:
        return {n: p for n, r in zip(names, records, strict=True) if (p := r.series(key))}

    losses = of("loss")
    evaluated: dict[str, dict[str, Any]] = {}
    for name, record in zip(names, records, strict=True):
        for metric, points in record.evaluated.items():
            if metric.startswith("val/") and len(points) > 1:
                evaluated.setdefault(metric, {})[name] = points
    speeds = {
        n: [(ln["step"], ln["samples_per_s"]) for ln in r.throughput if "samples_per_s" in ln]
        for n, r in zip(names, records, strict=True)
    }
    watched = records[0].monitor[0]
    order = sorted(evaluated, key=lambda metric: (metric != watched, metric != "val/loss", metric))
    return [
        chart("Training loss", losses, True),
        *(chart(metric, evaluated[metric]) for metric in order[:3]),
        chart("Learning rate", of("learning_rate")),
        chart("Gradient norm", of("grad_norm"), True),
        chart("Samples per second", {n: p for n, p in speeds.items() if p}),
    ]


def figure(drawn: dict[str, Any]) -> ui.echart:
    """Return a chart that zooms, with its title."""
    with ui.element("figure"):
        words("h2", drawn["title"])
        place = ui.echart(options_of(drawn), renderer="svg").style("height: 15rem")
        place.props(f'role=img aria-label="{drawn["title"]} by step"')
        if drawn["note"]:
            words("p", drawn["note"], "note")
    return place


def options_of(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return ECharts' options of a chart of the report."""
    series = [
        {
            "type": "line",
            "name": line["name"],
            "data": list(zip(line["steps"], line["values"], strict=True)),
            "showSymbol": len(line["steps"]) < 60,
            "lineStyle": {"width": 1.5, "type": ("solid", "dashed", "dotted")[place % 3]},
        }
        for place, line in enumerate(drawn["series"])
    ]
    return {
        "animation": False,
        "color": COLOURS,
        "grid": {"left": 56, "right": 16, "top": 28, "bottom": 56},
        "legend": {"show": len(series) > 1, "top": 0, "type": "scroll"},
        "tooltip": {"trigger": "axis"},
        "xAxis": {
            "type": "value",
            "min": "dataMin",
            "max": "dataMax",
            "splitLine": {"show": False},
        },
        "yAxis": {"type": "log" if drawn["is_log"] else "value", "scale": True, "splitLine": LINE},
        "dataZoom": [{"type": "inside"}, {"type": "slider", "height": 16, "bottom": 8}],
        "series": series,
    }
