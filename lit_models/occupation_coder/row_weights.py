"""How much each training row teaches, and the distinct texts that a linear head is solved on.

Shapes: N training rows, T distinct texts with their codes, C codes.
"""

import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.files.splitting import TRAIN
from datamodules.occupations.store import OccupationStore
from datamodules.tokenizers.characters import TextNormalisation, decode
from datamodules.tokenizers.codes import CodeBook
from lit_models.occupation_coder.loss import LossOptions

log = logging.getLogger(__name__)


class Examples(NamedTuple):
    """code points of each text [T], has_code [T, C] bool, and weight [T] float64, above 0."""

    texts: list[np.ndarray]
    has_code: np.ndarray
    weight: np.ndarray


def row_weights(store: OccupationStore, options: LossOptions) -> Tensor:
    """Weight of each training row [N] float32, in the order of their sample ids.

    Args:
        store: the tokenised tables.
        options: `repeats` shares n ** repeats among the n rows of a text; without `unused_codes`
            the description of a code that no other row has gets 0.
    """
    rows = store.rows(TRAIN)
    text_ids = store.arrays["text_id"][rows]
    times = np.bincount(text_ids)[text_ids].astype(np.float32)
    weights = times ** (options.repeats - 1)
    if not options.unused_codes:
        weights[_describes_an_unused_code(store, rows)] = 0.0
    return torch.from_numpy(weights)


def linear_examples(store: OccupationStore, options: LossOptions) -> Examples:
    """Return the training texts, each once per set of codes that it has.

    Args:
        store: the tokenised tables.
        options: its `linear` says how many are taken at most, evenly from all.
    """
    assert options.linear is not None
    rows, row_weight = store.rows(TRAIN), row_weights(store, options).double().tolist()
    weight: dict[tuple[int, bytes], float] = {}
    row_of: dict[tuple[int, bytes], int] = {}
    for row, one, ids in zip(rows.tolist(), row_weight, store.code_sets(rows), strict=True):
        key = (int(store.arrays["text_id"][row]), np.sort(ids).tobytes())
        if one > 0:
            weight[key] = weight.get(key, 0.0) + one
            row_of.setdefault(key, row)
    keys, most = list(row_of), options.linear.max_texts
    if len(keys) > most:
        log.warning(
            "the linear head is solved on %s of %s distinct texts (model.loss.linear.max_texts); "
            "with so many the decoder deserves the greater share: lower model.decoding.flat_share.",
            *(f"{most:,}", f"{len(keys):,}"),
        )
        keys = [keys[i * len(keys) // most] for i in range(most)]
    chosen = np.array([row_of[key] for key in keys])
    has_code = np.zeros((len(keys), len(store.recipe["code_book"]["codes"])), bool)
    for place, ids in enumerate(store.code_sets(chosen)):
        has_code[place, ids] = True
    return Examples(store.texts(chosen), has_code, np.array([weight[key] for key in keys]))


def _describes_an_unused_code(store: OccupationStore, rows: np.ndarray) -> np.ndarray:
    """[N] bool: the row is the only one of its code and says what the code book says."""
    book = CodeBook.from_dict(store.recipe["code_book"])
    normalisation = TextNormalisation.from_dict(store.recipe["normalisation"])
    codes = [store.code_ids(row) for row in rows]
    num_rows = np.bincount(np.concatenate(codes), minlength=len(book.codes))
    return np.array(
        [
            len(code_ids) == 1
            and num_rows[code_ids[0]] == 1
            and _says(store, row, normalisation(book.descriptions[code_ids[0]]))
            for row, code_ids in zip(rows, codes, strict=True)
        ]
    )


def _says(store: OccupationStore, row: int, text: str) -> bool:
    points = store.code_points(row)
    return len(points) > 0 and decode(points) == text[: len(points)]
