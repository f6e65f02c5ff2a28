"""Tables in and out: csv, tsv, parquet and Excel, as record batches of text with line numbers.

pyarrow takes the blocks of delimited text that hold one plain row in each line; Python's csv takes
the others line by line, so that every fault has its line.
"""

import codecs
import csv
import difflib
import glob
import gzip
import importlib.util
import io
import logging
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from datamodules.files.rows import PARQUET_SUFFIXES, BadRow, open_parquet

SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
SNIFFED_SEPARATORS = (",", ";", "\t", "|")
SNIFFED_BYTES, SNIFFED_ROWS = 1 << 18, 200
EXCEL_SUFFIX = ".xlsx"
PACKED = tuple(f"{suffix}.gz" for suffix in SEPARATORS)
SUFFIXES = (*SEPARATORS, *PACKED, *PARQUET_SUFFIXES, EXCEL_SUFFIX)
BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 24
MOST_LINES_OF_ROW = 1000
MOST_EXCEL_ROWS = 1 << 20
ROWS_PER_BATCH = 65_536
GZIP = b"\x1f\x8b"
SIGNATURES = {
    b"PAR1": "a parquet file: rename it to .parquet",
    b"PK\x03\x04": "a zip or Excel file: rename an Excel file to .xlsx",
}
OnBadRow = Callable[[BadRow], None]

OPEN_QUOTE = (
    "a quote opens a value and is not closed, which glues rows together; close it, or double a "
    "quote that belongs to the text."
)

log = logging.getLogger(__name__)
csv.field_size_limit(MAX_LINE_BYTES)  # else 128 KiB, and a value may be a whole document


@dataclass(frozen=True)
class TableOptions:
    """How csv, tsv and Excel files are written, where it is not to be found from their bytes.

    Args:
        separator: one character between values; None finds `,`, `;`, tab or `|`.
        encoding: such as windows-1252; None finds UTF-8, UTF-16 or Windows-1252.
        sheet: of an Excel file; None takes the first.
    """

    separator: str | None = None
    encoding: str | None = None
    sheet: str | None = None

    def __post_init__(self) -> None:
        mark = self.separator
        if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n\0'):
            raise ValueError(
                f"table.separator must be one ASCII character and no quote, got {mark!r}; a tab is "
                r"$'\t' in a shell."
            )
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except LookupError as error:
                raise ValueError(
                    f'table.encoding "{self.encoding}" is none that Python knows; write utf-8, '
                    "windows-1252, iso-8859-15, utf-16 or the like."
                ) from error


class Dialect(NamedTuple):
    """How a delimited file is written; `encoding` as Python names it."""

    separator: str = ","
    encoding: str = "utf-8"
    newline: str = "\n"
    num_header_lines: int = 1


@dataclass(frozen=True)
class RowBatch:
    """Some rows of one file.

    Args:
        file: where they come from.
        rows: every column as text (pyarrow string), missing values as "".
        line: [rows] int64, 1-based: line of a csv or tsv file (the first, where a quoted value
            holds line breaks), row of a parquet file or a sheet.
    """

    file: Path
    rows: pa.RecordBatch
    line: np.ndarray

    def texts(self, column: str) -> list[str]:
        """The values of one column."""
        return self.rows.column(column).to_pylist()


def raise_bad_row(bad: BadRow) -> None:
    """Raises the ValueError that names this row: the default of every reader."""
    raise ValueError(str(bad))


def suffix_of(path: Path) -> str:
    """Return the suffix in lower case; of packed text both parts, such as .csv.gz."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), path.suffix.lower())


def own_files_hint(
    command: str, files: Mapping[int, Sequence[Path]], key: str = "data.predict_files"
) -> str:
    """Return a command of `unisono predict` for a file of this run: of the last part that has one.

    Args:
        command: without its file.
        files: part -> files; train, validation and test from 0.
        key: option that takes the file.
    """
    path = next(paths[0] for _, paths in sorted(files.items(), reverse=True) if paths)
    return f"{command} --{key}={shlex.quote(str(path))}"


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
    found: list[Path] = []
    for entry in [files] if isinstance(files, str) else list(files or []):
        path = Path(entry).expanduser()
        if path.exists() or not glob.has_magic(entry):
            found.append(path)
            continue
        matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
        if not matches:
            raise FileNotFoundError(
                f'{option}: no file matches "{entry}", seen from {Path.cwd()}; check the folder '
                "and the suffix."
            )
        found += matches
    for place, path in enumerate(found):
        check_file(path, option, suffixes)
        if path in found[:place]:
            raise ValueError(f"{option} names {path} twice; its rows would count double.")
    return found


def check_file(path: Path, option: str = "the table", suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raises unless this is a file with one of these suffixes."""
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{option}: {path} is a folder; name its files, such as {path}/*.csv."
            if path.is_dir()
            else f"{option}: {path} is a pipe or a device; save it as a file."
        )
    if not path.exists():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f'Did you mean "{path.parent / near[0]}"?' if near else "Name a file that is there."
        raise FileNotFoundError(f"{option}: {path} does not exist. {hint}")
    if suffix_of(path) not in suffixes:
        raise ValueError(
            f'{option}: {path} ends in "{path.suffix}", which is none of {", ".join(suffixes)}; '
            "save it as one of these."
        )


class Table:
    """One file: `names` of its columns and, of delimited text, its `dialect`, known once opened.

    Args:
        path: csv, tsv (packed by gzip, too), parquet or xlsx.
        options: how it is written, as far as that is not to be found.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, binary or damaged, or two columns have one name.
    """

    def __init__(self, path: Path, options: TableOptions = TableOptions()) -> None:
        check_file(path)
        status = path.stat()
        facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        self.path, self.options = path, options
        self.names, self.dialect = _opened(path, options, facts)

    def check(self, wanted: Sequence[str], option: str = "columns") -> None:
        """Raises ValueError unless the table has all these columns; names the likely ones."""
        for name in wanted:
            if name in self.names:
                continue
            lower = {column.lower(): column for column in self.names}
            near = difflib.get_close_matches(name.lower(), lower, n=1)
            hint = f" Name one of them with --data.{option}." if "." in option else ""
            hint = f' Did you mean "{lower[near[0]]}"?' if near else hint
            raise ValueError(
                f'{self.path} has no column "{name}" ({option}); it has: '
                f"{', '.join(self.names)}.{hint}"
            )

    def rows(
        self, columns: Sequence[str] | None = None, on_bad_row: OnBadRow = raise_bad_row
    ) -> Iterator[RowBatch]:
        """Yields the rows in order, as batches of text columns.

        Args:
            columns: the columns to read; None reads all.
            on_bad_row: takes each row that cannot be cut into columns; it is in no batch.

        Raises:
            ValueError: the file is damaged, in another encoding, or lacks a column or any row.
        """
        wanted = self.names if columns is None else list(columns)
        self.check(wanted)
        num_rows = 0

        def on_bad(line: int, value: str, rule: str) -> None:
            nonlocal num_rows
            num_rows += 1
            on_bad_row(BadRow(str(self.path), line, value, rule))

        if suffix_of(self.path) in PARQUET_SUFFIXES:
            batches = _parquet_batches(self.path, wanted)
        elif suffix_of(self.path) == EXCEL_SUFFIX:
            batches = _excel_batches(self.path, self.options.sheet, self.names, on_bad)
        else:
            batches = _delimited_batches(self.path, self.dialect, self.names, on_bad)
        for rows, line in batches:
            num_rows += len(line)
            if len(line):
                yield RowBatch(self.path, rows.select(wanted), line)
        if num_rows == 0:
            raise ValueError(f"{self.path} holds a header and no rows; give it at least one row.")


def read_rows(
    files: Path | Sequence[Path],
    columns: Sequence[str] | None = None,
    on_bad_row: OnBadRow = raise_bad_row,
    options: TableOptions = TableOptions(),
) -> Iterator[RowBatch]:
    """Yields the rows of these files in order; arguments and errors as of `Table.rows`."""
    for path in [files] if isinstance(files, Path) else files:
        yield from Table(path, options).rows(columns, on_bad_row)


@lru_cache(maxsize=256)
def _opened(path: Path, options: TableOptions, facts: tuple[int, ...]) -> tuple[list[str], Dialect]:
    """The names of the columns, and the dialect, which is said where it is not the plain one."""
    dialect, suffix = Dialect(), suffix_of(path)
    if suffix in PARQUET_SUFFIXES:
        with open_parquet(path) as file:
            names = file.schema_arrow.names
    elif suffix == EXCEL_SUFFIX:
        names = list(map(_cell_text, next(_excel_rows(path, options.sheet, is_first=True), [])))
    else:
        encoding = options.encoding or _encoding_of(path)
        start = b"".join(islice(_utf8_chunks(path, encoding), 1 + SNIFFED_BYTES // BLOCK_BYTES))
        start = start[:SNIFFED_BYTES]
        sample = _decode(path, 1, start.rpartition(b"\n")[0] or start)
        lines = list(io.StringIO(sample, newline="\n"))
        plain = SEPARATORS[suffix.removesuffix(".gz")]
        separator = options.separator or _separator_of(sample, plain)
        newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        names, size, fault = _row(lines, 0, separator) if sample.strip() else ([], 1, "")
        if fault and "\r" in lines[0].rstrip("\r\n"):
            fault = r"the lines end in carriage returns alone; convert them with `tr '\r' '\n'`."
        if fault:
            raise ValueError(f"{path}:1: the header cannot be read: {fault}")
        dialect = Dialect(separator, encoding, newline, size)
        found = []
        if options.separator is None and separator != plain:
            found.append("separator " + ("tab" if separator == "\t" else f'"{separator}"'))
        if options.encoding is None and not encoding.startswith("utf-8"):
            found.append(f"encoding {encoding}")
        _say(path, ", ".join(found))
    if not names:
        raise ValueError(f"{path} is empty; it needs a header and rows.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f'{path}: the column name "{twice[0]}" occurs {names.count(twice[0])} times in the '
            "header; every column needs a name of its own."
        )
    return names, dialect


def _say(path: Path, found: str) -> None:
    if found:
        from lightning.pytorch.utilities.rank_zero import rank_zero_info

        rank_zero_info(
            f"{path.name} is read with {found}; of occupation tables, data.table can name another"
        )


def _encoding_of(path: Path) -> str:
    """The encoding that the bytes of the whole file speak for, as Python names it."""
    first = next(_chunks(path), b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    decoder, is_utf8 = codecs.getincrementaldecoder("utf-8")("replace"), True
    for chunk in chain(_chunks(path), [b""]):
        is_utf8 = is_utf8 and "\ufffd" not in decoder.decode(chunk, not chunk)
    num_characters, num_others = 0, 0
    for chunk in () if is_utf8 else _chunks(path):
        found = re.findall(rb"[\xc2-\xf4][\x80-\xbf]+", chunk)
        num_characters += len(found)
        high = len(chunk) - len(chunk.translate(None, bytes(range(128, 256))))
        num_others += high - sum(map(len, found))
    if not is_utf8 and num_others >= num_characters:  # else it is UTF-8 with a broken place
        return "windows-1252"
    return "utf-8-sig" if first.startswith(codecs.BOM_UTF8) else "utf-8"


def _separator_of(sample: str, plain: str) -> str:
    """The separator that cuts most rows into as many values as the header; `plain` if in doubt."""
    best, found = (0.0, False, 0), plain
    for mark in SNIFFED_SEPARATORS:
        lines = csv.reader(io.StringIO(sample, newline=""), delimiter=mark)
        widths = [len(row) for row in islice(filter(None, lines), SNIFFED_ROWS)]
        if widths and widths[0] > 1:
            share = widths.count(widths[0]) / len(widths)
            if (score := (share, mark == plain, widths[0])) > best:
                best, found = score, mark
    return found


def _chunks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file, unpacked where gzip packed them."""
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        source = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            while chunk := source.read(BLOCK_BYTES):
                yield chunk
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); write or copy it again.") from error


def _utf8_chunks(path: Path, encoding: str) -> Iterator[bytes]:
    """Yields a text file in UTF-8 (which is not looked at where it is in UTF-8), without a mark."""
    is_utf8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    decoder = codecs.getincrementaldecoder(encoding)()
    for number, chunk in enumerate(chain(_chunks(path), [b""])):
        if number == 0:
            for signature, meaning in SIGNATURES.items():
                if chunk.startswith(signature):
                    raise ValueError(f"{path} is a binary file, no text: it looks like {meaning}.")
        if is_utf8:
            chunk = chunk.removeprefix(codecs.BOM_UTF8) if number == 0 else chunk
        else:
            try:
                chunk = decoder.decode(chunk, not chunk).encode("utf-8", "surrogatepass")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not in the encoding {encoding} (byte 0x"
                    f"{error.object[error.start]:02X}); save it in UTF-8, or "
                    "name its encoding (occupation tables: --data.table.encoding)."
                ) from error
        if chunk:
            yield chunk


def _delimited_batches(
    path: Path, dialect: Dialect, names: list[str], on_bad_line: Callable[[int, str, str], None]
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Yields all columns as text with the 1-based line of each row, [rows] int64."""
    line, rest, header = 1, b"", dialect.num_header_lines
    for chunk in chain(_utf8_chunks(path, dialect.encoding), [b""]):
        if b"\0" in chunk:
            at = line + (rest + chunk).split(b"\0", 1)[0].count(b"\n")
            raise ValueError(
                f"{path}:{at}: a NUL byte: this is a binary file, or UTF-16 without its mark, and "
                "no table in text; save it as csv (UTF-8)."
            )
        block, newline, rest = (rest + chunk).rpartition(b"\n")
        block += newline
        if not chunk:
            block, rest = block + rest, b""
        if len(rest) > MAX_LINE_BYTES:
            at = line + block.count(b"\n")
            raise ValueError(
                f"{path}:{at}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; this is no table "
                "with one row per line."
            )
        while header and block:
            _, newline, block = block.partition(b"\n")
            header, line = header - 1, line + 1
        if not block:
            continue
        rows = _parse_fast(block, names, dialect.separator)
        if rows is not None:
            yield rows, np.arange(line, line + rows.num_rows, dtype=np.int64)
            line += rows.num_rows
            continue
        lines = list(io.StringIO(_decode(path, line, block), newline="\n"))
        values, numbers, place = [], [], 0
        while place < len(lines):
            row, size, fault = _row(lines, place, dialect.separator, names)
            if fault == OPEN_QUOTE and chunk and len(lines) < place + MOST_LINES_OF_ROW:
                break  # the row may go on
            if fault:
                on_bad_line(line + place, lines[place].rstrip("\r\n"), fault)
            elif row or len(names) == 1:  # an empty line is a row of a one-column table alone
                values.append(row or [""])
                numbers.append(line + place)
            place += size
        rest, line = "".join(lines[place:]).encode() + rest, line + place
        yield _text_batch(values, names), np.array(numbers, dtype=np.int64)


def _row(
    lines: list[str], place: int, separator: str, names: Sequence[str] = ()
) -> tuple[list[str], int, str]:
    """The values of the row that begins at this line, its number of lines, and what is wrong.

    A row of several lines that has not one value per name, or whose first and last line look like
    rows of their own, has a quote that is not closed: only its first line is wrong.
    """
    some = range(place, min(place + MOST_LINES_OF_ROW, len(lines)))
    reader = csv.reader(map(lines.__getitem__, some), delimiter=separator, strict=True)
    try:
        values = next(reader)
    except csv.Error as error:
        if reader.line_num > 1 or "unexpected end of data" in str(error):
            return [], 1, OPEN_QUOTE
        if "new-line character" in str(error):
            return [], 1, "a carriage return stands inside the line; replace it by a blank."
        return (
            [],
            1,
            (
                f"text follows the closing quote of a value ({error}); double the quotes inside a "
                'quoted value ("").'
            ),
        )
    if any("\r" in value.replace("\r\n", "") for value in values):  # csv would not quote it again
        return [], 1, "a carriage return stands inside the line; replace it by a blank."
    size = reader.line_num
    if size > 1 and names:
        ends = [len(lines[i].split(separator)) for i in (place, place + size - 1)]
        looks_glued = ends == [len(names)] * 2 and f"{separator} " not in lines[place]
        if len(values) != len(names) or (looks_glued and len(names) > 1):
            return [], 1, OPEN_QUOTE
    return values, size, _fault_of(values, names) if values and names else ""


def _fault_of(values: list[str], names: Sequence[str]) -> str:
    """What is wrong with a row of so many values; nothing where each name has one."""
    if len(values) == len(names):
        return ""
    way_out = "fill the row up, or check the quotes before it"
    if len(values) > len(names):
        way_out = "quote values that hold the separator"
    return (
        f"the row has {len(values)} values, the header {len(names)} ({', '.join(names)}); "
        f"{way_out}."
    )


def _decode(path: Path, first_line: int, block: bytes) -> str:
    try:
        return block.decode("utf-8")
    except UnicodeDecodeError as error:
        before = block[: error.start]
        line = first_line + before.count(b"\n")
        place = error.start - before.rfind(b"\n")
        raise ValueError(
            f"{path}:{line}: byte 0x{block[error.start]:02X} at place {place} of the line is not "
            "UTF-8, as most of the file is; correct it, save the file in UTF-8, "
            "or name its encoding (occupation tables: --data.table.encoding=windows-1252)."
        ) from error


def _parse_fast(block: bytes, names: list[str], separator: str) -> pa.RecordBatch | None:
    """The rows of a block in which every line is one plain row; `None` sends it to Python's csv."""
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    # pyarrow would drop a byte order mark, and here it belongs to a value
    if block.count(b"\r") != block.count(b"\r\n") or block.startswith(codecs.BOM_UTF8):
        return None
    octets = np.frombuffer(b"\n" + block + b"\n", np.uint8)
    quotes, ends = np.flatnonzero(octets == ord('"')), [ord(separator), ord("\n"), ord("\r")]
    opens, closes = octets[quotes[::2] - 1], octets[quotes[1::2] + 1]
    if len(quotes) % 2 or not (np.isin(opens, ends[:2]).all() and np.isin(closes, ends).all()):
        return None  # a quote stands inside a value, or is doubled
    options = (
        pacsv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1),
        pacsv.ParseOptions(delimiter=separator, newlines_in_values=True),
        pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), null_values=[]),
    )
    try:
        table = pacsv.read_csv(pa.BufferReader(block), *options)
    except pa.ArrowInvalid:
        return None  # Python's csv finds the line and the reason
    return table.combine_chunks().to_batches()[0] if table.num_rows == num_lines else None


def _text_batch(rows: list[list[str]], names: list[str]) -> pa.RecordBatch:
    columns = [pa.array([row[i] for row in rows], pa.string()) for i in range(len(names))]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _excel_rows(path: Path, sheet: str | None, is_first: bool = False) -> Iterator[list[Any]]:
    """Yields the values of each row of a sheet, empty ones at its end left out."""
    try:
        import openpyxl
    except ImportError as error:
        raise ValueError(
            f"{path} is an Excel file, which needs openpyxl: pip install 'unisono[excel]', or save "
            "the sheet as csv."
        ) from error
    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except Exception as error:  # zip, XML and key errors alike
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path} is damaged or no Excel file ({reason}); write or copy it again."
        ) from error
    try:
        names = book.sheetnames
        if sheet is not None and sheet not in names:
            raise ValueError(f'{path} has no sheet "{sheet}"; it has: {", ".join(names)}.')
        if is_first and sheet is None and len(names) > 1:
            _say(path, f'sheet "{names[0]}" of {len(names)}')
        for row in book[sheet or names[0]].iter_rows(values_only=True):
            values = list(row)
            while values and values[-1] in (None, ""):
                values.pop()
            yield values
    finally:
        book.close()


def _excel_batches(
    path: Path, sheet: str | None, names: list[str], on_bad_line: Callable[[int, str, str], None]
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    cells = enumerate(_excel_rows(path, sheet), start=1)
    next(cells)
    while some := list(islice(cells, ROWS_PER_BATCH)):
        rows: list[list[str]] = []
        numbers: list[int] = []
        for number, values in some:
            texts = [_cell_text(value) for value in values]
            texts += [""] * (len(names) - len(texts))
            if fault := _fault_of(texts, names):
                on_bad_line(number, " | ".join(texts), fault)
            elif values:  # an empty row is none
                rows.append(texts)
                numbers.append(number)
        yield _text_batch(rows, names), np.array(numbers, dtype=np.int64)


def _cell_text(value: Any) -> str:
    """The text of a cell: whole numbers have no ".0", a date at midnight has no time."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number_text(value)
    return "" if value is None else str(value).removesuffix(" 00:00:00")


def _parquet_batches(path: Path, wanted: list[str]) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    position = 0
    with open_parquet(path) as table:
        for batch in table.iter_batches(batch_size=ROWS_PER_BATCH, columns=wanted):
            arrays = [as_text(batch.column(n), f'{path}, column "{n}"') for n in wanted]
            line = np.arange(position + 1, position + 1 + batch.num_rows, dtype=np.int64)
            position += batch.num_rows
            yield pa.RecordBatch.from_arrays(arrays, names=wanted), line


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


class TableWriter:
    """Takes record batches of equal columns for a file; made by `new_table`."""

    def __init__(self, path: Path, file: BinaryIO, dialect: Dialect) -> None:
        self.path, self.kind, self.dialect = path, suffix_of(path), dialect
        self.names: list[str] = []
        self._file, self._num_rows = file, 0
        self._sink: Any = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends these rows; every batch has the columns of the first one."""
        if self._sink is None:
            self._begin(batch.schema)
        if batch.schema.names != self.names:
            raise ValueError(
                f"{self.path}: the columns changed from {self.names} to {batch.schema.names}; "
                "tables of one output need the same columns."
            )
        with naming(self.path):
            self._write(batch)

    def _write(self, batch: pa.RecordBatch) -> None:
        if self.kind in PARQUET_SUFFIXES:
            self._sink.write_batch(batch)
        elif self.kind == EXCEL_SUFFIX:
            self._write_sheet(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        else:
            texts = [as_text(c, n) for c, n in zip(batch.columns, self.names, strict=True)]
            self._sink.writerows(zip(*(text.to_pylist() for text in texts), strict=True))

    def close(self) -> None:
        """Ends the table; the file stays open."""
        if self._sink is None:
            raise ValueError(f"{self.path}: no rows were written; a table needs a header.")
        if self.kind in PARQUET_SUFFIXES:
            self._sink.close()
        elif self.kind == EXCEL_SUFFIX:
            self._sink.save(self._file)
        else:
            packed = self._text.detach()  # written out
            if packed is not self._file:
                packed.close()

    def abandon(self) -> None:
        """Ends what has begun after an error, which is the one that counts."""
        if self.kind in PARQUET_SUFFIXES and self._sink is not None:
            with suppress(OSError, ValueError):
                self._sink.close()

    def _begin(self, schema: pa.Schema) -> None:
        self.names = schema.names
        if self.kind in PARQUET_SUFFIXES:
            self._sink = pq.ParquetWriter(self._file, schema)
        elif self.kind == EXCEL_SUFFIX:
            from openpyxl import Workbook

            self._sink = Workbook(write_only=True)
            self._write_sheet([schema.names])
        else:
            binary: Any = self._file
            if self.kind.endswith(".gz"):
                binary = gzip.GzipFile(fileobj=self._file, mode="wb", mtime=0)
            separator, encoding, newline, _ = self.dialect
            self._text = io.TextIOWrapper(binary, encoding=encoding, newline="")
            self._sink = csv.writer(self._text, delimiter=separator, lineterminator=newline)
            self._sink.writerow(schema.names)

    def _write_sheet(self, rows: Iterable[Sequence[Any]]) -> None:
        from openpyxl.cell import WriteOnlyCell
        from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

        sheet = self._sink.active if self._sink.worksheets else self._sink.create_sheet()
        for row in rows:
            self._num_rows += 1
            if self._num_rows > MOST_EXCEL_ROWS:
                raise ValueError(
                    f"{self.path}: a sheet holds {MOST_EXCEL_ROWS:,} rows; name a csv file."
                )
            cells = list(row)
            for place, value in enumerate(cells):
                if isinstance(value, str):  # a text, were it even a formula
                    cells[place] = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("\ufffd", value))
                    cells[place].data_type = "s"
            sheet.append(cells)


@contextmanager
def new_table(
    path: Path, overwrite: bool = False, like: Table | None = None
) -> Iterator[TableWriter]:
    """Give a writer of a table, whose file gets its name when all went well.

    Args:
        path: .csv, .tsv (or with .gz), .parquet or .xlsx.
        overwrite: whether an existing file may be replaced; else FileExistsError.
        like: a table in whose dialect delimited text is written, where it has the same suffix.

    Raises:
        ValueError: the suffix is unknown, or no rows were written.
    """
    check_suffix(path)
    bare = suffix_of(path).removesuffix(".gz")
    dialect = Dialect(SEPARATORS.get(bare, ","))
    if like is not None and suffix_of(like.path).removesuffix(".gz") == bare:
        dialect = like.dialect
    way_out = None if overwrite else "choose another name, or allow overwriting"
    with _new_file(path, "wb", way_out) as file:
        table = TableWriter(path, file, dialect)
        try:
            yield table
        except BaseException:
            table.abandon()
            raise
        with naming(path):
            table.close()


@contextmanager
def new_text_file(path: Path, way_out: str = "choose another name") -> Iterator[IO[str]]:
    """Give a file that gets its name when all went well; FileExistsError where it is taken."""
    with _new_file(path, "w", way_out) as file:
        yield file


@contextmanager
def _new_file(path: Path, mode: str, way_out: str | None) -> Iterator[Any]:
    """Give a file that gets its name when all went well; `way_out` `None` may replace another."""

    def check() -> None:
        if way_out is not None and path.exists():
            raise FileExistsError(f"{path} exists and is not overwritten; move it, {way_out}.")

    check()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with naming(path):
            encoding = None if "b" in mode else "utf-8"
            file = open(unfinished, mode, encoding=encoding)  # noqa: SIM115 - closed below
        try:
            yield file
            with naming(path):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with naming(path):
                file.close()
        check()
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an error of the storage the name of the file, which a write to an open one lacks."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def same_columns(tables: Sequence[Table], done: str) -> None:
    """Raises ValueError unless tables that are `done` into one file have the same columns."""
    for table in tables:
        if table.names != tables[0].names:
            raise ValueError(
                f"{table.path} has the columns {table.names}, {tables[0].path} has "
                f"{tables[0].names}; tables that are {done} into one file need the same columns: "
                "predict them one by one."
            )


def dialect_for(tables: Sequence[Table], added: Iterable[str]) -> Table:
    """Return the first table, whose dialect is taken for writing; in UTF-8 where the tables are in
    several encodings, or theirs cannot hold the texts that are added, which is logged."""
    first, encoding = tables[0], tables[0].dialect.encoding
    try:
        "".join(added).encode(encoding)
        if all(table.dialect.encoding == encoding for table in tables):
            return first
        why = f"the tables are in several encodings, {encoding} the first"
    except UnicodeEncodeError as error:
        why = f'{encoding} cannot hold "{error.object[error.start]}" of what is added'
    log.warning("the table is written in UTF-8: %s", why)
    first.dialect = first.dialect._replace(encoding="utf-8")
    return first


def check_suffix(path: Path) -> None:
    """Raises ValueError unless tables of this suffix can be written."""
    if suffix_of(path) not in SUFFIXES:
        raise ValueError(f'{path} ends in "{path.suffix}"; write to one of {", ".join(SUFFIXES)}.')
    if suffix_of(path) == EXCEL_SUFFIX and importlib.util.find_spec("openpyxl") is None:
        raise ValueError(f"{path} needs openpyxl: pip install 'unisono[excel]', or write a csv.")


def output_like(files: Sequence[Path], mark: str, folder: Path) -> Path:
    """Where predictions go by default: `mine.csv` becomes `mine.MARK.csv` in the run folder."""
    suffix = suffix_of(files[0])
    return folder / f"{files[0].name[: -len(suffix)]}.{mark}{suffix}"


def free_names(names: list[str], taken: list[str]) -> list[str]:
    """The input's column names; one that is added, too, becomes `input_NAME`, and is logged."""
    free = []
    for name in names:
        new = name
        while new in taken or (new != name and new in names):
            new = f"input_{new}"
        if new != name:
            log.warning('the input\'s column "%s" is written as "%s"', name, new)
        free.append(new)
    return free


def write_table(path: Path, table: list[list[str]]) -> None:
    """Write a csv, replacing the file as a whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(table)
    os.replace(temporary, path)
