"""What a reader of the tables of controls must know besides the numbers."""

from typing import Any

from lightning.pytorch import LightningModule

from datamodules.activations.attributes import ALL
from lit_models.consistency_lens.building import TRAINED_ON, Recipe
from lit_models.consistency_lens.control_views import Rows
from lit_models.consistency_lens.evaluation import RANDOM

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
