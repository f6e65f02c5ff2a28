"""The coded table: every input column and row, in order, and the stable columns of the codes.

Shapes: D distinct inputs, K most codes of one record, N rows.
"""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datamodules.files.tables import (
    EXCEL_SUFFIX,
    PARQUET_SUFFIXES,
    ROWS_PER_BATCH,
    Table,
    TableWriter,
    dialect_for,
    free_names,
    suffix_of,
)
from datamodules.occupations.predict_rows import PredictIndex, rows_with_inputs
from datamodules.tokenizers.codes import CodeBook

log = logging.getLogger(__name__)
RESULTS = ("code_ids", "code_confidence", "set_confidence", "needs_review")
PROBABILITY_ROWS = 1024  # at once: each has a number per code


def output_columns(num_codes: int, k_best: int = 1) -> list[str]:
    """The names of the columns that coding adds, in order."""
    parts = ("code", "description", "confidence")
    of_codes = [f"{part}_{k}" for k in range(1, num_codes + 1) for part in parts]
    of_sets = [f"{part}_{k}" for k in range(2, k_best + 1) for part in ("set", "confidence_set")]
    return [*of_codes, "confidence_set", *of_sets, "needs_review", "truncated", "language_known"]


def write_coded_table(
    index: PredictIndex,
    book: CodeBook,
    results: dict[str, np.ndarray],
    path: Path,
    escape_formulas: bool = False,
) -> None:
    """Writes the coded table, whole or not at all; an existing file is never overwritten.

    Args:
        index: which row holds which input.
        book: of the model that coded them.
        results: code_ids [D, K] int64 (negative = none), code_confidence [D, K] and
            set_confidence [D] probabilities, needs_review [D] bool; next_ids [D, k, K] and
            next_confidence [D, k] where further sets are wanted; probabilities [D, C] of all codes,
            which become a table beside this one, `….probabilities.csv`.
        path: a file of any kind of table.
        escape_formulas: put an apostrophe before texts that a spreadsheet would run.

    Raises:
        FileExistsError: the file exists.
        ValueError: a result is missing, or is not there for every input.
    """
    for name in RESULTS:
        if name not in results or len(results[name]) != index.num_inputs:
            have = {key: len(value) for key, value in results.items()}
            raise ValueError(
                f'predict_step must return "{name}" for each of {index.num_inputs} inputs; it '
                f"returned {have}."
            )
    as_text = suffix_of(path) not in (*PARQUET_SUFFIXES, EXCEL_SUFFIX)
    tables: dict[Path, _Columns | _Probabilities] = {}
    if "probabilities" in results:
        name = path.name.removesuffix(suffix_of(path)) + f".probabilities{suffix_of(path)}"
        tables[path.with_name(name)] = _Probabilities(index, book, results, as_text)
    tables[path] = _Columns(index, book, results, as_text)
    read = [Table(path, index.table) for path in index.files]
    like = dialect_for(read, book.codes + book.descriptions)
    with ExitStack() as files:  # all of them get their names at the end
        writers = {file: files.enter_context(TableWriter(file, like=like)) for file in tables}
        for file, added in tables.items():
            for batch in _batches(index, added):
                writers[file].write(without_formulas(batch) if escape_formulas else batch)


def _batches(index: PredictIndex, added: "_Columns | _Probabilities") -> Iterator[pa.RecordBatch]:
    renamed: list[str] | None = None
    for coded in rows_with_inputs(index):
        rows = coded.batch.rows
        if renamed is None:
            renamed = free_names(rows.schema.names, added.names)
        for start in range(0, len(rows), added.rows_at_once):
            some = rows.slice(start, added.rows_at_once)
            columns = added.of(coded.input_ids[start : start + added.rows_at_once])
            yield pa.RecordBatch.from_arrays(
                [*some.columns, *columns], names=[*renamed, *added.names]
            )


def without_formulas(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows with an apostrophe before each text that begins with = + - or @ and is no number."""
    columns = []
    for column in batch.columns:
        if pa.types.is_string(column.type):
            runs = pc.match_substring_regex(column, r"^\s*[=+\-@]")
            is_number = pc.match_substring_regex(column, r"^[+-]?[0-9.,]+$")
            escaped = pc.binary_join_element_wise("'", column, "")
            column = pc.if_else(pc.and_not(runs, is_number), escaped, column)
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


class _Columns:
    """Makes the added columns of some rows; text for csv, typed for parquet and Excel."""

    rows_at_once = ROWS_PER_BATCH

    def __init__(
        self, index: PredictIndex, book: CodeBook, results: dict[str, np.ndarray], as_text: bool
    ) -> None:
        self.index, self.results, self.as_text = index, results, as_text
        # One empty entry at the end, which index -1 (no code) finds.
        self.codes = np.array([*book.codes, ""], dtype=object)
        self.descriptions = np.array([*book.descriptions, ""], dtype=object)
        num_codes = (results["code_ids"] >= 0).sum(1)
        self.num_codes = max(1, int(num_codes.max(initial=0)))  # as many as an answer has
        self.num_next = results["next_ids"].shape[1] if "next_ids" in results else 0
        self.names = output_columns(self.num_codes, 1 + self.num_next)

    def of(self, input_ids: np.ndarray) -> list[pa.Array]:
        """The added columns of these rows, in the order of `names`; -1 is a row without text."""
        is_coded = input_ids >= 0
        ids = np.where(is_coded, input_ids, 0)
        code_ids = np.where(is_coded[:, None], self.results["code_ids"][ids], -1)
        code_ids = np.maximum(code_ids, -1)
        columns = []
        for k in range(self.num_codes):
            has_code = code_ids[:, k] >= 0
            columns.append(pa.array(self.codes[code_ids[:, k]], pa.string()))
            columns.append(pa.array(self.descriptions[code_ids[:, k]], pa.string()))
            confidence = self.results["code_confidence"][ids, k]
            columns.append(self._number(confidence, has_code))
        columns.append(self._number(self.results["set_confidence"][ids], is_coded))
        for k in range(self.num_next):
            next_ids = np.maximum(self.results["next_ids"][ids, k], -1)
            has_set = is_coded & (next_ids[:, 0] >= 0)
            sets = ["+".join(filter(None, codes)) for codes in self.codes[next_ids].tolist()]
            columns.append(pa.array(np.where(has_set, np.array(sets, object), ""), pa.string()))
            columns.append(self._number(self.results["next_confidence"][ids, k], has_set))
        return [
            *columns,
            # A row without text has no code: a person must look at it.
            self._flag(
                self.results["needs_review"][ids].astype(bool) | ~is_coded, np.ones_like(is_coded)
            ),
            self._flag(np.asarray(self.index.is_truncated)[ids], is_coded),
            self._flag(self.index.language_known[ids], is_coded),
        ]

    def _number(self, values: np.ndarray, is_there: np.ndarray) -> pa.Array:
        return _numbers(values, is_there, self.as_text)

    def _flag(self, values: np.ndarray, is_there: np.ndarray) -> pa.Array:
        if self.as_text:
            names = np.array(["false", "true"], dtype=object)[values.astype(np.int64)]
            return pa.array(np.where(is_there, names, ""), pa.string())
        return pa.array(values.astype(bool), mask=~is_there)


class _Probabilities:
    """Makes one column per code of the book."""

    rows_at_once = PROBABILITY_ROWS

    def __init__(
        self, index: PredictIndex, book: CodeBook, results: dict[str, np.ndarray], as_text: bool
    ) -> None:
        self.values, self.as_text = results["probabilities"], as_text
        self.names = list(book.codes)

    def of(self, input_ids: np.ndarray) -> list[pa.Array]:
        is_coded = input_ids >= 0
        values = self.values[np.where(is_coded, input_ids, 0)]
        return [_numbers(column, is_coded, self.as_text) for column in values.T]


def _numbers(values: np.ndarray, is_there: np.ndarray, as_text: bool) -> pa.Array:
    """Numbers of six decimals, as text or typed."""
    if as_text:
        pairs = zip(values.tolist(), is_there.tolist(), strict=True)
        return pa.array([f"{value:.6f}" if there else "" for value, there in pairs], pa.string())
    return pa.array(np.round(values.astype(np.float64), 6), mask=~is_there)
