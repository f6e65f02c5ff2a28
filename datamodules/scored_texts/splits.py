"""Which scored text trains and which judges, and what the training part says of the labels."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from datamodules.scored_texts.folds import folds_of, strata_of
from datamodules.scored_texts.store import ScoredStore
from datamodules.splitting import TEST, TRAIN, SplitOptions, split_by_stem


@dataclass(frozen=True)
class FoldOptions:
    """One fold of several, which is the test; the others train and validate.

    Args:
        fold: from 0; none divides by shares.
        num_folds: of the cross-validation.
        stratify_by: head whose labels are spread evenly over the folds and parts; none takes the
            first.

    Raises:
        ValueError: fold and num_folds do not fit.
    """

    fold: int | None = None
    num_folds: int | None = None
    stratify_by: str | None = None

    def __post_init__(self) -> None:
        if (self.fold is None) != (self.num_folds is None):
            raise ValueError(
                f"data.fold is {self.fold} and data.num_folds {self.num_folds}; give both or none."
            )
        if self.fold is None or self.num_folds is None:
            return
        if self.num_folds < 2 or not 0 <= self.fold < self.num_folds:
            raise ValueError(
                f"data.fold must be 0 to data.num_folds - 1 and data.num_folds at least 2, got "
                f"fold {self.fold} of {self.num_folds}."
            )


def parts_of(store: ScoredStore, folds: FoldOptions, split: SplitOptions) -> np.ndarray:
    """Return the part of each row, [N] int8: 0 train, 1 validation, 2 test; -1 = rejected.

    Rows of files that are for validation or test stay there.

    Args:
        store: of the rows.
        folds: which fold is the test, if any.
        split: shares; with folds, validation takes its share of what the test leaves.

    Raises:
        ValueError: there is no such head, or fewer groups than folds.
    """
    parts = np.where(store.text_of_row < 0, -1, store.file_part).astype(np.int8)
    is_free = parts == TRAIN
    if (parts > TRAIN).any() and folds.fold is None:
        return parts
    rows = np.flatnonzero(is_free)
    keys = [f"{key:016x}" for key in store.keys[rows].tolist()]
    strata = _strata(store, rows, folds.stratify_by)
    if folds.fold is not None and folds.num_folds is not None:
        is_test = folds_of(keys, strata, folds.num_folds, split.seed) == folds.fold
        parts[rows[is_test]] = TEST
        rows = rows[~is_test]
        kept = np.flatnonzero(~is_test).tolist()
        keys, strata = [keys[i] for i in kept], [strata[i] for i in kept]
        split = replace(split, test_share=0.0)
    parts[rows] = split_by_stem(keys, strata, split).parts
    return parts


def split_facts(store: ScoredStore, folds: FoldOptions, split: SplitOptions) -> dict[str, Any]:
    """Return plain values that say how these rows are divided."""
    return {"rows": store.fingerprint, **asdict(folds), **asdict(split)}


def check_split(trained: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to judge a model by rows that it was trained with.

    Args:
        trained: `split_facts` of the training.
        now: those of the evaluation.

    Raises:
        ValueError: the same rows are divided in another way.
    """
    changed = [f"{n}: {trained[n]} -> {now[n]}" for n in now if now[n] != trained[n]]
    if changed and trained["rows"] == now["rows"]:
        raise ValueError(
            f"the model was trained on another division of these rows ({', '.join(changed)}), so "
            "that some to be judged were trained with; restore the old values, or name files that "
            "are new."
        )


def statistics(store: ScoredStore, parts: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return the facts of each head with what the training part says of its labels: `mean` and
    `std` of a regression, else `shares` of the classes or labels.

    Raises:
        ValueError: a head has no label in the training part.
    """
    found = {}
    for name, facts in store.heads.items():
        values = store.labels[parts == TRAIN][:, store.columns_of(name)]
        known = ~np.isnan(values)
        if not known.any(0).all():
            raise ValueError(
                f'head "{name}" has no label in the training rows; give it some, or leave it out.'
            )
        if facts["kind"] == "regression":
            mean, std = float(values[known].mean()), float(values[known].std())
            found[name] = {**facts, "mean": mean, "std": std if std > 0 else 1.0}
            continue
        if facts["kind"] == "multilabel":
            shares = np.nansum(values, 0) / known.sum(0)
        else:
            counts = np.bincount(values[known].astype(np.int64), minlength=len(facts["classes"]))
            shares = counts / counts.sum()
        found[name] = {**facts, "shares": shares.tolist()}
    return found


def _strata(store: ScoredStore, rows: np.ndarray, head: str | None) -> list[str]:
    name = next(iter(store.heads)) if head is None else head
    if name not in store.heads:
        raise ValueError(
            f'data.folds.stratify_by names "{name}"; the heads are {", ".join(store.heads)}.'
        )
    values = store.labels[rows][:, store.columns_of(name)]
    return strata_of(values, store.heads[name]["kind"] == "regression")
