"""Tables and pages of a test, and samples while a lens learns."""

import json
from collections.abc import Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, StrictUndefined
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from rich.console import Console
from rich.table import Table
from torch import nn

from datamodules.activations.dataset import ActivationDataset, explanation_line, token_texts
from datamodules.activations.documents import ALL
from lit_models.consistency_lens.controls import (
    CONTROLS,
    RANDOM,
    Case,
    Row,
    fidelities,
    known_rows,
    random_subject_rows,
    row_names,
    salient_predictions,
)
from lit_models.consistency_lens.metrics import FidelityTable, Settled
from lit_models.consistency_lens.recipe import TRAINED_ON, Recipe, training_digest
from lit_models.training.predictions import BoardSamples, boards, evaluating

TOLD_NOTE = "the reconstructor is told the current token (lens.gives_current_token)"
IS_RANDOM = "the subject has random weights"
OTHER_DATA = (
    "tested on data that were divided otherwise than in training: documents of the\n"
    "test may have been trained on; token_mean, position_mean, components and the\n"
    "counts of the teacher's rare words are of the test's own training part, the\n"
    "mean is that of the lens's training"
)
UNKNOWN_DATA = (
    "the checkpoint does not say what it was trained on: documents of the test may\nbe among it"
)
NO_REFERENCE = (
    "without the rows of the separate reader: it is kept when both networks begin to\n"
    "learn together after a warm start, and this lens knows of none"
)
NOT_RUN = (
    f"not run: {RANDOM}; test a lens with model.subject.random_weights, and name\n"
    "its controls.json with model.evaluation.random_subject"
)


Rows = dict[str, Row]


def subject_of(module: LightningModule) -> dict[str, Any]:
    """Return which subject was tested."""
    facts = module.recipe["subject"]
    is_random = module.options.random_weights or module.options.path is None
    return {"digest": facts["digest"], "layer": facts["layer"], "has_random_weights": is_random}


def data_notes(recipe: Recipe, digest: str) -> list[str]:
    """Return what is to be said of a test whose data have a training part of this digest."""
    known = recipe.get(TRAINED_ON)
    if not known:
        return [UNKNOWN_DATA]
    return [] if known == [digest] else [OTHER_DATA]


def notes_of(module: LightningModule, rows: Rows, random: Rows, digest: str) -> list[str]:
    """Return what a reader of the tables must know besides.

    Args:
        module: that was tested.
        rows: of all documents.
        random: group -> values of the random subject; empty where it was not run.
        digest: of the training part of the test's data.
    """
    notes = data_notes(module.recipe, digest)
    if not module.lens.has_reference:
        notes.append(NO_REFERENCE)
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


SHOWN = {
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
    for name in SHOWN.values():
        shown.add_column(name, justify="right")
    for row, values in rows.items():
        interval = f"{_number(values['fve_low'])} to {_number(values['fve_high'])}"
        texts = [_number(values[name]) for name in SHOWN if name != "interval"]
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


AT_ONCE = 64  # examples in one forward call


class ExamplesPage(Callback):
    """Writes examples.html into the run folder after a test: activations evenly over the errors.

    Their number is `evaluation.num_examples` of the module.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        number = pl_module.evaluation.num_examples
        if not number:
            return
        by_error = pl_module.tested.errors.compute().tolist()  # a collective
        chosen = evenly(by_error, number)
        found = examples(trainer, pl_module, trainer.datamodule.datasets["test"], chosen)
        if trainer.is_global_zero:
            path = Path(trainer.default_root_dir) / "examples.html"
            path.write_text(page(found, len(by_error)), encoding="utf-8")


def page(examples: list[dict[str, Any]], number: int) -> str:
    """Return the page as HTML: one file that needs no network, and sorts itself.

    Args:
        examples: as `examples` returns them, by rising error.
        number: of all activations among which they were chosen.
    """
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(
        Path(__file__).with_name("examples.html").read_text("utf-8")
    )
    largest = max((s for line in examples for _, s in line["words"]), default=0.0)
    return template.render(examples=examples, number=number, largest=largest)


def evenly(values: Sequence[int], number: int) -> list[int]:
    """Return so many of the values at even distances, the first and the last among them."""
    if len(values) <= number:
        return list(values)
    places = np.linspace(0, len(values) - 1, number).round().astype(int)
    return [values[place] for place in places]


def examples(
    trainer: Trainer, module: LightningModule, dataset: ActivationDataset, numbers: Sequence[int]
) -> list[dict[str, Any]]:
    """Return what a line of `predict` tells of some activations, with `words`, pairs of the text
    of each word of the explanation and its salience.

    Every rank computes all of them, so that none waits for another.

    Args:
        trainer: of the module.
        module: a LitConsistencyLens in evaluation mode.
        dataset: of the activations.
        numbers: of the samples.
    """
    lines = []
    tokenizer = dataset.pieces.store.tokenizer
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        batch = module.transfer_batch_to_device(dataset.chosen(some), module.device, 0)
        with torch.no_grad():
            found = trainer.strategy.predict_step(batch, 0, evaluate=salient_predictions)
        results = {name: values.cpu().numpy() for name, values in found.items()}
        for row, number in enumerate(some):
            values = {name: result[row] for name, result in results.items()}
            line = explanation_line(dataset, number, values, CONTROLS)
            texts = token_texts(tokenizer, values["token_ids"])
            line["words"] = list(zip(texts, values["salience"].tolist(), strict=True))
            lines.append(line)
    return lines


CURVES = ("fve", "kl_recovered")


class ExplanationSamples(BoardSamples):
    """Explains some activations of the validation part every few optimizer steps, and evaluates
    the lens and all controls on more of them; the training goes on as if it had not.

    Args:
        num_examples: explanations that are written out, always of the same activations.
        num_evaluated: activations from which the curves come, always the same ones.
        every_n_steps: optimizer steps in between.

    Raises:
        ValueError: a number below 1; at the start of training, no logger that takes text.
    """

    def __init__(
        self, num_examples: int = 8, num_evaluated: int = 256, every_n_steps: int = 200
    ) -> None:
        super().__init__(every_n_steps)
        for name, number in (("num_examples", num_examples), ("num_evaluated", num_evaluated)):
            if number < 1:
                raise ValueError(f"{name} of ExplanationSamples must be at least 1, got {number}.")
        self.num_examples, self.num_evaluated = num_examples, num_evaluated

    def sample(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Write explanations of the same activations, and a point of each curve."""
        dataset = trainer.datamodule.datasets["validation"]
        with evaluating(pl_module), torch.no_grad():
            chosen = evenly(range(len(dataset.lengths)), self.num_examples)
            lines = examples(trainer, pl_module, dataset, chosen)
            curves = self._curves(trainer, pl_module, dataset)
        for board in boards(trainer) if trainer.is_global_zero else []:
            for number, line in enumerate(lines):
                board.experiment.add_text(f"examples/{number}", markdown(line), step)
            for name, value in curves.items():
                board.experiment.add_scalar(name, value, step)

    def _curves(
        self, trainer: Trainer, module: LightningModule, dataset: ActivationDataset
    ) -> dict[str, float]:
        """Name -> value; every rank computes all, so that none waits for another."""
        table = FidelityTable(row_names(module.evaluation), [], sync_on_compute=False)
        table.to(module.device)
        numbers = evenly(range(len(dataset.lengths)), self.num_evaluated)
        for start in range(0, len(numbers), AT_ONCE):
            batch = dataset.chosen(numbers[start : start + AT_ONCE])
            batch = module.transfer_batch_to_device(batch, module.device, 0)
            trainer.strategy.predict_step(batch, 0, evaluate=partial(_added, table))
        rows = known_rows(table.computed()[ALL], module.lens)
        return {f"{kind}/{row}": rows[row][kind] for kind in CURVES for row in rows}


def _added(table: FidelityTable, case: Case) -> dict[str, Any]:
    table.update(fidelities(case), case.batch)
    return {}


def markdown(line: dict[str, Any]) -> str:
    """Return what is told of one activation, as TensorBoard shows it.

    Words are followed by their salience: by how much the error grows without them.
    """
    words = "".join(f"{escape(text)}<sub>{salience:+.2f}</sub>" for text, salience in line["words"])
    nearest = ", ".join(f"{name} {e:.3f}" for name, e in line["nearest_controls"].items())
    token = f"<b>{escape(line['token'])}</b>"
    context = f"{escape(line['before'])}{token}{escape(line['after'])}"
    return f"{context}\n\n{words}\n\nerror {line['error']:.3f}; {nearest}"
