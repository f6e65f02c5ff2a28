"""Tables in and out: csv, tsv and parquet, as record batches of text with line numbers."""

import codecs
import csv
import difflib
import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from datamodules.files.bad_rows import BadRow

DELIMITERS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 24
SIGNATURES = {
    b"PAR1": "a parquet file: rename it to .parquet",
    b"PK\x03\x04": "a zip or Excel file: save the sheet as csv (UTF-8)",
    b"\x1f\x8b": "a gzip file: unpack it first",
    codecs.BOM_UTF16_LE: "UTF-16 text: convert it with `iconv -f UTF-16 -t UTF-8`",
    codecs.BOM_UTF16_BE: "UTF-16 text: convert it with `iconv -f UTF-16 -t UTF-8`",
}
# Possessive: a doubled quote never counts as the end of a value.
QUOTED_VALUE = re.compile(r'"((?:[^"]|"")*+)"')
PARQUET_SUFFIXES = (".parquet", ".pq")
SUFFIXES = (*DELIMITERS, *PARQUET_SUFFIXES)
ROWS_PER_BATCH = 65_536

OnBadLine = Callable[[int, str, str], None]


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


class _LineError(ValueError):
    """What is wrong with one line."""


def delimited_header(path: Path) -> list[str]:
    """The column names in the first line of the file.

    Raises:
        ValueError: the file is empty, binary, not UTF-8, or its first line is no header.
    """
    first_line, block = next(_blocks(path), (1, b""))
    if not block.strip():
        raise ValueError(f"{path} is empty; it needs a header line and rows.")
    line = _decode(path, first_line, block.split(b"\n", 1)[0]).removesuffix("\r")
    if "\r" in line:
        raise ValueError(
            f"{path}:1: the lines end in carriage returns alone (old Macintosh); convert them "
            r"with `tr '\r' '\n'`."
        )
    try:
        return split_line(line, _delimiter(path))
    except _LineError as error:
        raise ValueError(f"{path}:1: the header cannot be read: {error}") from error


def delimited_batches(
    path: Path, names: list[str], on_bad_line: OnBadLine
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Yields all columns as text with the 1-based line of each row, [rows] int64.

    Args:
        path: a csv or tsv file.
        names: the columns, from `delimited_header`.
        on_bad_line: takes line, text and rule of each line that cannot be cut into columns.

    Raises:
        ValueError: the file is binary or not UTF-8.
    """
    is_header = True
    for first_line, block in _blocks(path):
        if is_header:
            block, first_line = block.partition(b"\n")[2], 2
            is_header = False
        if not block:
            continue
        text = _decode(path, first_line, block)
        rows = _parse_fast(block, names, _delimiter(path))
        if rows is not None:
            yield rows, np.arange(first_line, first_line + rows.num_rows, dtype=np.int64)
        else:
            yield _parse_carefully(text, first_line, names, _delimiter(path), on_bad_line)


def split_line(line: str, delimiter: str) -> list[str]:
    """The values of one line; a quote counts only at the beginning of a value.

    Raises:
        ValueError: a quote is not closed on this line, or is followed by other text.
    """
    values, position = [], 0
    while True:
        if line[position : position + 1] == '"':
            match = QUOTED_VALUE.match(line, position)
            if match is None:
                raise _LineError(
                    "a quote opens a value and is not closed on this line, which glues rows "
                    "together; close it, double a quote that belongs to the text, and write no "
                    "line breaks inside values."
                )
            values.append(match[1].replace('""', '"'))
            position = match.end()
            if position < len(line) and line[position] != delimiter:
                raise _LineError(
                    f"text follows the closing quote of value {len(values)}; double the quotes "
                    'inside a quoted value ("").'
                )
        else:
            end = line.find(delimiter, position)
            end = len(line) if end < 0 else end
            values.append(line[position:end])
            position = end
        if position >= len(line):
            return values
        position += 1


def _delimiter(path: Path) -> str:
    return DELIMITERS[path.suffix.lower()]


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (number of the first line, whole lines) of about BLOCK_BYTES each."""
    line, rest = 1, b""
    with path.open("rb") as file:
        while chunk := file.read(BLOCK_BYTES):
            if line == 1 and not rest:
                _check_signature(path, chunk)
                chunk = chunk.removeprefix(codecs.BOM_UTF8)
            if b"\0" in chunk:
                at = line + (rest + chunk).split(b"\0", 1)[0].count(b"\n")
                raise ValueError(
                    f"{path}:{at}: a NUL byte: this is a binary file (or UTF-16), not a table in "
                    "UTF-8 text; save it as csv (UTF-8)."
                )
            block, newline, tail = (rest + chunk).rpartition(b"\n")
            if len(tail) > MAX_LINE_BYTES:
                long_line = line + (block + newline).count(b"\n")
                raise ValueError(
                    f"{path}:{long_line}: a line is longer than "
                    f"{MAX_LINE_BYTES >> 20} MiB; this is no table with one row per line."
                )
            if newline:
                yield line, block + newline
                line += block.count(b"\n") + 1
            rest = tail
    if rest:
        yield line, rest


def _check_signature(path: Path, chunk: bytes) -> None:
    for signature, meaning in SIGNATURES.items():
        if chunk.startswith(signature):
            raise ValueError(f"{path} is a binary file, not UTF-8 text: it looks like {meaning}.")


def _decode(path: Path, first_line: int, block: bytes) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        before = block[: error.start]
        line = first_line + before.count(b"\n")
        place = error.start - before.rfind(b"\n")
        raise ValueError(
            f"{path}:{line}: byte 0x{block[error.start]:02X} at place {place} of the line is not "
            "UTF-8, which every table must be; convert it, for example with "
            f"`iconv -f WINDOWS-1252 -t UTF-8 {path.name} > converted{path.suffix}`."
        ) from error


def _parse_fast(block: bytes, names: list[str], delimiter: str) -> pa.RecordBatch | None:
    """The rows of a block in which every line is one plain row; None sends it to the other way."""
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if block.count(b"\r") != block.count(b"\r\n"):
        return None
    if block.startswith(codecs.BOM_UTF8):
        return None  # pyarrow would drop it, and here it belongs to a value
    if b'"' in block and _suspicious_quote(delimiter).search(block):
        return None
    try:
        table = pacsv.read_csv(
            pa.BufferReader(block),
            pacsv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1),
            pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            pacsv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()), null_values=[], check_utf8=False
            ),
        )
    except pa.ArrowInvalid:
        return None  # the careful parser finds the line and the reason
    if table.num_rows != num_lines:
        return None
    return table.combine_chunks().to_batches()[0]


@cache
def _suspicious_quote(delimiter: str) -> re.Pattern[bytes]:
    """Finds a value that opens with a quote and does not end with one at a delimiter."""
    pattern = rb'(?m)(?:^|D)"(?:[^"\n]|"")*+(?:"[^D\r\n]|$|\r$)'
    return re.compile(pattern.replace(b"D", delimiter.encode()))


def _parse_carefully(
    text: str, first_line: int, names: list[str], delimiter: str, on_bad_line: OnBadLine
) -> tuple[pa.RecordBatch, np.ndarray]:
    rows: list[list[str]] = []
    numbers: list[int] = []
    lines = text.split("\n")
    if text.endswith("\n"):
        lines.pop()
    for number, raw in enumerate(lines, start=first_line):
        line = raw.removesuffix("\r")
        if not line and len(names) > 1:
            continue  # an empty line between rows is no row; in a one-column table it is one
        try:
            values = split_line(line, delimiter)
            _check_values(line, values, names)
        except _LineError as error:
            on_bad_line(number, line, str(error))
        else:
            rows.append(values)
            numbers.append(number)
    columns = [pa.array([row[i] for row in rows], pa.string()) for i in range(len(names))]
    return pa.RecordBatch.from_arrays(columns, names=names), np.array(numbers, dtype=np.int64)


def _check_values(line: str, values: list[str], names: list[str]) -> None:
    if "\r" in line:
        raise _LineError("a carriage return stands inside the line; replace it by a blank.")
    if len(values) != len(names):
        way_out = (
            "quote values that hold the separator"
            if len(values) > len(names)
            else "fill the row up, or check the quotes before it"
        )
        raise _LineError(
            f"the row has {len(values)} values, the header {len(names)} "
            f"({', '.join(names)}); {way_out}."
        )


class TableWriter:
    """Writes record batches to a temporary file that takes the final name when all went well.

    Use it in a `with` block; an exception inside leaves no file and overwrites nothing.

    Args:
        path: .csv, .tsv or .parquet.
        overwrite: whether an existing file may be replaced.

    Raises:
        FileExistsError: the file exists and must not be replaced.
        ValueError: the suffix is unknown.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        check_suffix(path)
        self.path = path
        self.overwrite = overwrite
        self._check_free()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: IO[Any] | None = None
        self._sink: Any = None
        self._schema: pa.Schema | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends these rows; every batch has the columns of the first one."""
        with naming(self.path):
            self._write(batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        if self._schema is None:
            self._open(batch.schema)
        if batch.schema.names != self._schema.names:  # type: ignore[union-attr]
            raise ValueError(
                f"{self.path}: the columns changed from {self._schema.names} "  # type: ignore[union-attr]
                f"to {batch.schema.names}; tables of one output need the same columns."
            )
        if self.path.suffix.lower() in PARQUET_SUFFIXES:
            self._sink.write_batch(batch)
        else:
            texts = [as_text(c, n) for c, n in zip(batch.columns, batch.schema.names, strict=True)]
            self._sink.writerows(zip(*(text.to_pylist() for text in texts), strict=True))

    def __enter__(self) -> "TableWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._schema is None:
                raise ValueError(f"{self.path}: no rows were written; a table needs a header.")
            with naming(self.path):
                self._close()
            if kind is None:
                self._check_free()
                os.replace(self._temporary, self.path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _open(self, schema: pa.Schema) -> None:
        self._schema = schema
        if self.path.suffix.lower() in PARQUET_SUFFIXES:
            self._file = self._temporary.open("wb")
            self._sink = pq.ParquetWriter(self._file, schema)
        else:
            self._file = self._temporary.open("w", encoding="utf-8", newline="")
            delimiter = DELIMITERS[self.path.suffix.lower()]
            self._sink = csv.writer(self._file, delimiter=delimiter, lineterminator="\n")
            self._sink.writerow(schema.names)

    def _close(self) -> None:
        if self._file is None:
            return
        try:
            if isinstance(self._sink, pq.ParquetWriter):
                self._sink.close()
            self._file.flush()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _check_free(self) -> None:
        if not self.overwrite:
            _check_free(self.path, "choose another name, or allow overwriting")


@contextmanager
def new_text_file(path: Path, way_out: str = "choose another name") -> Iterator[IO[str]]:
    """Give a file that gets its name when all went well, and that must be new.

    Args:
        path: its name.
        way_out: for the message where the name is taken.

    Raises:
        FileExistsError: the name is taken.
    """
    _check_free(path, way_out)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path), open(unfinished, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _check_free(path, way_out)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _check_free(path: Path, way_out: str) -> None:
    if path.exists():
        raise FileExistsError(f"{path} exists and is not overwritten; move it, {way_out}.")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the storage the name of the file, which a write to an open one lacks."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def check_suffix(path: Path) -> None:
    """Raises ValueError unless tables of this suffix can be written."""
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f'{path} ends in "{path.suffix}"; write to one of {", ".join(SUFFIXES)}.')


def table_writer(path: str | Path, overwrite: bool = False) -> TableWriter:
    """A writer for this csv, tsv or parquet file: use it as `with table_writer(path) as table`."""
    return TableWriter(Path(path), overwrite)
