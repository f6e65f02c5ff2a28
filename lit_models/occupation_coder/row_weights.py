"""How much each training row teaches.

Shapes: N training rows, C codes.
"""

import numpy as np
import torch
from torch import Tensor

from datamodules.occupations.store import OccupationStore
from datamodules.splitting import TRAIN
from datamodules.tokenizers.characters import TextNormalisation, decode
from datamodules.tokenizers.codes import CodeBook
from lit_models.occupation_coder.loss import LossOptions


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
