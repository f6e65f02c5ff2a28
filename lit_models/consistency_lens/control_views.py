"""The tables of a test as a terminal shows them, at most 80 columns wide."""

from rich.table import Table

from datamodules.activations.attributes import ALL
from lit_models.consistency_lens.controls import Row

Rows = dict[str, Row]
COLUMNS = {
    "fve": "FVE",
    "interval": "95 %",
    "unit_fve": "unit FVE",
    "kl_recovered": "KL rec.",
    "next_nats": "CE diff.",
}


def rendered(rows: Rows, group: str) -> Table:
    """Return the table of controls as it is printed, at most 80 columns wide."""
    shown = _table("controls" if group == ALL else f"controls: {group}")
    shown.add_column("rebuilt from")
    for name in COLUMNS.values():
        shown.add_column(name, justify="right")
    for row, values in rows.items():
        interval = f"{_number(values['fve_low'])} to {_number(values['fve_high'])}"
        texts = [_number(values[name]) for name in COLUMNS if name != "interval"]
        shown.add_row(row, texts[0], interval, *texts[1:])
    own = rows["greedy"]
    shown.caption = (
        f"greedy is {own['excess']:.3f} ({own['excess_low']:.3f} to {own['excess_high']:.3f}) "
        f"above token_mean; {own['count']:.0f} activations"
    )
    return shown


def legibility_table(rows: Rows, legible: Row, attributes: Rows, group: str) -> Table:
    """Return the table of what readers get, apart from what is rebuilt; 80 columns wide."""
    shown = _table("legibility" if group == ALL else f"legibility: {group}")
    shown.add_column("of greedy explanations")
    shown.add_column("", justify="right")
    shown.add_column("of another activation", justify="right")
    shown.add_column("known", justify="right")
    shown.add_row("nats per word under the subject", _number(legible["text_nats"]))
    shown.add_row("share of distinct ones", _number(legible["distinct"]))
    if "separate_reader" in rows:
        fve = rows["separate_reader"]["fve"]
        shown.add_row("FVE of a reader that never learnt along", _number(fve))
    if "recall" in legible:
        shares = (legible["recall"], legible["shuffled_recall"])
        shown.add_row("attributes named", *map(_number, shares))
    for name, found in attributes.items():
        shares = (found["recall"], found["shuffled_recall"])
        shown.add_row(f"  {name}"[:40], *map(_number, shares), f"{found['known']:.0f}")
    return shown


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False
    )


def _number(value: float) -> str:
    """At most seven characters."""
    if abs(value) < 100:
        return f"{round(value, 3) + 0.0:.3f}"  # no -0.000
    return f"{value:.1e}".replace("e+0", "e")
