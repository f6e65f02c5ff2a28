"""The page of two runs: what differs, then both in each chart."""

from lit_models.reporting.chart import chart
from lit_models.reporting.compare import (
    Difference,
    common_metrics,
    differences,
    family_of,
    last_of,
    loss_gap,
)
from lit_models.reporting.curves import Series
from lit_models.reporting.markup import Html, joined, table, tag
from lit_models.reporting.outcome import total_seconds, typical_seconds
from lit_models.reporting.page import page, section
from lit_models.reporting.reading import Points, RunRecord, ledger_series, monitored
from lit_models.reporting.run_page import drawn_metrics, state
from lit_models.reporting.wording import counted, duration, shown

MOST_METRICS = 6


def compare_page(first: RunRecord, second: RunRecord) -> str:
    """Return the page of two runs."""
    names = labels(first, second)
    found = differences(first, second)
    sections = [
        section("What differs", *_differing(found, names), wide=True),
        section("Curves", *_curves(first, second, names), wide=True),
        section("Final values", *_finals(first, second, names), wide=True),
        *(_configuration(run, name) for run, name in zip((first, second), names, strict=True)),
    ]
    title = f"{names[0]} and {names[1]} · Unisono"
    return page(title, _header(first, second, names, found), sections)


def labels(first: RunRecord, second: RunRecord) -> tuple[str, str]:
    """Return the names of the runs, with their folders where they are the same."""
    if first.name != second.name:
        return first.name, second.name
    return str(first.folder), str(second.folder)


def verdict(found: list[Difference]) -> str:
    """Return in a sentence what differs, what is the same, and what was not written down."""
    differs = [
        f"{one.aspect} ({counted(len(one.rows), 'key')})" if one.aspect == "configuration"
        else one.aspect for one in found if one.is_known and one.rows
    ]  # fmt: skip
    same = [one.aspect for one in found if one.is_known and not one.rows]
    unknown = [one.aspect for one in found if not one.is_known]
    parts = [f"They differ in {_listed(differs)}." if differs else "Nothing known differs."]
    if same:
        parts.append(f"The same: {_listed(same)}.")
    if unknown:
        parts.append(f"Not written down by both: {_listed(unknown)}.")
    return " ".join(parts)


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _header(
    first: RunRecord, second: RunRecord, names: tuple[str, str], found: list[Difference]
) -> Html:
    lines = [
        tag("p", tag("i", class_=f"key c{place}", aria_hidden="true"), tag("b", name), " ",
            state(run))
        for place, run, name in zip((1, 2), (first, second), names, strict=True)
    ]  # fmt: skip
    families = [family_of(run) for run in (first, second)]
    other = None
    if families[0] != families[1]:
        other = tag("p", f"These train different things, {families[0]} and {families[1]}: only "
                    "what both have is compared, and losses may not be comparable.")  # fmt: skip
    gap = loss_gap(first, second)
    close = None
    if gap is not None:
        far = f"differ by at most {gap[0]:.1e}, relatively" if gap[0] else "are the same bits"
        close = tag("p", "Both follow the same plan: each step has the same samples. Over "
                    f"{counted(gap[1], 'common step')} the losses {far}.")  # fmt: skip
    return joined([
        tag("p", "Unisono · two runs", class_="eyebrow"),
        tag("h1", f"{names[0]} and {names[1]}"),
        tag("p", verdict(found), class_="lead"),
        close, other,
        tag("div", *lines, class_="runs"),
    ])  # fmt: skip


def _differing(found: list[Difference], names: tuple[str, str]) -> list[Html]:
    rows = [
        [one.aspect if place == 0 else "", tag("code", row[0]), row[1], row[2]]
        for one in found
        if one.is_known
        for place, row in enumerate(one.rows)
    ]
    if not rows:
        return [tag("p", "Nothing that both runs wrote down.")]
    return [table(["", "what", *names], rows, "what differs", texts=4)]


def _curves(first: RunRecord, second: RunRecord, names: tuple[str, str]) -> list[Html]:
    runs = (first, second)

    def both(title: str, points: list[Points], dotted: bool, may_be_log: bool = False) -> Html:
        series = [Series(name, found, dotted, place)
                  for place, name, found in zip((1, 2), names, points, strict=True)]  # fmt: skip
        return chart(title, series, may_be_log=may_be_log)

    ledger = {"Training loss": "loss", "Learning rate": "learning_rate",
              "Gradient norm": "grad_norm", "Seconds per step": "seconds"}  # fmt: skip
    charts = [both(title, [ledger_series(run, key) for run in runs], False, key != "learning_rate")
              for title, key in ledger.items()]  # fmt: skip
    common, _ = common_metrics(first, second)
    watched = [found[0] for run in runs if (found := monitored(run))]
    drawn = {n for run in runs for n in [*drawn_metrics(run), "val/loss"]} & set(common)
    chosen = sorted(drawn, key=lambda n: (n not in watched, n != "val/loss", n))
    metrics = [both(name, [run.metrics[name] for run in runs], True) for name in chosen]
    out = [tag("div", *charts[:1], *metrics[:1], *charts[1:], *metrics[1:MOST_METRICS],
               class_="charts")]  # fmt: skip
    if metrics[MOST_METRICS:]:
        words = tag("summary", f"{len(metrics) - MOST_METRICS} more metrics")
        out.append(tag("details", words, tag("div", *metrics[MOST_METRICS:], class_="charts")))
    return out


def _finals(first: RunRecord, second: RunRecord, names: tuple[str, str]) -> list[Html]:
    runs = (first, second)
    common, num_single = common_metrics(first, second)
    rows = [
        ["steps", *(shown(len(run.lineage)) for run in runs), ""],
        ["training time", *(duration(total_seconds(run)) for run in runs), ""],
        ["median seconds per step", *(shown(typical_seconds(run)) for run in runs), ""],
        _row("train/loss", *(last_of(ledger_series(run, "loss")) for run in runs)),
        *(_row(name, *(last_of(run.metrics[name]) for run in runs)) for name in common),
    ]
    out = [table(["last value", *names, "difference"], rows, "final values")]
    if num_single:
        words = f"{counted(num_single, 'metric')} that only one of them has left out."
        out.append(tag("p", words, class_="note"))
    return out


def _row(name: str, first: float | None, second: float | None) -> list[str]:
    difference = "" if first is None or second is None else shown(second - first, 3)
    if difference and difference[0].isdigit() and difference != "0":
        difference = f"+{difference}"
    return [name, shown(first), shown(second), difference]


def _configuration(run: RunRecord, name: str) -> Html:
    command = run.topology.get("command") or "The command line was not written down."
    text = tag("details", tag("summary", run.config_name), tag("pre", run.config_text))
    return section(name, tag("pre", command), text if run.config_text else None)
