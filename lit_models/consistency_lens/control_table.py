"""The controls beside the lens: a table at the end of a test, and controls.json."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import nn

from lit_models.consistency_lens.metrics import REPORTED, Settled

HEADLINE = ("fve", "unit_fve", "kl_recovered")
COLUMNS = {
    "fve": "FVE",
    "interval": "95 %",
    "unit_fve": "unit FVE",
    "kl_recovered": "KL rec.",
    "next_nats": "CE diff.",
}


class ControlTable(Callback):
    """Computes all rows from the module's sums, logs the headline, prints and writes the table."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = {
            group: table(rows) for group, rows in pl_module.fidelity.computed().items()
        }  # collectives: on every rank
        legible = {name: float(metric.compute()) for name, metric in pl_module.legibility.items()}
        found = headline(groups["all"], legible)
        pl_module.headline = nn.ModuleDict({name: Settled(found[name]) for name in found})
        for name, metric in pl_module.headline.items():
            pl_module.log(f"test/{name}", metric, metric_attribute=f"headline.{name}")
        if not trainer.is_global_zero:
            return
        content = {"rows": groups, "legibility": legible}
        path = Path(trainer.default_root_dir) / "controls.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for group, rows in groups.items():
            if group != "all" or len(groups) == 1:
                Console(highlight=False).print(rendered(rows, group))


def table(rows: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return row -> column -> value, with the shares that need several rows.

    Args:
        rows: row -> tensor in the order of `REPORTED`.
    """
    named = {row: dict(zip(REPORTED, values.tolist(), strict=True)) for row, values in rows.items()}
    for values in named.values():
        for base in ("mean", "zero"):
            nats = named[base]["nats"]
            share = 1 - values["nats"] / nats if nats else 0.0
            values["kl_recovered" if base == "mean" else "kl_recovered_zero"] = share
    return named


def headline(rows: dict[str, dict[str, float]], legible: dict[str, float]) -> dict[str, float]:
    """Return what a test logs."""
    own, token = rows["greedy"]["fve"], rows["token_mean"]["fve"]
    return {
        "fve": own,
        "fve_excess": own - token,
        "fve_excess_share": (own - token) / (1 - token) if token < 1 else 0.0,
        "fve_shuffled": rows["shuffled_examples"]["fve"],
        "fve_sampled": rows["sampled"]["fve"],
        "kl_recovered": rows["greedy"]["kl_recovered"],
        "separate_reader_fve": rows["separate_reader"]["fve"],
        **legible,
    }


def rendered(rows: dict[str, dict[str, float]], group: str) -> Table:
    """Return the table as it is printed, at most 80 columns wide."""
    title = "controls" if group == "all" else f"controls: {group}"
    shown = Table(title=title, title_justify="left", box=None, pad_edge=False)
    shown.add_column("rebuilt from")
    for name in COLUMNS.values():
        shown.add_column(name, justify="right")
    for row, values in rows.items():
        interval = f"{values['low']:.3f} to {values['high']:.3f}"
        numbers = [values[name] for name in ("fve", "unit_fve", "kl_recovered", "next_nats")]
        texts = [f"{number:.3f}" for number in numbers]
        shown.add_row(row, texts[0], interval, *texts[1:])
    return shown
