"""Tables in and out: csv, tsv, parquet and Excel, as record batches of text with line numbers.

A fast parser (pyarrow) takes the blocks of delimited text that hold nothing unusual; a careful
one, line by line, takes the others and names what is wrong. Both read the same values from a sound
block.
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
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain, islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from datamodules.files.rows import PARQUET_SUFFIXES, BadRow

SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
SNIFFED_SEPARATORS = (",", ";", "\t", "|")
SNIFFED_BYTES, SNIFFED_ROWS = 1 << 18, 200
EXCEL_SUFFIX = ".xlsx"
SUFFIXES = (
    *SEPARATORS,
    *(f"{suffix}.gz" for suffix in SEPARATORS),
    *PARQUET_SUFFIXES,
    EXCEL_SUFFIX,
)
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
# Possessive: a doubled quote never counts as the end of a value.
QUOTED_VALUE = re.compile(r'"((?:[^"]|"")*+)"')

OnBadRow = Callable[[BadRow], None]

log = logging.getLogger(__name__)


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
    """Return a command of `unisono predict` for a file of this run: the last part that has one.

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
    if path.exists() and not path.is_file():
        raise ValueError(
            f"{option}: {path} is a pipe or a device, and a table is read more than once; save it "
            "as a file first."
        )
    if not path.exists():
        near = difflib.get_close_matches(path.name, _neighbours(path), n=1)
        hint = f'Did you mean "{path.parent / near[0]}"?' if near else "Name a file that is there."
        raise FileNotFoundError(f"{option}: {path} does not exist. {hint}")
    if suffix_of(path) not in suffixes:
        kind = "table" if suffixes is SUFFIXES else "file"
        raise ValueError(
            f'{option}: {path} ends in "{path.suffix}", which is none of {", ".join(suffixes)}; '
            f"save the {kind} as one of these."
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
            hint = f' Did you mean "{lower[near[0]]}"?' if near else ""
            if not hint and "." in option:
                hint = f" Name one of them with --data.{option}."
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
        names = _open_parquet(path).schema_arrow.names
    elif suffix == EXCEL_SUFFIX:
        names = _excel_header(next(_excel_rows(path, options.sheet, is_first=True), []))
    else:
        encoding = options.encoding or _encoding_of(path)
        start = b"".join(islice(_utf8_chunks(path, encoding), 1 + SNIFFED_BYTES // BLOCK_BYTES))
        sample = start[:SNIFFED_BYTES].decode("utf-8", "replace")
        plain = SEPARATORS[suffix.removesuffix(".gz")]
        separator = options.separator or _separator_of(sample, plain)
        newline = "\r\n" if sample.partition("\n")[0].endswith("\r") else "\n"
        dialect = Dialect(separator, encoding, newline)
        names = _delimited_header(path, dialect)
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
    chunks = _chunks(path)
    first = next(chunks, b"")
    if first.startswith(codecs.BOM_UTF8):
        return "utf-8-sig"
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    nulls = [first[place:1024:2].count(0) for place in (0, 1)]
    if max(nulls) > len(first[:1024]) / 4 and min(nulls) == 0:
        return "utf-16-le" if nulls[1] else "utf-16-be"
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_characters, num_alone, undefined = 0, 0, False
    try:
        for chunk in chain([first], chunks):
            decoder.decode(chunk)
        decoder.decode(b"", True)
    except UnicodeDecodeError:
        for chunk in _chunks(path):
            found = re.findall(rb"[\xc2-\xf4][\x80-\xbf]+", chunk)
            num_characters += len(found)
            high = len(chunk) - len(chunk.translate(None, bytes(range(128, 256))))
            num_alone += high - sum(map(len, found))
            undefined |= len(chunk) != len(chunk.translate(None, b"\x81\x8d\x8f\x90\x9d"))
        if num_alone >= num_characters:  # else it is UTF-8 with a broken place
            return "latin-1" if undefined else "windows-1252"
    return "utf-8"


def _separator_of(sample: str, plain: str) -> str:
    """The separator that cuts most rows into as many values as the header; `plain` if in doubt."""
    best, found = (0.0, False, 0), plain
    for mark in SNIFFED_SEPARATORS:
        try:
            lines = csv.reader(io.StringIO(sample, newline=""), delimiter=mark)
            widths = [len(row) for row in islice(filter(None, lines), SNIFFED_ROWS)]
        except csv.Error:
            continue
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


def _delimited_header(path: Path, dialect: Dialect) -> list[str]:
    lines: list[str] = []
    for block in _utf8_chunks(path, dialect.encoding):
        lines = _decode(path, 1, block.rpartition(b"\n")[0] or block).split("\n")
        break
    if not "".join(lines).strip():
        return []
    if "\r" in lines[0].removesuffix("\r"):
        raise ValueError(
            f"{path}:1: the lines end in carriage returns alone (old Macintosh); convert them "
            r"with `tr '\r' '\n'`."
        )
    try:
        return _record(lines, 0, dialect.separator)[0]
    except _LineError as error:
        raise ValueError(f"{path}:1: the header cannot be read: {error}") from error


def _delimited_batches(
    path: Path, dialect: Dialect, names: list[str], on_bad_line: Callable[[int, str, str], None]
) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    """Yields all columns as text with the 1-based line of each row, [rows] int64."""
    line, rest, has_header = 1, b"", False
    separator = dialect.separator
    for chunk in chain(_utf8_chunks(path, dialect.encoding), [b""]):
        if b"\0" in chunk:
            at = line + (rest + chunk).split(b"\0", 1)[0].count(b"\n")
            raise ValueError(
                f"{path}:{at}: a NUL byte: this is a binary file (or UTF-16), not a table in "
                "text; save it as csv (UTF-8)."
            )
        block, newline, tail = (rest + chunk).rpartition(b"\n")
        if not chunk:
            block, newline, tail = rest, b"", b""
        if len(tail) > MAX_LINE_BYTES:
            long_line = line + (block + newline).count(b"\n")
            raise ValueError(
                f"{path}:{long_line}: a line is longer than {MAX_LINE_BYTES >> 20} MiB; this is "
                "no table with one row per line."
            )
        block, rest = block + newline, tail
        if block and not has_header:
            num_lines = _record(_decode(path, 1, block).split("\n"), 0, separator)[1]
            block, line, has_header = _after_lines(block, num_lines), 1 + num_lines, True
        if not block:
            continue
        rows = _parse_fast(block, names, separator)
        if rows is not None:
            yield rows, np.arange(line, line + rows.num_rows, dtype=np.int64)
            line += rows.num_rows
        else:
            rows, numbers, num_lines = _parse_carefully(
                _decode(path, line, block), line, names, separator, on_bad_line, is_end=not chunk
            )
            yield rows, numbers
            rest = _after_lines(block, num_lines) + rest
            line += num_lines


def _after_lines(block: bytes, num_lines: int) -> bytes:
    return block.split(b"\n", num_lines)[num_lines] if block.count(b"\n") >= num_lines else b""


class _LineError(ValueError):
    """What is wrong with one line."""


class _OpenQuote(_LineError):
    """A quote that is not closed in these lines."""


def _record(
    lines: list[str], start: int, separator: str, names: Sequence[str] = ()
) -> tuple[list[str], int]:
    """The values of the row that begins at this line, and its number of lines.

    Raises:
        _OpenQuote: a quote is not closed in these lines.
        _LineError: it is closed where the row would not have one value per name, or where both
            ends look like rows of their own; or anything else is wrong.
    """
    try:
        return split_line(lines[start].removesuffix("\r"), separator), 1
    except _OpenQuote:
        for end in range(start + 1, min(start + MOST_LINES_OF_ROW, len(lines))):
            if '"' not in lines[end]:
                continue
            try:
                joined = "\n".join(lines[start : end + 1]).removesuffix("\r")
                values = split_line(joined, separator)
            except _OpenQuote:
                continue
            except _LineError:
                break
            plain = [len(lines[i].split(separator)) for i in (start, end)]
            looks_glued = plain == [len(names)] * 2 and f"{separator} " not in lines[start]
            if not names or (len(values) == len(names) and not (looks_glued and len(names) > 1)):
                return values, end + 1 - start
            break
        else:
            if len(lines) < start + MOST_LINES_OF_ROW:
                raise _OpenQuote(OPEN_QUOTE) from None
        raise _LineError(OPEN_QUOTE) from None


OPEN_QUOTE = (
    "a quote opens a value and is not closed, which glues rows together; close it, or double a "
    "quote that belongs to the text."
)


def split_line(line: str, separator: str) -> list[str]:
    """The values of one row; a quote counts only at the beginning of a value.

    Raises:
        ValueError: a quote is not closed, or is followed by other text.
    """
    values, position = [], 0
    while True:
        if line[position : position + 1] == '"':
            match = QUOTED_VALUE.match(line, position)
            if match is None:
                raise _OpenQuote(OPEN_QUOTE)
            values.append(match[1].replace('""', '"'))
            position = match.end()
            if position < len(line) and line[position] != separator:
                raise _LineError(
                    f"text follows the closing quote of value {len(values)}; double the quotes "
                    'inside a quoted value ("").'
                )
        else:
            end = line.find(separator, position)
            end = len(line) if end < 0 else end
            values.append(line[position:end])
            position = end
        if position >= len(line):
            return values
        position += 1


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
    """The rows of a block in which every line is one plain row; None sends it to the other way."""
    num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
    if block.count(b"\r") != block.count(b"\r\n"):
        return None
    if block.startswith(codecs.BOM_UTF8):
        return None  # pyarrow would drop it, and here it belongs to a value
    if not _has_plain_quotes(block, separator) and _suspicious_quote(separator).search(block):
        return None
    try:
        table = pacsv.read_csv(
            pa.BufferReader(block),
            pacsv.ReadOptions(column_names=names, use_threads=False, block_size=len(block) + 1),
            pacsv.ParseOptions(delimiter=separator, newlines_in_values=True),
            pacsv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), null_values=[]),
        )
    except pa.ArrowInvalid:
        return None  # the careful parser finds the line and the reason
    if table.num_rows != num_lines:
        return None
    return table.combine_chunks().to_batches()[0]


def _has_plain_quotes(block: bytes, separator: str) -> bool:
    """Whether quotes open and close values in turns, none doubled or inside a text."""
    octets = np.frombuffer(b"\n" + block + b"\n", np.uint8)
    places = np.flatnonzero(octets == ord('"'))
    before, after = octets[places[::2] - 1], octets[places[1::2] + 1]
    opens = (before == ord(separator)) | (before == ord("\n"))
    closes = (after == ord(separator)) | (after == ord("\n")) | (after == ord("\r"))
    return len(places) % 2 == 0 and bool(opens.all() and closes.all())


@cache
def _suspicious_quote(separator: str) -> re.Pattern[bytes]:
    """Finds a value that opens with a quote and does not end with one at a separator."""
    pattern = rb'(?m)(?:^|D)"(?:[^"\n]|"")*+(?:"[^D\r\n]|$|\r$)'
    return re.compile(pattern.replace(b"D", re.escape(separator).encode()))


def _parse_carefully(
    text: str,
    first_line: int,
    names: list[str],
    separator: str,
    on_bad_line: Callable[[int, str, str], None],
    is_end: bool = True,
) -> tuple[pa.RecordBatch, np.ndarray, int]:
    """The sound rows, their lines, and how many lines were read: a row may go on."""
    rows: list[list[str]] = []
    numbers: list[int] = []
    lines = text.split("\n")
    if text.endswith("\n"):
        lines.pop()
    place = 0
    while place < len(lines):
        line, size = lines[place].removesuffix("\r"), 1
        if line or len(names) == 1:  # an empty line is a row of a one-column table alone
            try:
                values, size = _record(lines, place, separator, names)
                _check_values(values, names, is_one_line=size == 1)
            except _LineError as error:
                if isinstance(error, _OpenQuote) and not is_end:
                    break
                on_bad_line(first_line + place, line, str(error))
            else:
                rows.append(values)
                numbers.append(first_line + place)
        place += size
    return _text_batch(rows, names), np.array(numbers, dtype=np.int64), place


def _text_batch(rows: list[list[str]], names: list[str]) -> pa.RecordBatch:
    columns = [pa.array([row[i] for row in rows], pa.string()) for i in range(len(names))]
    return pa.RecordBatch.from_arrays(columns, names=names)


def _check_values(values: list[str], names: list[str], is_one_line: bool) -> None:
    if is_one_line and any("\r" in value for value in values):
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
            try:
                _check_values(texts, names, is_one_line=False)
            except _LineError as error:
                on_bad_line(number, " | ".join(texts), str(error))
            else:
                if values:  # an empty row is none
                    rows.append(texts)
                    numbers.append(number)
        yield _text_batch(rows, names), np.array(numbers, dtype=np.int64)


def _excel_header(values: list[Any]) -> list[str]:
    return [_cell_text(value) for value in values]


def _cell_text(value: Any) -> str:
    """The text of a cell: whole numbers have no ".0", a date at midnight has no time."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return _number_text(value)
    return "" if value is None else str(value).removesuffix(" 00:00:00")


def _open_parquet(path: Path) -> pq.ParquetFile:
    if path.stat().st_size == 0:
        raise ValueError(f"{path} is empty; it needs a parquet table.")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(_damaged(path, error)) from error


def _parquet_batches(path: Path, wanted: list[str]) -> Iterator[tuple[pa.RecordBatch, np.ndarray]]:
    table = _open_parquet(path)
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
        yield pa.RecordBatch.from_arrays(arrays, names=wanted), line


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


class TableWriter:
    """Writes record batches to a temporary file that takes the final name when all went well.

    Use it in a `with` block; an exception inside leaves no file and overwrites nothing.

    Args:
        path: .csv, .tsv (or with .gz), .parquet or .xlsx.
        overwrite: whether an existing file may be replaced.
        like: a table in whose dialect delimited text is written, where it has the same suffix.

    Raises:
        FileExistsError: the file exists and must not be replaced.
        ValueError: the suffix is unknown.
    """

    def __init__(self, path: Path, overwrite: bool = False, like: Table | None = None) -> None:
        check_suffix(path)
        self.path = path
        self.overwrite = overwrite
        self.kind = suffix_of(path)
        bare = self.kind.removesuffix(".gz")
        self.dialect = Dialect(SEPARATORS.get(bare, ","))
        if like is not None and suffix_of(like.path).removesuffix(".gz") == bare:
            self.dialect = like.dialect
        self._check_free()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._file: IO[bytes] | None = None
        self._sink: Any = None
        self._schema: pa.Schema | None = None
        self._num_rows = 0

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
        if self.kind in PARQUET_SUFFIXES:
            self._sink.write_batch(batch)
        elif self.kind == EXCEL_SUFFIX:
            self._write_sheet(zip(*(column.to_pylist() for column in batch.columns), strict=True))
        else:
            texts = [as_text(c, n) for c, n in zip(batch.columns, batch.schema.names, strict=True)]
            self._sink.writerows(zip(*(text.to_pylist() for text in texts), strict=True))

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
        self._file = self._temporary.open("wb")
        if self.kind in PARQUET_SUFFIXES:
            self._sink = pq.ParquetWriter(self._file, schema)
        elif self.kind == EXCEL_SUFFIX:
            from openpyxl import Workbook

            self._sink = Workbook(write_only=True)
            self._write_sheet([schema.names])
        else:
            packed = self.kind.endswith(".gz")
            self._bytes = gzip.GzipFile(fileobj=self._file, mode="wb", mtime=0) if packed else None
            separator, encoding, newline = self.dialect
            binary: Any = self._bytes or self._file
            self._text = io.TextIOWrapper(binary, encoding=encoding, newline="")
            self._sink = csv.writer(self._text, delimiter=separator, lineterminator=newline)
            self._sink.writerow(schema.names)

    def _close(self) -> None:
        if self._file is None:
            return
        try:
            if self._sink is None:  # it could not be begun
                return
            if self.kind in PARQUET_SUFFIXES:
                self._sink.close()
            elif self.kind == EXCEL_SUFFIX:
                self._sink.save(self._file)
            else:
                self._text.detach()  # written out, and the file below stays open
                if self._bytes is not None:
                    self._bytes.close()
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
