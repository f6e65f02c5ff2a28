"""Coded tables: every input column and row, in order, and the columns of the codes beside them.

The first pass writes each distinct (text, language) once, and the number of its input for every
row. After prediction the tables are read again.
Shapes: N rows, D distinct inputs, P characters of all inputs, K most codes of one record.
"""

from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from datamodules.core.batches import padded_texts
from datamodules.core.planned import PlannedDataset
from datamodules.core.store import (
    ArrayFile,
    ArrayFolder,
    cache_folder,
    file_digest,
    made_once,
    write_arrays,
)
from datamodules.files.rows import BadRows, OnBadRows, kind_of
from datamodules.files.tables import (
    EXCEL_SUFFIX,
    PARQUET_SUFFIXES,
    Table,
    TableOptions,
    check_same_columns,
    write_beside,
)
from datamodules.occupations.store import Columns, RowReader, text_arrays
from datamodules.tokenizers.codes import CodeBook, CodeSystem, TextNormalisation

INDEX_VERSION = 4
NO_TEXT = -1


class PredictIndex(ArrayFolder):
    """The distinct inputs of some tables.

    Attributes:
        files: the tables.
        table: how they are written.
        notes: what of their rows is not as it should be.
        arrays: code_points [P] uint32, the texts one behind the other; text_offsets [D + 1] int64;
            is_truncated [D] bool; language_ids [D] int16, index in the recipe's languages,
            0 = unknown; input_of_row [N] int64, the number of the row's input, -1 = a row without
            text.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = [Path(name) for name in self.facts["files"]]
        self.table = TableOptions(**self.facts["table"])
        self.notes: list[str] = self.facts["notes"]


class DistinctInputs(PlannedDataset):
    """The distinct (text, language) pairs of the tables to code, each once."""

    def __init__(self, index: PredictIndex) -> None:
        self.index = index
        self.lengths = np.diff(index.arrays["text_offsets"])
        self.fingerprint = index.fingerprint
        self.target_counts = {}

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """The padded batch of inputs [B], without codes."""
        language_ids = self.index.arrays["language_ids"][sample_ids].astype(np.int64)
        batch = padded_texts(self.index.parts("code_points", "text_offsets", sample_ids))
        return {**batch, "language_id": torch.from_numpy(language_ids)}


def open_index(
    files: Sequence[Path],
    columns: Columns,
    recipe: dict[str, Any],
    on_bad_rows: OnBadRows = "error",
    table: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> PredictIndex:
    """The index of these tables, made where the cache lacks it.

    Args:
        files: tables with a text column; code columns are not needed.
        columns: which column holds text and language.
        recipe: of the checkpoint that will code them.
        on_bad_rows: `error` names the lines that cannot be cut into columns, `reject` leaves them
            out.
        table: how the tables are written.

    Raises:
        ValueError: tables differ in their columns, or rows break a rule.
    """
    tables = [Table(path, table) for path in files]
    for one in tables:
        columns.text_columns(one)
    check_same_columns(tables)
    key = {
        "version": INDEX_VERSION,
        "files": [[str(path.resolve()), file_digest(path)] for path in files],
        "columns": [columns.text, columns.language, columns.default_language],
        "encoding": {name: recipe[name] for name in ("normalisation", "max_length", "languages")},
        "on_bad_rows": on_bad_rows,
        "table": asdict(table),
    }

    def make(folder: Path) -> None:
        bad_rows, system = BadRows(on_bad_rows), CodeSystem()
        normalisation = TextNormalisation.from_dict(recipe["normalisation"])
        reader = RowReader(columns, normalisation, system, bad_rows, None, table)
        language_index = {name: i for i, name in enumerate(recipe["languages"])}
        inputs: dict[tuple[str, int], int] = {}  # text and index of the language
        with ArrayFile(folder / "input_of_row.npy", np.int64) as input_of_row:
            for path in files:
                numbers = (
                    NO_TEXT
                    if text is None
                    else inputs.setdefault((text, language_index.get(name, 0)), len(inputs))
                    for text, name in reader.inputs(path)
                )
                input_of_row.add(np.fromiter(numbers, np.int64))
        bad_rows.settle(folder)
        if not inputs:
            why = [*bad_rows.rows[:1], *reader.notes()][0]
            raise ValueError(f"{', '.join(map(str, files))}: no row can be coded. {why}")
        texts, languages = zip(*inputs, strict=True)
        arrays = text_arrays(texts, recipe["max_length"])
        arrays["language_ids"] = np.array(languages, np.int16)
        content = sha256()
        for values in arrays.values():
            content.update(values.tobytes())
        write_arrays(
            folder,
            arrays,
            files=[str(path.resolve()) for path in files],
            fingerprint=content.hexdigest(),
            notes=reader.notes(),
            table=asdict(table),
        )

    return PredictIndex(made_once(cache_folder("predict", key), make))


def write_coded_table(
    index: PredictIndex, book: CodeBook, results: dict[str, np.ndarray], path: Path
) -> None:
    """Writes the coded table, whole or not at all; an existing file is never overwritten.

    Args:
        index: which row holds which input.
        book: of the model that coded them.
        results: code_ids [D, K] int64 (negative = none), code_confidence [D, K] and
            set_confidence [D] probabilities, needs_review [D] bool; next_ids [D, k, K] and
            next_confidence [D, k] where further sets are wanted.
        path: a file of any kind of table.

    Raises:
        FileExistsError: the file exists.
        RuntimeError: a table has changed since the index was made.
    """
    is_typed = kind_of(path) in (*PARQUET_SUFFIXES, EXCEL_SUFFIX)
    most_codes = (results["code_ids"] >= 0).sum(1).max(initial=0)
    num_codes = max(1, int(most_codes))  # as many as an answer has
    num_next = results["next_ids"].shape[1] if "next_ids" in results else 0
    # One empty entry at the end, which index -1 (no code) finds.
    codes, descriptions = (np.array([*n, ""], object) for n in (book.codes, book.descriptions))

    def values(column: np.ndarray, is_there: np.ndarray) -> pa.Array:
        """Numbers of six decimals, or true and false; typed, or as text."""
        is_number = column.dtype != bool
        if is_typed:
            typed = np.round(column.astype(np.float64), 6) if is_number else column
            return pa.array(typed, mask=~is_there)
        texts = [f"{x:.6f}" if is_number else str(x).lower() for x in column.tolist()]
        pairs = zip(texts, is_there.tolist(), strict=True)
        return pa.array([text if there else "" for text, there in pairs], pa.string())

    def added(rows: slice) -> dict[str, pa.Array]:
        """The added columns of these rows, in order."""
        input_ids = index.arrays["input_of_row"][rows]
        is_coded, ids = input_ids >= 0, np.maximum(input_ids, 0)
        columns: dict[str, pa.Array] = {}
        for k in range(num_codes):
            code_ids = np.maximum(np.where(is_coded, results["code_ids"][ids, k], -1), -1)
            columns[f"code_{k + 1}"] = pa.array(codes[code_ids], pa.string())
            columns[f"description_{k + 1}"] = pa.array(descriptions[code_ids], pa.string())
            confidence = results["code_confidence"][ids, k]
            columns[f"confidence_{k + 1}"] = values(confidence, code_ids >= 0)
        columns["confidence_set"] = values(results["set_confidence"][ids], is_coded)
        for k in range(num_next):
            next_ids = np.maximum(results["next_ids"][ids, k], -1)
            has_set = is_coded & (next_ids[:, 0] >= 0)
            sets = ["+".join(filter(None, row)) for row in codes[next_ids].tolist()]
            of_rows = np.where(has_set, np.array(sets, object), "")
            columns[f"set_{k + 2}"] = pa.array(of_rows, pa.string())
            confidence = results["next_confidence"][ids, k]
            columns[f"confidence_set_{k + 2}"] = values(confidence, has_set)
        # A row without text has no code: a person must look at it.
        needs_review = results["needs_review"][ids].astype(bool) | ~is_coded
        columns["needs_review"] = values(needs_review, np.ones_like(is_coded))
        columns["truncated"] = values(index.arrays["is_truncated"][ids], is_coded)
        columns["language_known"] = values(index.arrays["language_ids"][ids] != 0, is_coded)
        return columns

    texts = book.codes + book.descriptions
    write_beside(index.files, index.table, path, len(index.arrays["input_of_row"]), added, texts)
