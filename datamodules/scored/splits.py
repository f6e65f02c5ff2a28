"""Division of scored texts into parts and folds, and statistics of the training part.

Shapes: N rows.
"""

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from datamodules.files.splitting import (
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    SplitOptions,
    keyed_hashes,
    split_by_stem,
)
from datamodules.scored.store import ScoredStore

NUM_BINS = 5  # of the numbers of a regression


@dataclass(frozen=True)
class Division:
    """How rows are divided: by shares, or into folds, one of which is the test.

    Rows of files that are for validation or test stay there; only parts without a file are drawn
    from the training files.

    Args:
        split: shares; with folds, validation takes its share of what the test leaves.
        fold: from 0; `None` divides by shares.
        num_folds: of the cross-validation.
        stratify_by: head whose labels are spread evenly over the folds and parts; `None` takes
            the first.

    Raises:
        ValueError: fold and num_folds do not fit.
    """

    split: SplitOptions
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

    def parts(self, store: ScoredStore) -> np.ndarray:
        """Return the part of each row, [N] int8: 0 train, 1 validation, 2 test; -1 = rejected.

        Raises:
            ValueError: there is no head to stratify by, or fewer groups than folds.
        """
        parts = np.where(store.text_of_row < 0, -1, store.file_part).astype(np.int8)
        rows, split = np.flatnonzero(parts == TRAIN), self.split
        if (store.file_part == VALIDATION).any():
            split = replace(split, validation_share=0.0)
        if (store.file_part == TEST).any():
            split = replace(split, test_share=0.0)
        if not rows.size or not (self.num_folds or split.validation_share + split.test_share > 0):
            return parts
        name = next(iter(store.heads)) if self.stratify_by is None else self.stratify_by
        if name not in store.heads:
            raise ValueError(
                f'data.stratify_by names "{name}"; the heads are {", ".join(store.heads)}.'
            )
        keys = [f"{key:016x}" for key in store.keys[rows].tolist()]
        labels = store.labels[rows][:, store.columns_of(name)]
        strata = strata_of(labels, store.heads[name]["kind"] == "regression")
        if self.num_folds:
            is_test = folds_of(keys, strata, self.num_folds, split.seed) == self.fold
            parts[rows[is_test]] = TEST
            rows, kept = rows[~is_test], np.flatnonzero(~is_test).tolist()
            keys, strata = [keys[i] for i in kept], [strata[i] for i in kept]
            split = replace(split, test_share=0.0)
        parts[rows] = split_by_stem(keys, strata, split)
        return parts

    def facts(self, store: ScoredStore) -> dict[str, Any]:
        """Return plain values that say how these rows are divided."""
        folds = {name: getattr(self, name) for name in ("fold", "num_folds", "stratify_by")}
        return {"rows": store.fingerprint, **folds, **asdict(self.split)}

    def trained_facts(self, store: ScoredStore) -> dict[str, Any]:
        """Return `facts` and the texts of the training part, by which any file can be checked:
        `texts`, the sorted 8-byte digests in base64 (11 characters a text)."""
        digests = np.unique(store.digests[store.text_of_row[self.parts(store) == TRAIN]])
        texts = base64.b64encode(digests.astype("<u8").tobytes()).decode()
        return {**self.facts(store), "texts": texts}

    def rows_of(self, stage: str, store: ScoredStore, trained: dict[str, Any]) -> np.ndarray:
        """Return the rows of a stage, [n] int64; a trained model has seen none but its own.

        The division of its training is taken as it was, files that share texts included.

        Args:
            stage: train, validation or test.
            store: of the rows.
            trained: `trained_facts` of the training.

        Raises:
            ValueError: no row belongs to the stage, the same rows were divided in another way, or
                texts of the training judge.
        """
        rows = np.flatnonzero(self.parts(store) == PART_NAMES.index(stage))
        now = self.facts(store)
        changed = [f"{n}: {trained[n]} -> {now[n]}" for n in now if now[n] != trained[n]]
        if changed and trained["rows"] == now["rows"]:
            raise ValueError(
                f"the model was trained on another division of these rows ({', '.join(changed)}), "
                "so that some to be judged were trained with; restore the old values, or name "
                "files that are new."
            )
        seen = np.frombuffer(base64.b64decode(trained["texts"]), "<u8")
        count = int(np.isin(store.digests[store.text_of_row[rows]], seen).sum())
        if changed and count:
            raise ValueError(
                f"the model was trained with the texts of {count} of the {len(rows)} rows to be "
                "judged: rows have changed since, and which of them train depends on all rows. "
                "Give the rows of the training again, name a file of new texts alone, such as "
                "--data.files.test=new.csv, or train anew."
            )
        if not len(rows):
            raise ValueError(
                f"no row is for {stage}; name data.files.{stage}, or raise "
                f"data.split.{stage}_share above {getattr(self.split, stage + '_share', 0)}."
            )
        return rows


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
    hashes = dict(zip(rows_of, keyed_hashes(rows_of, seed).tolist(), strict=True))
    stratum_of = {}
    for name, rows in rows_of.items():
        counts = Counter(strata[row] for row in rows)
        stratum_of[name] = min(counts, key=lambda stratum: (-counts[stratum], stratum))
    names = sorted(rows_of, key=lambda n: (stratum_of[n], -len(rows_of[n]), hashes[n], n))
    folds, total = np.zeros(len(keys), np.int64), Counter[int]()
    in_stratum: Counter[tuple[str, int]] = Counter()
    for name in names:
        stratum, size = stratum_of[name], len(rows_of[name])
        best = min(range(num_folds), key=lambda f: (in_stratum[stratum, f], total[f], f))
        folds[rows_of[name]] = best
        in_stratum[stratum, best] += size
        total[best] += size
    return folds


def strata_of(values: np.ndarray, is_number: bool) -> list[str]:
    """Return what a head's labels are stratified by: the classes, or the bin of a number.

    Args:
        values: [N, width] float64; NaN = missing, which is a stratum of its own.
        is_number: cut at quantiles into `NUM_BINS` bins.
    """
    if is_number:
        known = values[~np.isnan(values)]
        edges = np.quantile(known, np.arange(1, NUM_BINS) / NUM_BINS) if known.size else []
        bins = np.searchsorted(edges, values, side="right").astype(np.float64)
        values = np.where(np.isnan(values), np.nan, bins)
    return [" ".join("-" if np.isnan(v) else f"{v:g}" for v in row) for row in values]


def statistics(store: ScoredStore, parts: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return the facts of each head with what the training part says of its labels: `mean` and
    `std` of a regression, else `shares` of the classes or labels.

    Raises:
        ValueError: a head has no label in the training part.
    """
    heads = {}
    for name, facts in store.heads.items():
        values = store.labels[parts == TRAIN][:, store.columns_of(name)]
        known = ~np.isnan(values)
        if not known.any(0).all():
            raise ValueError(
                f'head "{name}" has no label in the training rows; give it some, or leave it out.'
            )
        if facts["kind"] == "regression":
            mean, std = float(values[known].mean()), float(values[known].std())
            heads[name] = {**facts, "mean": mean, "std": std if std > 0 else 1.0}
            continue
        if facts["kind"] == "multilabel":
            shares = np.nansum(values, 0) / known.sum(0)
        else:
            counts = np.bincount(values[known].astype(np.int64), minlength=len(facts["classes"]))
            shares = counts / counts.sum()
        heads[name] = {**facts, "shares": shares.tolist()}
    return heads
