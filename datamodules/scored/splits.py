"""Which scored text trains and which judges, and what the training part says of the labels."""

import base64
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from datamodules.files.splitting import (
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    SplitOptions,
    split_by_stem,
)
from datamodules.scored.folds import folds_of, strata_of
from datamodules.scored.store import ScoredStore


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

    Rows of files that are for validation or test stay there; only parts without a file are drawn
    from the training files.

    Args:
        store: of the rows.
        folds: which fold is the test, if any.
        split: shares; with folds, validation takes its share of what the test leaves.

    Raises:
        ValueError: there is no such head, or fewer groups than folds.
    """
    parts = np.where(store.text_of_row < 0, -1, store.file_part).astype(np.int8)
    rows = np.flatnonzero(parts == TRAIN)
    if (store.file_part == VALIDATION).any():
        split = replace(split, validation_share=0.0)
    if (store.file_part == TEST).any():
        split = replace(split, test_share=0.0)
    is_drawn = folds.fold is not None or split.validation_share + split.test_share > 0
    if not rows.size or not is_drawn:
        return parts
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


def trained_facts(
    store: ScoredStore, parts: np.ndarray, folds: FoldOptions, split: SplitOptions
) -> dict[str, Any]:
    """Return `split_facts` and the texts of the training part, by which any file can be checked:
    `texts`, the sorted 8-byte digests in base64 (11 characters a text)."""
    digests = np.unique(store.digests[store.text_of_row[parts == TRAIN]])
    texts = base64.b64encode(digests.astype("<u8").tobytes()).decode()
    return {**split_facts(store, folds, split), "texts": texts}


def check_split(trained: dict[str, Any], now: dict[str, Any], digests: np.ndarray) -> None:
    """Refuse to judge a model by rows that it was trained with.

    The division of its training is taken as it was, files that share texts included.

    Args:
        trained: `trained_facts` of the training.
        now: `split_facts` of the evaluation.
        digests: [n] uint64, of the text of each row that judges.

    Raises:
        ValueError: the same rows are divided in another way, or texts of the training judge.
    """
    changed = [f"{n}: {trained[n]} -> {now[n]}" for n in now if now[n] != trained[n]]
    if not changed:
        return
    if trained["rows"] == now["rows"]:
        raise ValueError(
            f"the model was trained on another division of these rows ({', '.join(changed)}), so "
            "that some to be judged were trained with; restore the old values, or name files that "
            "are new."
        )
    seen = np.frombuffer(base64.b64decode(trained["texts"]), "<u8")
    if count := int(np.isin(digests, seen).sum()):
        raise ValueError(
            f"the model was trained with the texts of {count} of the {len(digests)} rows to be "
            "judged: rows have changed since, and which of them train depends on all rows. Give "
            "the rows of the training again, name a file of new texts alone, such as "
            "--data.files.test=new.csv, or train anew."
        )


def rows_of(
    stage: str, store: ScoredStore, folds: FoldOptions, split: SplitOptions, trained: dict[str, Any]
) -> np.ndarray:
    """Return the rows of a stage, [n] int64, of which a trained model has seen none but its own.

    Args:
        stage: train, validation or test.
        store: of the rows.
        folds: which fold is the test, if any.
        split: shares.
        trained: `trained_facts` of the training.

    Raises:
        ValueError: no row belongs to it, or `check_split` refuses them.
    """
    rows = np.flatnonzero(parts_of(store, folds, split) == PART_NAMES.index(stage))
    texts = store.digests[store.text_of_row[rows]]
    check_split(trained, split_facts(store, folds, split), texts)
    if not len(rows):
        raise ValueError(
            f"no row is for {stage}; name data.files.{stage}, or raise "
            f"data.split.{stage}_share above {getattr(split, stage + '_share', 0)}."
        )
    return rows


def check_files(files: Mapping[str, Any], folds: FoldOptions) -> None:
    """Check which parts have files.

    Raises:
        ValueError: there is no such part, or files and folds contradict each other.
    """
    if unknown := set(files) - {*PART_NAMES, "predict"}:
        raise ValueError(
            f"data.files names {', '.join(sorted(unknown))}; the parts are train, validation, "
            "test and predict."
        )
    if folds.fold is not None and (files.get("validation") or files.get("test")):
        raise ValueError(
            "data.fold divides the training files, and data.files names validation or test "
            "files too; leave one of them out."
        )
    if not files.get("train") and files.get("validation"):
        raise ValueError("data.files names validation without train; name both.")


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
            f'data.stratify_by names "{name}"; the heads are {", ".join(store.heads)}.'
        )
    values = store.labels[rows][:, store.columns_of(name)]
    return strata_of(values, store.heads[name]["kind"] == "regression")
