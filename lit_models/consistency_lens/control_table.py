"""The controls beside the lens: tables at the end of a test, and controls.json."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import nn

from lit_models.consistency_lens.control_views import Row, Rows, legibility_table, rendered
from lit_models.consistency_lens.evaluation import RANDOM, random_subject_rows
from lit_models.consistency_lens.metrics import ALL, Settled

TOLD_NOTE = "the reconstructor is told the current token (lens.gives_current_token)"
IS_RANDOM = "the subject has random weights"
NOT_RUN = (
    f"not run: {RANDOM}; test a lens with model.subject.random_weights, and name\n"
    "its controls.json with model.evaluation.random_subject"
)


class ControlTable(Callback):
    """Computes all rows from the module's sums, logs the headline, prints and writes the tables.

    controls.json: subject; rows, group -> row -> value of `REPORTED`, with `_low` and `_high` for
    the 95 % interval; legibility; attributes, name -> recall; notes.
    """

    def __init__(self) -> None:
        self._random: Rows = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = pl_module.evaluation.random_subject
        self._random = {} if path is None else random_subject_rows(Path(path).expanduser())

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        groups = pl_module.tested.fidelity.computed()  # collectives: on every rank
        legible, attributes = pl_module.tested.legibility.computed()
        found = headline(groups[ALL], legible)
        pl_module.headline = nn.ModuleDict({name: Settled(found[name]) for name in found})
        for name, metric in pl_module.headline.items():
            pl_module.log(f"test/{name}", metric, metric_attribute=f"headline.{name}")
        notes = notes_of(pl_module, groups[ALL], self._random)
        for group in self._random.keys() & groups.keys():
            groups[group][RANDOM] = self._random[group]
        if not trainer.is_global_zero:
            return
        content = {
            "subject": subject_of(pl_module),
            "rows": groups,
            "legibility": legible,
            "attributes": attributes,
            "notes": notes,
        }
        path = Path(trainer.default_root_dir) / "controls.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        console = Console(highlight=False)
        for group, rows in groups.items():
            if group != ALL or len(groups) == 1:
                console.print(rendered(rows, group))
        console.print(legibility_table(groups[ALL], legible, attributes))
        console.print(*notes, sep="\n", markup=False)


def subject_of(module: LightningModule) -> dict[str, Any]:
    """Return which subject was tested."""
    facts = module.recipe["subject"]
    is_random = module.options.random_weights or module.options.path is None
    return {"digest": facts["digest"], "layer": facts["layer"], "has_random_weights": is_random}


def notes_of(module: LightningModule, rows: Rows, random: Rows) -> list[str]:
    """Return what a reader of the tables must know besides."""
    notes = []
    if module.lens_options.gives_current_token:
        notes.append(TOLD_NOTE)
    if subject_of(module)["has_random_weights"]:
        notes.append(IS_RANDOM)
    elif not random:
        notes.append(NOT_RUN)
    number, other = (int(r["count"]) for r in (rows["greedy"], random.get(ALL, rows["greedy"])))
    if number != other:
        notes.append(f"{RANDOM} is of {other} activations, and the other rows of {number}")
    return notes


def headline(rows: Rows, legible: Row) -> Row:
    """Return what a test logs."""
    own, token = rows["greedy"], rows["token_mean"]["fve"]
    return {
        "fve": own["fve"],
        "fve_excess": own["excess"],
        "fve_excess_share": own["excess"] / (1 - token) if token < 1 else 0.0,
        "fve_shuffled": rows["shuffled_examples"]["fve"],
        "fve_sampled": rows["sampled"]["fve"],
        "kl_recovered": own["kl_recovered"],
        "separate_reader_fve": rows["separate_reader"]["fve"],
        **legible,
    }
