"""Folds for cross-validation: groups stay whole, labels are spread evenly, the order is free.

Shapes: N rows.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from datamodules.files.splitting import keyed_hashes

NUM_BINS = 5


def folds_of(
    keys: Sequence[str], strata: Sequence[str], num_folds: int, seed: int = 0
) -> np.ndarray:
    """Return the fold of each row, [N] int64 from 0.

    Groups are taken stratum by stratum, large ones first, then by a keyed hash of their name;
    each goes to the fold that has the fewest rows of the stratum so far, then the fewest at all.
    The same rows give the same folds in any order and in any file.

    Args:
        keys: [N] name of each row's group, which stays whole.
        strata: [N] what is spread evenly.
        num_folds: at least 2.
        seed: another one deals anew.

    Raises:
        ValueError: there are fewer groups than folds.
    """
    rows_of: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows_of.setdefault(key, []).append(row)
    if len(rows_of) < num_folds:
        raise ValueError(
            f"{len(rows_of)} groups cannot be dealt to {num_folds} folds; lower data.num_folds."
        )
    names = list(rows_of)
    hashes = dict(zip(names, keyed_hashes(names, seed).tolist(), strict=True))
    stratum_of = {name: _most_common([strata[row] for row in rows_of[name]]) for name in names}
    names.sort(key=lambda name: (stratum_of[name], -len(rows_of[name]), hashes[name], name))
    folds = np.zeros(len(keys), np.int64)
    total, in_stratum, stratum = [0] * num_folds, [0] * num_folds, None
    for name in names:
        if stratum_of[name] != stratum:
            stratum, in_stratum = stratum_of[name], [0] * num_folds
        best = min(range(num_folds), key=lambda f: (in_stratum[f], total[f], f))
        size = len(rows_of[name])
        folds[rows_of[name]] = best
        in_stratum[best] += size
        total[best] += size
    return folds


def strata_of(values: np.ndarray, is_number: bool) -> list[str]:
    """Return what a head's labels are stratified by: the classes, or the bin of a number.

    Args:
        values: [N, width] float64; NaN = missing, which is a stratum of its own.
        is_number: cut at quantiles into `NUM_BINS` bins.
    """
    if not is_number:
        return [" ".join("-" if np.isnan(v) else f"{v:g}" for v in row) for row in values]
    column = values[:, 0]
    known = column[~np.isnan(column)]
    if not known.size:
        return ["-"] * len(column)
    edges = np.quantile(known, np.arange(1, NUM_BINS) / NUM_BINS)
    bins = np.searchsorted(edges, column, side="right")
    return ["-" if np.isnan(v) else str(b) for v, b in zip(column, bins, strict=True)]


def _most_common(values: list[str]) -> str:
    counts = Counter(values)
    return min(counts, key=lambda value: (-counts[value], value))
