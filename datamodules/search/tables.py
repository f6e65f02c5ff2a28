"""Numbers of documents in arrays: rows of several lengths, and values that are looked up."""

from collections.abc import Sequence

import numpy as np

NO_DOCUMENT = -1  # where a row has fewer


def rows_of(values: Sequence[np.ndarray], filler: float, width: int = 0) -> np.ndarray:
    """Return arrays of several lengths as the rows of one, at least `width` wide."""
    rows = np.full((len(values), max(width, *map(len, values))), filler, values[0].dtype)
    for row, value in zip(rows, values, strict=True):
        row[: len(value)] = value
    return rows


def looked_up(wanted: np.ndarray, known: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the value of each wanted number, [n] float32; NaN = not known.

    Args:
        wanted: [n] int64.
        known: [m] int64, ascending.
        values: [m].
    """
    found = np.full(len(wanted), np.nan, np.float32)
    if len(known):
        near = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        hit = known[near] == wanted
        found[hit] = values[near[hit]]
    return found
