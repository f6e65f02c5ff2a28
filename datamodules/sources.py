"""Tables in: csv, tsv and parquet files become record batches of text columns with line numbers."""

import difflib
import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datamodules.delimited import DELIMITERS, delimited_batches, delimited_header

PARQUET_SUFFIXES = (".parquet", ".pq")
SUFFIXES = (*DELIMITERS, *PARQUET_SUFFIXES)
ROWS_PER_BATCH = 65_536


class BadRow(NamedTuple):
    """One row that breaks a rule: where it stands, the value, the rule with the way out."""

    file: str
    line: int
    value: str
    rule: str
    kind: str = "columns"

    def __str__(self) -> str:
        return self.shown(max_file=200, max_value=60)

    def shown(self, max_file: int, max_value: int) -> str:
        """File, line, value and rule; a long path loses its beginning, a long value its end."""
        file = self.file if len(self.file) <= max_file else "…" + self.file[1 - max_file :]
        value = self.value if len(self.value) <= max_value else self.value[: max_value - 1] + "…"
        is_in_rule = self.value and f'"{self.value}"' in self.rule
        return f"{file}:{self.line}: " + ("" if is_in_rule else f'"{value}": ') + self.rule


@dataclass(frozen=True)
class RowBatch:
    """Some rows of one file.

    Args:
        file: where they come from.
        rows: every column as text (pyarrow string), missing values as "".
        line: [rows] int64, 1-based line in a csv or tsv file, 1-based row in a parquet file.
    """

    file: Path
    rows: pa.RecordBatch
    line: np.ndarray

    def texts(self, column: str) -> list[str]:
        """The values of one column."""
        return self.rows.column(column).to_pylist()


OnBadRow = Callable[[BadRow], None]


def raise_bad_row(bad: BadRow) -> None:
    """Raises the ValueError that names this row: the default of every reader."""
    raise ValueError(str(bad))


def expand_files(
    files: str | Sequence[str] | None, option: str, suffixes: Sequence[str] = SUFFIXES
) -> list[Path]:
    """The files that these paths and patterns name, in the given order, patterns sorted.

    Args:
        files: a path or a pattern such as data/*.csv, or several.
        option: name of the option that holds them, for messages.
        suffixes: of the files that can be read.

    Raises:
        FileNotFoundError: a path does not exist or a pattern matches nothing.
        ValueError: a path is a folder, or a file is named twice.
    """
    given = [files] if isinstance(files, str) else list(files or [])
    found: list[Path] = []
    for entry in given:
        path = Path(entry).expanduser()
        if not path.exists() and glob.has_magic(entry):
            matches = sorted(Path(m) for m in glob.glob(str(path), recursive=True))
            if not matches:
                raise FileNotFoundError(
                    f'{option}: no file matches "{entry}", seen from {Path.cwd()}; check the '
                    "folder and the suffix."
                )
            found += matches
        else:
            found.append(path)
    known: set[Path] = set()
    for path in found:
        check_file(path, option, suffixes)
        if path in known:
            raise ValueError(f"{option} names {path} twice; its rows would count double.")
        known.add(path)
    return found


def check_file(path: Path, option: str = "the table", suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raises unless this is a file with one of these suffixes."""
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; name its files, such as {path}/*.csv.")
    if not path.exists():
        near = difflib.get_close_matches(path.name, _neighbours(path), n=1)
        hint = f'Did you mean "{path.parent / near[0]}"?' if near else "Name a file that is there."
        raise FileNotFoundError(f"{option}: {path} does not exist. {hint}")
    if path.suffix.lower() not in suffixes:
        kind = "table" if suffixes is SUFFIXES else "file"
        raise ValueError(
            f'{option}: {path} ends in "{path.suffix}", which is none of {", ".join(suffixes)}; '
            f"save the {kind} as one of these."
        )


def column_names(path: Path) -> list[str]:
    """The names of a table's columns.

    Raises:
        ValueError: the file is empty, binary or damaged, or two columns have one name.
    """
    check_file(path)
    if path.suffix.lower() in PARQUET_SUFFIXES:
        names = _open_parquet(path).schema_arrow.names
    else:
        names = delimited_header(path)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f'{path}: the column name "{twice[0]}" occurs {names.count(twice[0])} times in the '
            "header; every column needs a name of its own."
        )
    return names


def check_columns(path: Path, wanted: Sequence[str], option: str = "columns") -> None:
    """Raises ValueError unless the table has all these columns; names the likely ones."""
    names = column_names(path)
    for name in wanted:
        if name in names:
            continue
        near = difflib.get_close_matches(name.lower(), [n.lower() for n in names], n=1)
        match = next((n for n in names if near and n.lower() == near[0]), None)
        hint = separator_hint(names) or (f' Did you mean "{match}"?' if match is not None else "")
        if not hint and "." in option:
            hint = f" Name one of them with --data.{option}."
        raise ValueError(
            f'{path} has no column "{name}" ({option}); it has: {", ".join(names)}.{hint}'
        )


def separator_hint(names: Sequence[str]) -> str:
    """What to do about a header that another separator cuts; "" where it does not look so."""
    if len(names) != 1 or not any(mark in names[0] for mark in ",;\t|"):
        return ""
    return (
        " The header is one single column: save the table with the separator of its suffix "
        "(comma for .csv, tab for .tsv)."
    )


def read_rows(
    files: Path | Sequence[Path],
    columns: Sequence[str] | None = None,
    on_bad_row: OnBadRow = raise_bad_row,
) -> Iterator[RowBatch]:
    """Yields the rows of these files in order, as batches of text columns.

    Args:
        files: csv, tsv or parquet.
        columns: the columns to read; None reads all.
        on_bad_row: takes each row that cannot be cut into columns; such a row is in no batch.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is empty, binary, damaged, not UTF-8, or lacks a column.
    """
    for path in [files] if isinstance(files, Path) else files:
        names = column_names(path)
        if columns is not None:
            check_columns(path, columns)
        wanted = names if columns is None else list(columns)
        if path.suffix.lower() in PARQUET_SUFFIXES:
            yield from _parquet_batches(path, wanted)
        else:
            yield from _delimited_rows(path, names, wanted, on_bad_row)


def _delimited_rows(
    path: Path, names: list[str], wanted: list[str], on_bad_row: OnBadRow
) -> Iterator[RowBatch]:
    num_lines = 0

    def on_bad(line: int, value: str, rule: str) -> None:
        nonlocal num_lines
        num_lines += 1
        on_bad_row(BadRow(str(path), line, value, rule))

    for rows, line in delimited_batches(path, names, on_bad):
        num_lines += len(line)
        if len(line):
            yield RowBatch(path, rows.select(wanted), line)
    if num_lines == 0:
        raise ValueError(f"{path} holds a header and no rows; give it at least one row.")


def _open_parquet(path: Path) -> pq.ParquetFile:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; it needs a parquet table.")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(_damaged(path, error)) from error


def _parquet_batches(path: Path, wanted: list[str]) -> Iterator[RowBatch]:
    table = _open_parquet(path)
    if table.metadata.num_rows == 0:
        raise ValueError(f"{path} holds columns and no rows; give it at least one row.")
    position = 0
    batches = table.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted)
    while True:
        try:
            batch = next(batches, None)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(_damaged(path, error)) from error
        if batch is None:
            return
        arrays = [as_text(batch.column(n), f'{path}, column "{n}"') for n in wanted]
        line = np.arange(position + 1, position + 1 + batch.num_rows, dtype=np.int64)
        position += batch.num_rows
        yield RowBatch(path, pa.RecordBatch.from_arrays(arrays, names=wanted), line)


def _damaged(path: Path, error: Exception) -> str:
    reason = str(error).splitlines()[0].rstrip(".")
    return f"{path} is damaged or no parquet file ({reason}); write or copy it again."


def as_text(column: pa.Array, name: str) -> pa.Array:
    """The column as text: missing values become "", whole numbers have no ".0".

    Raises:
        ValueError: the column holds lists, structures or bytes that are not UTF-8.
    """
    kind = column.type
    if pa.types.is_dictionary(kind):
        return as_text(column.dictionary_decode(), name)
    if pa.types.is_floating(kind):
        return pa.array([_number_text(v) for v in column.to_pylist()], pa.string())
    if pa.types.is_nested(kind):
        raise ValueError(
            f"{name} holds {kind}; every column must be plain text or numbers: join the values "
            "with a separator, or write one column each."
        )
    try:
        return pc.fill_null(column.cast(pa.string()), "")
    except pa.ArrowException as error:
        raise ValueError(f"{name} ({kind}) cannot be read as text: {error}.") from error


def _number_text(value: float | None) -> str:
    if value is None or value != value:
        return ""
    return str(int(value)) if abs(value) < 2**63 and value == int(value) else repr(value)


def _neighbours(path: Path) -> list[str]:
    return [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
