"""Tables in and out: csv, tsv, parquet and Excel, as record batches of text with line numbers.

pyarrow takes the blocks of delimited text that hold one row in each line; Python's csv takes the
others line by line, so that every fault has its line.
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
from contextlib import ExitStack, contextmanager
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
OnBadRow = Callable[[BadRow], None]
OnBadLine = Callable[[int, str, str], None]  # line, value, rule
Rows = Iterator[tuple[pa.RecordBatch, np.ndarray]]  # text columns, and the line of each row

OPEN_QUOTE = (
    "a quote opens a value and is not closed, which glues rows together; close it, or double a "
    "quote that belongs to the text."
)
LONE_RETURN = "a carriage return stands inside the line; replace it by a blank."
NAME_ENCODING = "or name its encoding (occupation tables: --data.table.encoding=windows-1252)."

log = logging.getLogger(__name__)
csv.field_size_limit(MAX_LINE_BYTES)  # else 128 KiB, and a value may be a whole document


@dataclass(frozen=True)
class TableOptions:
    """How csv, tsv and Excel files are written.

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
        try:
            codecs.lookup(self.encoding or "utf-8")
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
    """Raises the ValueError that names this row."""
    raise ValueError(str(bad))


def suffix_of(path: Path) -> str:
    """Return the suffix in lower case; of packed text both parts, such as .csv.gz."""
    name = path.name.lower()
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), path.suffix.lower())


def own_files_hint(
    command: str, files: Mapping[int, Sequence[Path]], key: str = "data.predict_files"
) -> str:
    """Return a command of `unisono predict` with a file of the run, of the last part that has one.

    Args:
        command: without its file.
        files: part -> files.
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
    if path.is_dir():
        raise ValueError(f"{option}: {path} is a folder; name its files, such as {path}/*.csv.")
    if path.exists() and not path.is_file():
        raise ValueError(f"{option}: {path} is a pipe or a device; save it as a file.")
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
    """One file: `names` of its columns and, of delimited text, its `dialect`.

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
            batches = _parquet_rows(self.path, wanted)
        elif suffix_of(self.path) == EXCEL_SUFFIX:
            batches = _excel_rows(self.path, self.options.sheet, self.names, on_bad)
        else:
            batches = _delimited_rows(self.path, self.dialect, self.names, on_bad)
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
        names = list(map(_cell_text, next(_sheet(path, options.sheet, is_first=True), [])))
    else:
        encoding = options.encoding or _encoding_of(path)
        blocks = islice(_utf8_blocks(path, encoding), 1 + SNIFFED_BYTES // BLOCK_BYTES)
        start = b"".join(blocks)[:SNIFFED_BYTES]
        _refuse_binary(path, 1, start)
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
    first = next(_blocks(path), b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in chain(_blocks(path), [b""]):
            decoder.decode(block, not block)
    except UnicodeDecodeError:  # some other encoding, or UTF-8 with a broken place
        num_characters = num_others = 0
        for block in _blocks(path):
            found = re.findall(rb"[\xc2-\xf4][\x80-\xbf]+", block)
            num_characters += len(found)
            high = len(block) - len(block.translate(None, bytes(range(128, 256))))
            num_others += high - sum(map(len, found))
        if num_others >= num_characters:
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


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields the bytes of a file, unpacked where gzip packed them."""
    with path.open("rb") as file:
        is_packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        source = gzip.GzipFile(fileobj=file) if is_packed else file
        try:
            while block := source.read(BLOCK_BYTES):
                yield block
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path} is damaged ({error}); write or copy it again.") from error


def _utf8_blocks(path: Path, encoding: str) -> Iterator[bytes]:
    """Yields a text file in UTF-8, without a mark; one in UTF-8 as it is, unchecked."""
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        blocks = _blocks(path)
        yield next(blocks, b"").removeprefix(codecs.BOM_UTF8)
        yield from blocks
        return
    decoder = codecs.getincrementaldecoder(encoding)()
    for block in chain(_blocks(path), [b""]):
        try:
            text = decoder.decode(block, not block)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not in the encoding {encoding} (byte 0x"
                f"{error.object[error.start]:02X}); save it in UTF-8, {NAME_ENCODING}"
            ) from error
        if text:
            yield text.encode("utf-8", "surrogatepass")


def _refuse_binary(path: Path, line: int, block: bytes) -> None:
    if b"\0" in block:
        at = line + block.split(b"\0", 1)[0].count(b"\n")
        raise ValueError(
            f"{path}:{at}: a NUL byte: this is a binary file such as .parquet or .xlsx, or UTF-16 "
            "without its mark, and no table in text; save it as csv (UTF-8)."
        )


def _delimited_rows(path: Path, dialect: Dialect, names: list[str], on_bad_line: OnBadLine) -> Rows:
    line, rest, header = 1, b"", dialect.num_header_lines
    for chunk in chain(_utf8_blocks(path, dialect.encoding), [b""]):
        _refuse_binary(path, line, rest + chunk)
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
        fault = (
            f"text follows the closing quote of a value ({error}); double the quotes inside a "
            'quoted value ("").'
        )
        if reader.line_num > 1 or "unexpected end of data" in str(error):
            fault = OPEN_QUOTE
        elif "new-line character" in str(error):
            fault = LONE_RETURN
        return [], 1, fault
    if any("\r" in value.replace("\r\n", "") for value in values):  # csv would not quote it again
        return [], 1, LONE_RETURN
    size = reader.line_num
    if size > 1 and names:
        ends = [len(lines[i].split(separator)) for i in (place, place + size - 1)]
        looks_glued = ends == [len(names)] * 2 and f"{separator} " not in lines[place]
        if len(values) != len(names) or (looks_glued and len(names) > 1):
            return [], 1, OPEN_QUOTE
    return values, size, _fault_of(values, names) if values and names else ""


def _fault_of(values: list[str], names: Sequence[str]) -> str:
    """What is wrong with a row of so many values; "" where each name has one."""
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
        line, place = first_line + before.count(b"\n"), error.start - before.rfind(b"\n")
        raise ValueError(
            f"{path}:{line}: byte 0x{block[error.start]:02X} at place {place} of the line is not "
            f"UTF-8, as most of the file is; correct it, save the file in UTF-8, {NAME_ENCODING}"
        ) from error


def _parse_fast(block: bytes, names: list[str], separator: str) -> pa.RecordBatch | None:
    """The rows of a block in which every line is one row; `None` sends it to Python's csv."""
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    # pyarrow would drop a byte order mark, and here it belongs to a value
    if block.count(b"\r") != block.count(b"\r\n") or block.startswith(codecs.BOM_UTF8):
        return None
    octets = np.frombuffer(b"\n" + block + b"\n", np.uint8)
    quotes, before = np.flatnonzero(octets == ord('"')), [ord('"'), ord(separator), ord("\n")]
    opens, closes = octets[quotes[::2] - 1], octets[quotes[1::2] + 1]
    if len(quotes) % 2 or not (
        np.isin(opens, before).all() and np.isin(closes, [*before, ord("\r")]).all()
    ):
        return None  # a quote stands inside a value and is not doubled
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


def _sheet(path: Path, sheet: str | None, is_first: bool = False) -> Iterator[list[Any]]:
    """Yields the values of each row of a sheet, empty ones at its end left out."""
    _check_excel(path)
    import openpyxl

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


def _excel_rows(path: Path, sheet: str | None, names: list[str], on_bad_line: OnBadLine) -> Rows:
    cells = enumerate(_sheet(path, sheet), start=1)
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
        return str(value).lower()
    if isinstance(value, float):
        return _number_text(value)
    return "" if value is None else str(value).removesuffix(" 00:00:00")


def _parquet_rows(path: Path, wanted: list[str]) -> Rows:
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


Write = Callable[[pa.RecordBatch], Any]


class TableWriter:
    """Takes record batches of equal columns for a file; made by `new_table`."""

    def __init__(self, path: Path, begin: Callable[[pa.Schema], Write]) -> None:
        self.path, self._begin = path, begin
        self.names: list[str] = []
        self._write: Write | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends these rows; every batch has the columns of the first one."""
        with naming(self.path):
            if self._write is None:
                self.names, self._write = batch.schema.names, self._begin(batch.schema)
            if batch.schema.names != self.names:
                raise ValueError(
                    f"{self.path}: the columns changed from {self.names} to {batch.schema.names}; "
                    "tables of one output need the same columns."
                )
            self._write(batch)


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
    suffix = suffix_of(path)
    bare = suffix.removesuffix(".gz")
    dialect = Dialect(SEPARATORS.get(bare, ","))
    if like is not None and suffix_of(like.path).removesuffix(".gz") == bare:
        dialect = like.dialect
    way_out = None if overwrite else "choose another name, or allow overwriting"
    with _new_file(path, "wb", way_out) as file, naming(path), ExitStack() as stack:

        def begin(schema: pa.Schema) -> Write:
            if suffix in PARQUET_SUFFIXES:
                return stack.enter_context(pq.ParquetWriter(file, schema)).write_batch
            if suffix == EXCEL_SUFFIX:
                return stack.enter_context(_new_sheet(path, file, schema.names))
            binary = file
            if suffix.endswith(".gz"):  # without name and time: equal tables have equal bytes
                binary = stack.enter_context(gzip.GzipFile("", "wb", fileobj=file, mtime=0))
            return stack.enter_context(_new_text(binary, schema.names, dialect))

        table = TableWriter(path, begin)
        yield table
        if not table.names:
            raise ValueError(f"{path}: no rows were written; a table needs a header.")


@contextmanager
def _new_text(file: Any, names: list[str], dialect: Dialect) -> Iterator[Write]:
    text = io.TextIOWrapper(file, encoding=dialect.encoding, newline="")
    rows = csv.writer(text, delimiter=dialect.separator, lineterminator=dialect.newline)
    rows.writerow(names)

    def write(batch: pa.RecordBatch) -> None:
        texts = [as_text(c, n) for c, n in zip(batch.columns, names, strict=True)]
        rows.writerows(zip(*(column.to_pylist() for column in texts), strict=True))

    yield write
    text.detach()  # written out


@contextmanager
def _new_sheet(path: Path, file: BinaryIO, names: list[str]) -> Iterator[Write]:
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    book, num_rows = Workbook(write_only=True), 1
    sheet = book.create_sheet()

    def cell(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("\ufffd", value))
        text.data_type = "s"  # were it even a formula
        return text

    def write(batch: pa.RecordBatch) -> None:
        nonlocal num_rows
        num_rows += batch.num_rows
        if num_rows > MOST_EXCEL_ROWS:
            raise ValueError(f"{path}: a sheet holds {MOST_EXCEL_ROWS:,} rows; name a csv file.")
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            sheet.append(list(map(cell, row)))

    sheet.append(list(map(cell, names)))
    yield write
    book.save(file)


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
            text: dict[str, Any] = {} if "b" in mode else {"encoding": "utf-8", "newline": ""}
            file = open(unfinished, mode, **text)  # noqa: SIM115 - closed below
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
    if suffix_of(path) == EXCEL_SUFFIX:
        _check_excel(path)


def _check_excel(path: Path) -> None:
    if importlib.util.find_spec("openpyxl") is None:
        raise ValueError(f"{path} needs openpyxl: pip install 'unisono[excel]', or use a csv.")


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
    with _new_file(path, "w", None) as file:
        csv.writer(file).writerows(table)
