"""The controls beside the lens: tables at the end of a test, and controls.json."""

import json
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from torch import nn

from datamodules.activations.attributes import ALL
from lit_models.consistency_lens.building import training_digest
from lit_models.consistency_lens.control_notes import data_notes, notes_of, subject_of
from lit_models.consistency_lens.control_views import Row, Rows, legibility_table, rendered
from lit_models.consistency_lens.controls import known_rows
from lit_models.consistency_lens.evaluation import RANDOM, random_subject_rows
from lit_models.consistency_lens.metrics import Settled

OF_FURTHER_FILES = ("fve", "fve_excess", "kl_recovered", "recall", "shuffled_recall")


class ControlTable(Callback):
    """Computes all rows from the module's sums, logs the headline, prints and writes the tables.

    The headline is that of the first file; of each further one FILE some values are test/FILE/….
    controls.json: subject; rows, group -> row -> value of `REPORTED`, with `_low` and `_high` for
    the 95 % interval; legibility, group -> name -> value; attributes, group -> name -> recall;
    notes. A group is a file, or all.
    """

    def __init__(self) -> None:
        self._random: Rows = {}

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = pl_module.evaluation.random_subject
        self._random = {} if path is None else random_subject_rows(Path(path).expanduser())
        for note in data_notes(pl_module.recipe, training_digest(trainer.datamodule)):
            rank_zero_warn(note.replace("\n", " "))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        computed = pl_module.tested.fidelity.computed()  # collectives: on every rank
        groups = {group: known_rows(rows, pl_module.lens) for group, rows in computed.items()}
        legible, attributes = pl_module.tested.legible()
        found = logged({group: headline(groups[group], legible[group]) for group in groups})
        pl_module.headline = nn.ModuleList(map(Settled, found.values()))  # no names: FILE has dots
        for place, (name, metric) in enumerate(zip(found, pl_module.headline, strict=True)):
            pl_module.log(f"test/{name}", metric, metric_attribute=f"headline.{place}")
        digest = training_digest(trainer.datamodule)
        notes = notes_of(pl_module, groups[ALL], self._random, digest)
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
                console.print(legibility_table(rows, legible[group], attributes[group], group))
        console.print(*notes, sep="\n", markup=False)


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
        **{f"{row}_fve": rows[row]["fve"] for row in ("separate_reader",) if row in rows},
        **legible,
    }


def logged(headlines: Rows) -> Row:
    """Return the values that are logged: the headline of the first file, and some of others."""
    first, *others = [group for group in headlines if group != ALL] or [ALL]
    some = {f"{g}/{name}": headlines[g].get(name) for g in others for name in OF_FURTHER_FILES}
    return headlines[first] | {name: value for name, value in some.items() if value is not None}
