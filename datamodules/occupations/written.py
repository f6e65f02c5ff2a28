"""Output tables of the coder: all input rows and columns, in order, with columns for the codes.

The input tables are read again after prediction. A crosswalk adds the codes of other systems.
Shapes: N rows, D distinct inputs, K the most codes of a record, C codes of the book.
"""

import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from datamodules.core.store import replacing
from datamodules.files.rows import kind_of
from datamodules.files.tables import EXCEL_SUFFIX, PARQUET_SUFFIXES, Table, write_beside
from datamodules.occupations.store import PredictIndex
from datamodules.tokenizers.codes import CodeBook

log = logging.getLogger(__name__)
ROWS_AT_ONCE = 65_536


@dataclass(frozen=True)
class CrosswalkOptions:
    """A table that maps codes to other systems, such as HISCLASS.

    Args:
        path: table with the column `code` and one column per system; the coded table gets columns
            named after it, such as hisclass_1, hisclass_2 … for `hisclass`.
        joined_by: text between several targets of one code; `None` makes these an error.
    """

    path: str
    joined_by: str | None = None


class Crosswalk:
    """Codes of other systems for the codes of a code book.

    Raises:
        ValueError: the table has no code of the book, no second column, or a column name that the
            coded table uses itself; or a code has several targets without `joined_by`.
    """

    def __init__(self, options: CrosswalkOptions, book: CodeBook) -> None:
        table = Table(Path(options.path).expanduser())
        table.check(["code"], "crosswalk")
        names = [name for name in table.names if name != "code"]
        if not names or {"description", "confidence", "set", "confidence_set"} & {*names}:
            raise ValueError(
                f"{options.path} has the columns {', '.join(table.names)}; it needs code and one "
                "for each system, and none that the coded table makes itself (description, "
                "confidence, set, confidence_set): rename or drop it."
            )
        found: dict[str, dict[int, dict[str, int]]] = {name: {} for name in names}
        unknown: dict[str, int] = {}
        for line, row in table.rows():
            code = row["code"].strip()
            if code not in book:
                unknown.setdefault(code, line)
                continue
            for name in names:
                if target := row[name].strip():
                    lines = found[name].setdefault(book.index(code), {})
                    lines.setdefault(target, line)
                    if len(lines) > 1 and options.joined_by is None:
                        (first, at), (second, here) = list(lines.items())[:2]
                        raise ValueError(
                            f'{options.path}: the code "{code}" leads to two {name}, "{first}" in '
                            f'line {at} and "{second}" in line {here}; keep one, or write both '
                            "with --data.crosswalk.joined_by=+."
                        )
        if not any(found.values()):
            raise ValueError(
                f"{options.path} has no code of this model, such as {book.codes[0]}; are "
                "leading zeros lost, or is it of another system?"
            )
        if unknown:
            log.warning(
                '%s: %d codes are not in the model\'s book, such as "%s" in line %d: left out.',
                *(options.path, len(unknown), *next(iter(unknown.items()))),
            )
        # Name of a system -> [C + 1] texts by code id, "" for missing targets and id -1.
        self.targets: dict[str, np.ndarray] = {}
        for name, targets in found.items():
            if missing := [c for i, c in enumerate(book.codes) if i not in targets]:
                log.warning(
                    '%s: %d of %d codes lead to no %s, such as "%s": empty in the coded table.',
                    *(options.path, len(missing), len(book), name, missing[0]),
                )
            joined = [(options.joined_by or "").join(targets.get(i, {})) for i in range(len(book))]
            self.targets[name] = np.array([*joined, ""], object)


def write_coded_table(
    index: PredictIndex,
    book: CodeBook,
    results: dict[str, np.ndarray],
    path: Path,
    crosswalk: Crosswalk | None = None,
) -> None:
    """Write the coded table to a new file, atomically.

    Args:
        index: the inputs, and the input of each row.
        book: code book of the model.
        results: code_ids [D, K] int64 (negative = none), code_confidence [D, K] and
            set_confidence [D] probabilities, needs_review [D] bool; if further sets are asked for,
            next_ids [D, k, K] and next_confidence [D, k]; if a coverage is, plausible
            [D, ceil(C / 8)] uint8, one bit per code, lowest first, for membership in the set of
            plausible codes; embedding [D, W] float32, written to `embeddings_path`.
        path: a table file of any kind.
        crosswalk: maps to the codes of other systems.

    Raises:
        FileExistsError: the file exists, or that of the embeddings.
        RuntimeError: a table has changed since the index was made.
    """
    is_typed = kind_of(path) in (*PARQUET_SUFFIXES, EXCEL_SUFFIX)
    num_codes = int((results["code_ids"] >= 0).sum(1).max(initial=1))  # the most in any answer
    num_next = results["next_ids"].shape[1] if "next_ids" in results else 0
    # The last entry is empty, for index -1 (no code).
    codes, descriptions = (np.array([*n, ""], object) for n in (book.codes, book.descriptions))

    def values(column: np.ndarray, is_there: np.ndarray) -> pa.Array:
        """Return a column; fractions get six decimals, as text in csv files."""
        is_fraction = np.issubdtype(column.dtype, np.floating)
        if is_fraction and is_typed:
            column = np.round(column.astype(np.float64), 6)
        elif is_fraction:
            column = np.array([f"{x:.6f}" for x in column.tolist()], object)
        return pa.array(column, mask=~is_there)

    def added(rows: slice) -> dict[str, pa.Array]:
        """Return the added columns of these rows."""
        input_ids = index.arrays["input_of_row"][rows]
        is_coded, ids = input_ids >= 0, np.maximum(input_ids, 0)
        columns: dict[str, pa.Array] = {}
        for k in range(num_codes):
            code_ids = np.maximum(np.where(is_coded, results["code_ids"][ids, k], -1), -1)
            columns[f"code_{k + 1}"] = pa.array(codes[code_ids], pa.string())
            columns[f"description_{k + 1}"] = pa.array(descriptions[code_ids], pa.string())
            confidence = results["code_confidence"][ids, k]
            columns[f"confidence_{k + 1}"] = values(confidence, code_ids >= 0)
            for name, targets in (crosswalk.targets if crosswalk else {}).items():
                columns[f"{name}_{k + 1}"] = pa.array(targets[code_ids], pa.string())
        columns["confidence_set"] = values(results["set_confidence"][ids], is_coded)
        for k in range(num_next):
            next_ids = np.maximum(results["next_ids"][ids, k], -1)
            has_set = is_coded & (next_ids[:, 0] >= 0)
            sets = ["+".join(filter(None, row)) for row in codes[next_ids].tolist()]
            of_rows = np.where(has_set, np.array(sets, object), "")
            columns[f"set_{k + 2}"] = pa.array(of_rows, pa.string())
            columns[f"confidence_set_{k + 2}"] = values(results["next_confidence"][ids, k], has_set)
        if "plausible" in results:
            bits = np.unpackbits(results["plausible"][ids], axis=1, bitorder="little")
            held = (bits[:, : len(book)] * is_coded[:, None]).astype(bool)
            sets = ["|".join(codes[:-1][row]) for row in held]
            columns["plausible_codes"] = pa.array(sets, pa.string())
            columns["num_plausible"] = values(held.sum(1), is_coded)
        # A row without text has no code, so a person must look at it.
        needs_review = results["needs_review"][ids].astype(bool) | ~is_coded
        columns["needs_review"] = values(needs_review, np.ones_like(is_coded))
        columns["truncated"] = values(index.arrays["is_truncated"][ids], is_coded)
        columns["language_known"] = values(index.arrays["language_ids"][ids] != 0, is_coded)
        return columns

    if "embedding" in results and embeddings_path(path).exists():
        raise FileExistsError(f"{embeddings_path(path)} exists and is not overwritten; move it.")
    texts = book.codes + book.descriptions
    texts += [text for t in (crosswalk.targets if crosswalk else {}).values() for text in t]
    write_beside(index.files, index.table, path, len(index.arrays["input_of_row"]), added, texts)
    if "embedding" in results:
        write_embeddings(index, results["embedding"], embeddings_path(path))


def embeddings_path(path: Path) -> Path:
    """Return the path of the embeddings that belong to a coded table."""
    return path.with_name(f"{path.name}.embeddings.parquet")


def write_embeddings(index: PredictIndex, vectors: np.ndarray, path: Path) -> None:
    """Write vectors [D, W] float32 atomically to a parquet file with the column `embedding` and one
    row per row of the tables, null for rows without text."""
    width = vectors.shape[1]
    kind = pa.list_(pa.float32(), width)
    with (
        replacing(path) as unfinished,
        pq.ParquetWriter(unfinished, pa.schema({"embedding": kind})) as file,
    ):
        input_of_row = index.arrays["input_of_row"]
        for start in range(0, len(input_of_row), ROWS_AT_ONCE):
            ids = input_of_row[start : start + ROWS_AT_ONCE]
            flat = pa.array(vectors[np.maximum(ids, 0)].astype(np.float32).ravel())
            array = pa.FixedSizeListArray.from_arrays(flat, width, mask=pa.array(ids < 0))
            file.write_table(pa.table({"embedding": array}))
