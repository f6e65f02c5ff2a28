"""Runs: a live table of all; curves, facts, proof and configuration of one, or of several."""

import asyncio
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

from nicegui import PageArguments, ui

from lit_models.commands import report
from lit_models.page.codes import ERRORS
from lit_models.page.parts import action, address, facts, rows_table, view, words
from lit_models.page.shelf import Shelf

EVERY_S = 2.0  # between two looks at the runs' files
COLUMNS = ("run", "family", "state", "best", "steps", "samples/s", "devices")
LINE = {"lineStyle": {"color": "rgba(128, 128, 128, 0.25)"}}
PLOT = {  # options of ECharts that all plots have
    "animation": False,
    "color": ["#2f7ebc", "#c9622a", "#1f8a66", "#9a57a3", "#8a7a1f", "#b3446c"],
    "grid": {"left": 56, "right": 16, "top": 28, "bottom": 56},
    "tooltip": {"trigger": "axis"},
    "xAxis": {"type": "value", "min": "dataMin", "max": "dataMax", "splitLine": {"show": False}},
    "dataZoom": [{"type": "inside"}, {"type": "slider", "height": 16, "bottom": 8}],
}


@view
async def runs_view(shelf: Shelf) -> None:
    """Show the table of all runs, which follows their files."""
    words("h1", "Runs")

    def rows() -> list[dict[str, Any]]:
        found = []
        for name, folder in shelf.runs().items():
            times = [path.stat().st_mtime_ns for path in sorted(folder.iterdir())]
            found.append(row_of(name, folder, int(time.time() // 60), *times))  # it says its age
        return found

    async def follow() -> None:
        table.update_rows(await asyncio.to_thread(rows), clear_selection=False)

    table = rows_table(COLUMNS, await asyncio.to_thread(rows), "runs")
    ui.timer(EVERY_S, follow, immediate=False)


@lru_cache(1000)
def row_of(name: str, folder: Path, *times: int) -> dict[str, Any]:
    """Return the row of a run, read once for these times; one that cannot be read says why."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "–")
    row |= {"run": name, "href": address("/run", name=name)}
    try:
        run = report.read_run(folder, time.time())
    except (OSError, ValueError, KeyError) as error:
        return row | {"state": f"cannot be read: {error}"}
    model = (run.config.get("model") or {}).get("class_path", "–")
    row["family"] = model.rpartition(".")[2].removeprefix("Lit")
    row |= {"state": report.ending(run)[1], "steps": len(run.lineage)}
    places = {place.rpartition(":")[2] for place in run.topology.get("host_rank_device", [])}
    row["devices"] = f"{run.topology.get('world_size', '–')} {', '.join(sorted(places))}"
    if best := report.best_of(run):
        row["best"] = f"{run.monitor[0]} {report.shown(best[1])}"
    if run.seconds:
        samples = sum(line["samples"] for line in run.steps)
        row["samples/s"] = round(samples / run.seconds, 1)
    return row


@view
async def run_view(shelf: Shelf, args: PageArguments) -> None:
    """Show the run `name`, and over its curves those of each run `beside` it, live."""
    folders, query, plots = shelf.runs(), args.query_parameters, dict[str, ui.echart]()
    names = [query.get("name", ""), *query.getlist("beside")]
    if unknown := [name for name in names if name not in folders]:
        raise ValueError(f"there is no run {unknown[0]!r} here; there is {', '.join(folders)}.")

    def read() -> dict[str, report.RunRecord]:
        return {name: report.read_run(folders[name], time.time()) for name in names}

    async def prove() -> None:
        from lit_models.commands.verify import verify_run  # with torch

        proof = await asyncio.to_thread(verify_run, folders[name])
        planned = sum(use.planned_steps for use in proof.epochs)
        state = "bad" if proof.faults else "good"
        words("p", f"{proof.num_steps:,} of {planned:,} steps verified.", state)
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
    """Draw the curves of runs over each other in the plot of each title, or in a new one."""
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
