"""Output of a test: the table of controls, controls.json and the page of examples."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from torch import nn

from datamodules.activations.datamodule import ActivationDataset, explanation_line, token_texts
from datamodules.core.batches import ALL
from datamodules.files.splitting import TRAIN
from lit_models.consistency_lens.controls import CONTROLS, REFERENCE_ROWS, Row
from lit_models.consistency_lens.subject import TRAINED_ON, training_digest
from lit_models.training.metrics import SumCount

IS_RANDOM = "the subject has random weights"
OTHER_DATA = (
    "tested on data that were divided otherwise than in training: documents of the\n"
    "test may have been trained on; token_mean, position_mean, components and the\n"
    "counts of the teacher's rare words are of the test's own training part, the\n"
    "mean is that of the lens's training"
)
NO_REFERENCE = (
    "without the rows of the separate reader: it is kept when both networks begin to\n"
    "learn together after a warm start, and this lens knows of none"
)
SHOWN = {
    "fve": "FVE",
    "interval": "95 %",
    "unit_fve": "unit FVE",
    "kl_recovered": "KL rec.",
    "next_nats": "CE diff.",
}
OF_FURTHER_FILES = ("fve", "fve_excess", "kl_recovered", "recall", "shuffled_recall")
Rows = dict[str, Row]


class ControlTable(Callback):
    """Computes all rows from the module's sums, logs the headline, prints and writes the tables.

    The headline is that of the first file; of each further one FILE some values are test/FILE/….
    controls.json: subject; rows, group -> row -> value of `REPORTED`, with `_low` and `_high` for
    the 95 % interval; legibility, group -> name -> value; attributes, group -> name -> recall;
    notes. A group is a file, or all. examples.html: `evaluation.num_examples` explanations.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        computed = pl_module.fidelity.computed()  # collectives: on every rank
        readable = pl_module.legibility.compute()
        legible, attributes = (
            dict(zip(computed, column, strict=True)) for column in zip(*readable, strict=True)
        )
        left_out = () if pl_module.lens.has_reference else REFERENCE_ROWS
        groups = {
            group: {name: row for name, row in rows.items() if name not in left_out}
            for group, rows in computed.items()
        }
        log_headlines(
            pl_module, {group: headline(groups[group], legible[group]) for group in groups}
        )
        number = pl_module.evaluation.num_examples
        dataset = trainer.datamodule.datasets["test"]
        chosen = evenly(len(dataset.lengths), number) if number else []
        found = examples(trainer, pl_module, dataset, chosen)  # on every rank
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        facts = pl_module.recipe["subject"]
        is_random = pl_module.options.random_weights or pl_module.options.path is None
        own = training_digest(trainer.datamodule.store.hashes(TRAIN))
        notes = [
            *[OTHER_DATA] * (pl_module.recipe[TRAINED_ON] != [own]),
            *[NO_REFERENCE] * bool(left_out),
            *[IS_RANDOM] * is_random,
        ]
        known = {name: facts[name] for name in ("digest", "layer")}
        content = {
            "subject": {**known, "has_random_weights": is_random},
            "rows": groups,
            "legibility": legible,
            "attributes": attributes,
            "notes": notes,
        }
        (folder / "controls.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
        if found:
            (folder / "examples.html").write_text(page(found, len(dataset.lengths)), "utf-8")
        console = Console(highlight=False)
        for group, rows in groups.items():
            if group != ALL or len(groups) == 1:
                console.print(rendered(rows, legible[group], group))
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


def log_headlines(module: LightningModule, headlines: Rows) -> None:
    """Log the headline of the first file, and some values of each further one; equal on all
    ranks."""
    first, *others = [group for group in headlines if group != ALL] or [ALL]
    values = dict(headlines[first])
    for group in others:
        some = {name: headlines[group].get(name) for name in OF_FURTHER_FILES}
        values |= {f"{group}/{name}": value for name, value in some.items() if value is not None}
    module.headline = nn.ModuleList(SumCount() for _ in values).to(module.device)
    for place, (name, value) in enumerate(values.items()):
        metric = module.headline[place]  # no names: FILE has dots
        metric.update(torch.tensor(value, dtype=torch.float64), torch.tensor(1))
        module.log(f"test/{name}", metric, metric_attribute=f"headline.{place}")


def rendered(rows: Rows, legible: Row, group: str) -> Table:
    """Return the table of controls as it is printed, at most 80 columns wide."""
    title = "controls" if group == ALL else f"controls: {group}"
    shown = Table(
        title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False
    )
    shown.add_column("rebuilt from")
    for name in SHOWN.values():
        shown.add_column(name, justify="right")
    for row, values in rows.items():
        interval = f"{_number(values['fve_low'])} to {_number(values['fve_high'])}"
        texts = [_number(values[name]) for name in SHOWN if name != "interval"]
        shown.add_row(row, texts[0], interval, *texts[1:])
    own = rows["greedy"]
    named = f"greedy explanations: {legible['text_nats']:.3f} nats per word under the subject, "
    named += f"{legible['distinct']:.3f} distinct"
    if "recall" in legible:
        named += f"\nattributes named: {legible['recall']:.3f}, of another activation "
        named += f"{legible['shuffled_recall']:.3f}"
    shown.caption = (
        f"greedy is {own['excess']:.3f} ({own['excess_low']:.3f} to {own['excess_high']:.3f}) "
        f"above token_mean; {own['count']:.0f} activations\n{named}"
    )
    return shown


def _number(value: float) -> str:
    """At most seven characters."""
    if abs(value) < 100:
        return f"{round(value, 3) + 0.0:.3f}"  # no -0.000
    return f"{value:.1e}".replace("e+0", "e")


AT_ONCE = 64  # examples in one forward call


def evenly(length: int, number: int) -> list[int]:
    """Return so many of 0 … length - 1 at even distances, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(number, length)).round().astype(int)).tolist()


def examples(
    trainer: Trainer, module: LightningModule, dataset: ActivationDataset, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return the lines of `predict` for some samples, with `words`, pairs of the text of each word
    of the explanation and its salience; by rising error.

    Every rank computes all of them, so that none waits for another.
    """
    lines = []
    tokenizer = dataset.pieces.store.tokenizer
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        batch = module.transfer_batch_to_device(dataset.batch(np.array(some), 0), module.device, 0)
        with torch.no_grad():
            found = trainer.strategy.predict_step(batch, 0, with_salience=True)
        results = {name: values.cpu().numpy() for name, values in found.items()}
        for row, number in enumerate(some):
            values = {name: result[row] for name, result in results.items()}
            line = explanation_line(dataset, number, values, CONTROLS)
            texts = token_texts(tokenizer, values["token_ids"])
            line["words"] = list(zip(texts, values["salience"].tolist(), strict=True))
            lines.append(line)
    return sorted(lines, key=lambda line: line["error"])


def page(examples: list[dict[str, Any]], number: int) -> str:
    """Return the page of `examples` out of so many activations: one file of HTML that needs no
    network, and sorts itself."""
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        Path(__file__).with_name("examples.html").read_text("utf-8")
    )
    largest = max((s for line in examples for _, s in line["words"]), default=0.0)
    return template.render(examples=examples, number=number, largest=largest)
