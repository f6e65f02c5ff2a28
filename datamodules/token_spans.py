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
        self._tokens: list[np.ndarray] = []
        self._spans: list[tuple[np.ndarray, ...]] = []

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
        self._spans.append((rows, np.full(len(rows), len(self._tokens)), first, first + taken))
        self._tokens.append(tokens)

    def padded(self, framing: Framing) -> dict[str, torch.Tensor]:
        """Return the rows between their marks, see `padded_texts`."""
        rows, *spans = map(np.concatenate, zip(*self._spans, strict=True))
        if len(self._spans) > 1:
            order = rows.argsort(kind="stable")
            spans = [each[order] for each in spans]
        places = zip(*(each.tolist() for each in spans), strict=True)
        texts = [self._tokens[n][i:j] for n, i, j in places]
        return padded_texts(framing, self.sizes, texts)
