"""Texts of many rows as places in arrays of tokens, which are read all at once.

Shapes: R rows, T positions, n texts.
"""

import numpy as np
import torch

from datamodules.framing import Framing, padded_texts


class TokenSpans:
    """The texts of rows that an encoder reads.

    Args:
        num_rows: R.
        most: tokens of a row that are read, its first.

    Attributes:
        sizes: [R] int64, tokens of each row so far.
    """

    def __init__(self, num_rows: int, most: int) -> None:
        self.most, self.sizes = most, np.zeros(num_rows, np.int64)
        self._rows: list[np.ndarray] = []
        self._texts: list[np.ndarray] = []

    def add(self, rows: np.ndarray, tokens: np.ndarray, first: np.ndarray, end: np.ndarray) -> None:
        """Let rows, none of them twice, go on with tokens of an array.

        Args:
            rows: [n] integers, ascending.
            tokens: of many texts.
            first: [n] int64, where the text of each row begins among them.
            end: [n] int64, behind its last.
        """
        before = self.sizes[rows]
        taken = np.minimum(end - first, self.most - before)
        self.sizes[rows] = before + taken
        self._rows.append(rows)
        places = zip(first.tolist(), (first + taken).tolist(), strict=True)
        self._texts += [tokens[i:j] for i, j in places]

    def padded(self, framing: Framing) -> dict[str, torch.Tensor]:
        """Return the rows between their marks, see `padded_texts`."""
        texts = self._texts
        if len(self._rows) > 1:
            order = np.concatenate(self._rows).argsort(kind="stable")
            texts = [texts[place] for place in order.tolist()]
        return padded_texts(framing, self.sizes, texts)
