"""Codes without a training text, found by their descriptions."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from datamodules.core.batches import padded_texts
from datamodules.tokenizers.codes import TextNormalisation, encode
from lit_models.occupation_coder.linear import TEXTS_AT_ONCE, LinearHead

UNLIKE = (
    1.5  # what a code without a text loses against one with; of 1.1 to 1.5 on cuts of real data
)


def describe(head: LinearHead, recipe: dict[str, Any], has_text: np.ndarray) -> None:
    """Give the codes of a recipe that no text has [C] bool the features of their descriptions."""
    clean = TextNormalisation.from_dict(recipe["normalisation"])
    texts = [clean(text) for text in recipe["code_book"]["descriptions"]]
    take_features(head, [encode(text, recipe["max_length"]) for text in texts], has_text)


@torch.no_grad()
def take_features(
    head: LinearHead, descriptions: Sequence[np.ndarray], has_text: np.ndarray
) -> None:
    """Give the codes that no text has the features of their descriptions as weights.

    Args: code points of each code's description, none where there is none, and has_text [C] bool.
    """
    codes = [code for code, text in enumerate(descriptions) if len(text) and not has_text[code]]
    for start in range(0, len(codes), TEXTS_AT_ONCE):
        some = codes[start : start + TEXTS_AT_ONCE]
        batch = padded_texts([descriptions[code] for code in some])
        head.weight[some] = head.features(**batch)
        head.bias[some] = -UNLIKE
