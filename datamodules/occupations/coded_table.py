"""The coded table: every input column and row, in order, and the stable columns of the codes.

Shapes: D distinct inputs, K most codes of one record, N rows.
"""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from datamodules.files.tables import (
    EXCEL_SUFFIX,
    PARQUET_SUFFIXES,
    Table,
    TableWriter,
    free_names,
    suffix_of,
)
from datamodules.occupations.predict_rows import CodedRows, PredictIndex, rows_with_inputs
from datamodules.tokenizers.codes import CodeBook

log = logging.getLogger(__name__)
RESULTS = ("code_ids", "code_confidence", "set_confidence")
REVIEW_BELOW = 0.5


def output_columns(max_codes: int) -> list[str]:
    """The names of the columns that coding adds, in order."""
    parts = ("code", "description", "confidence")
    of_codes = [f"{part}_{k}" for k in range(1, max_codes + 1) for part in parts]
    return [*of_codes, "confidence_set", "needs_review", "truncated", "language_known"]


def write_coded_table(
    index: PredictIndex,
    book: CodeBook,
    results: dict[str, np.ndarray],
    path: Path,
    review_below: float = REVIEW_BELOW,
    escape_formulas: bool = False,
) -> None:
    """Writes the coded table, whole or not at all; an existing file is never overwritten.

    Args:
        index: which row holds which input.
        book: of the model that coded them.
        results: code_ids [D, K] int64 (negative = none), code_confidence [D, K] and
            set_confidence [D] probabilities.
        path: .csv, .tsv or .parquet.
        review_below: a person shall look at rows whose set is less probable than this.
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
    needs_review = results["set_confidence"] < review_below
    added = _Columns(index, book, {**results, "needs_review": needs_review}, as_text)
    with TableWriter(path, like=_like(index, book)) as table:
        for batch in _batches(index, added):
            table.write(without_formulas(batch) if escape_formulas else batch)


def _like(index: PredictIndex, book: CodeBook) -> Table | None:
    """The first table, where all are in one encoding that can hold what is added."""
    tables = [Table(path, index.table) for path in index.files]
    encoding = tables[0].dialect.encoding
    try:
        "".join(book.codes + book.descriptions).encode(encoding)
        if all(table.dialect.encoding == encoding for table in tables):
            return tables[0]
        why = f"the tables are in several encodings, {encoding} the first"
    except UnicodeEncodeError as error:
        letter = error.object[error.start]
        why = f'{encoding} cannot hold "{letter}" of a description'
    log.warning("the coded table is written in UTF-8: %s", why)
    tables[0].dialect = tables[0].dialect._replace(encoding="utf-8")
    return tables[0]


def _batches(index: PredictIndex, added: "_Columns") -> Iterator[pa.RecordBatch]:
    renamed: list[str] | None = None
    for coded in rows_with_inputs(index):
        rows = coded.batch.rows
        if renamed is None:
            renamed = free_names(rows.schema.names, added.names)
        yield pa.RecordBatch.from_arrays(
            [*rows.columns, *added.of(coded)], names=[*renamed, *added.names]
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
    """Makes the added columns of some rows; text for csv, typed for parquet."""

    def __init__(
        self, index: PredictIndex, book: CodeBook, results: dict[str, np.ndarray], as_text: bool
    ) -> None:
        self.index, self.results, self.as_text = index, results, as_text
        # One empty entry at the end, which index -1 (no code) finds.
        self.codes = np.array([*book.codes, ""], dtype=object)
        self.descriptions = np.array([*book.descriptions, ""], dtype=object)
        self.num_codes = results["code_ids"].shape[1]
        self.names = output_columns(self.num_codes)

    def of(self, coded: CodedRows) -> list[pa.Array]:
        """The added columns of these rows, in the order of `names`."""
        is_coded = coded.input_ids >= 0
        ids = np.where(is_coded, coded.input_ids, 0)
        code_ids = np.where(is_coded[:, None], self.results["code_ids"][ids], -1)
        code_ids = np.maximum(code_ids, -1)
        columns = []
        for k in range(self.num_codes):
            has_code = code_ids[:, k] >= 0
            columns.append(pa.array(self.codes[code_ids[:, k]], pa.string()))
            columns.append(pa.array(self.descriptions[code_ids[:, k]], pa.string()))
            confidence = self.results["code_confidence"][ids, k]
            columns.append(self._number(confidence, has_code))
        return [
            *columns,
            self._number(self.results["set_confidence"][ids], is_coded),
            # A row without text has no code: a person must look at it.
            self._flag(self.results["needs_review"][ids] | ~is_coded, np.ones_like(is_coded)),
            self._flag(np.asarray(self.index.is_truncated)[ids], is_coded),
            self._flag(self.index.language_known[ids], is_coded),
        ]

    def _number(self, values: np.ndarray, is_there: np.ndarray) -> pa.Array:
        if self.as_text:
            pairs = zip(values.tolist(), is_there.tolist(), strict=True)
            return pa.array([f"{value:.6f}" if there else "" for value, there in pairs])
        return pa.array(np.round(values.astype(np.float64), 6), mask=~is_there)

    def _flag(self, values: np.ndarray, is_there: np.ndarray) -> pa.Array:
        if self.as_text:
            names = np.array(["false", "true"], dtype=object)[values.astype(np.int64)]
            return pa.array(np.where(is_there, names, ""), pa.string())
        return pa.array(values.astype(bool), mask=~is_there)
