"""A ranker beside its first stage and BM25, on the same candidates: printed and written."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table

from lit_models.seo.ranking_metrics import paired_bootstrap

TITLES = {"ranker": "ranker", "first": "first stage", "bm25": "BM25"}
SEED = 0  # of the bootstrap: the same values give the same intervals
Found = dict[str, dict[str, np.ndarray]]


class RankingTable(Callback):
    """Shows and writes the metrics of a test's queries, and how sure the differences are.

    ranking.json: queries, their number; systems, system -> metric -> mean; differences, baseline
    -> metric -> mean, low and high of the ranker less the baseline, with a 95 % interval of a
    paired bootstrap over queries. ranking_queries.csv: query, system and its metrics.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        source = trainer.datamodule.datasets["test"].source
        metrics = list(pl_module.test_metrics)
        found: Found = {}
        for system in ("ranker", *source.first.names):  # collectives: on every rank
            ids, values = pl_module.tested[system].compute()
            found[system] = dict(zip(metrics, values.cpu().numpy().T, strict=True))
        if not trainer.is_global_zero:
            return
        names = [source.queries.id(place) for place in ids.tolist()]
        content = summary(found)
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, indent=1) + "\n"
        (folder / "ranking.json").write_text(text, encoding="utf-8")
        write_queries(folder / "ranking_queries.csv", names, found)
        console = Console(highlight=False)
        console.print(means_table(content))
        for baseline in content["differences"]:
            console.print(differences_table(content, baseline))


def summary(found: Found) -> dict[str, Any]:
    """Return the content of ranking.json.

    Args:
        found: system -> metric -> value of each query [N], the ranker's first.
    """
    own, *baselines = found
    return {
        "queries": len(next(iter(found[own].values()))),
        "systems": {
            system: {metric: float(values.mean()) for metric, values in metrics.items()}
            for system, metrics in found.items()
        },
        "differences": {
            baseline: {
                metric: dict(
                    zip(
                        ("mean", "low", "high"),
                        paired_bootstrap(values, found[baseline][metric], SEED),
                        strict=True,
                    )
                )
                for metric, values in found[own].items()
            }
            for baseline in baselines
        },
    }


def write_queries(path: Path, names: list[str], found: Found) -> None:
    """Write one row per query and system, with numbers that are read back as they are."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["query", "system", *next(iter(found.values()))])
        for place, name in enumerate(names):
            for system, metrics in found.items():
                values = (repr(float(values[place])) for values in metrics.values())
                writer.writerow([name, system, *values])


def means_table(content: dict[str, Any]) -> Table:
    """Return the means of all systems, at most 80 columns wide."""
    shown = _table(f"means over {content['queries']} queries")
    shown.add_column("")
    for metric in content["systems"]["ranker"]:
        shown.add_column(metric, justify="right")
    for system, values in content["systems"].items():
        shown.add_row(TITLES[system], *(f"{value:.4f}" for value in values.values()))
    return shown


def differences_table(content: dict[str, Any], baseline: str) -> Table:
    """Return the differences to one baseline and their intervals, at most 80 columns wide."""
    shown = _table(f"ranker less {TITLES[baseline]}, 95 % interval")
    for name in ("metric", "difference", "from", "to"):
        shown.add_column(name, justify="left" if name == "metric" else "right")
    for metric, values in content["differences"][baseline].items():
        shown.add_row(metric, *(f"{values[name]:+.4f}" for name in ("mean", "low", "high")))
    return shown


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=None, pad_edge=False)
