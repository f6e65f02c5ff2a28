"""Predictions of scored texts: every input row, in order, with the scores of each head."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from datamodules.files.rows import JSON_SUFFIXES, read_json_rows
from datamodules.files.tables import (
    Table,
    TableWriter,
    dialect_for,
    free_names,
    naming,
    read_rows,
    same_columns,
)
from datamodules.scored.store import ScoredStore

DIGITS = 6


def check_output(files: list[Path], path: Path) -> None:
    """Raise ValueError unless these files can become one of this kind.

    jsonl stays jsonl, and tables need the same columns."""
    are_json = {f.suffix.lower() in JSON_SUFFIXES for f in [*files, path]}
    if len(are_json) > 1:
        raise ValueError(
            f"{path} cannot hold {files[0]}: lines of JSON are written as .jsonl, tables as .csv, "
            ".tsv or .parquet; name another data.predict_output, or predict the files one by one."
        )
    if are_json == {True}:
        return
    same_columns([Table(file) for file in files], "scored")


def write_scored(
    store: ScoredStore, heads: dict[str, Any], results: dict[str, np.ndarray], path: Path
) -> None:
    """Write the input's rows with the scores, whole or not at all.

    Args:
        store: of the texts that were predicted.
        heads: name -> facts, from the recipe.
        results: head -> [D, P] numbers, as the scorer's `predict_step` returns them.
        path: .csv, .tsv, .parquet or .jsonl.

    Raises:
        FileExistsError: the file exists.
        ValueError: a result is missing.
        RuntimeError: a file has changed since it was read.
    """
    for name in heads:
        if name not in results or len(results[name]) != store.num_texts:
            raise ValueError(f'the prediction has no "{name}" for each of {store.num_texts} texts.')
    if path.suffix.lower() in JSON_SUFFIXES:
        _write_lines(store, heads, results, path)
        return
    position = 0
    classes = [str(name) for facts in heads.values() for name in facts.get("classes") or ()]
    like = dialect_for([Table(file) for file in store.files], classes)
    with TableWriter(path, like=like) as table:
        for batch in read_rows(store.files, on_bad_row=lambda bad: None):
            texts = store.text_of_row[position : position + len(batch.line)]
            position += len(batch.line)
            added = _columns(heads, results, texts)
            names = [*free_names(batch.rows.schema.names, list(added)), *added]
            arrays = [*batch.rows.columns, *(pa.array(values) for values in added.values())]
            table.write(pa.RecordBatch.from_arrays(arrays, names=names))
        _check_position(store, position)


def scores_of(name: str, facts: dict[str, Any], values: np.ndarray) -> dict[str, list[Any]]:
    """Return the columns of one head: the number, level, class or probability, and what is sure.

    Args:
        name: of the head.
        facts: from the recipe.
        values: [n, P] of `predict_step`.
    """
    kind, classes = facts["kind"], facts["classes"]
    rounded = np.round(values.astype(np.float64), DIGITS)
    if kind == "regression":
        return {f"predicted_{name}": rounded[:, 0].tolist()}
    if kind == "binary":
        return {f"probability_{name}": rounded[:, 0].tolist()}
    if kind == "multilabel":
        columns = zip(classes, rounded.T, strict=True)
        return {f"probability_{name}_{label}": column.tolist() for label, column in columns}
    if kind == "ordinal":
        expected = (values.astype(np.float64) * np.arange(len(classes))).sum(1)
        level = np.floor(expected + 0.5).astype(int)
        return {
            f"predicted_{name}": [classes[i] for i in level],
            f"expected_{name}": np.round(expected + _lowest(classes), DIGITS).tolist(),
        }
    return {
        f"predicted_{name}": [classes[i] for i in values.argmax(1)],
        f"probability_{name}": rounded.max(1).tolist(),
    }


def _lowest(classes: list[str]) -> int:
    """The lowest level, where levels are whole numbers in a row; names count from 0."""
    lowest = int(classes[0]) if classes[0].lstrip("-").isdigit() else 0
    return lowest if classes == [str(lowest + i) for i in range(len(classes))] else 0


def _columns(
    heads: dict[str, Any], results: dict[str, np.ndarray], texts: np.ndarray
) -> dict[str, list[Any]]:
    """The added columns of some rows; a rejected row has none of the values."""
    columns: dict[str, list[Any]] = {}
    for name, facts in heads.items():
        for column, values in scores_of(name, facts, results[name][np.maximum(texts, 0)]).items():
            pairs = zip(values, texts.tolist(), strict=True)
            columns[column] = [None if text < 0 else value for value, text in pairs]
    return columns


def _write_lines(
    store: ScoredStore, heads: dict[str, Any], results: dict[str, np.ndarray], path: Path
) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten; move it away.")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), temporary.open("w", encoding="utf-8") as file:
            for line in _lines(store, heads, results):
                file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _lines(
    store: ScoredStore, heads: dict[str, Any], results: dict[str, np.ndarray]
) -> Iterator[str]:
    position = 0
    for path in store.files:
        for row in read_json_rows(path):
            texts = store.text_of_row[position : position + 1]
            position += 1
            if not len(texts):
                break
            added = {name: values[0] for name, values in _columns(heads, results, texts).items()}
            names = free_names(list(row.values), list(added))
            kept = dict(zip(names, row.values.values(), strict=True))
            yield json.dumps({**kept, **added}, ensure_ascii=False)
    _check_position(store, position)


def _check_position(store: ScoredStore, position: int) -> None:
    if position != len(store.text_of_row):
        raise RuntimeError(
            f"the files hold {position} rows, {len(store.text_of_row)} were read before: a file "
            "changed while it was scored; start the prediction again."
        )
