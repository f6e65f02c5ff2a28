"""Reading and writing of tables: csv, tsv, parquet and Excel."""

import codecs
import csv
import difflib
import glob
import importlib.util
import io
import logging
import re
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from datamodules.core.store import new_file
from datamodules.files.rows import (
    JSON_OUTPUT,
    JSON_SUFFIXES,
    PARQUET_SUFFIXES,
    BadRow,
    kind_of,
    open_parquet,
    opened,
    read_json_rows,
)

NUMBER = re.compile(r"\d+$")  # at the end of a column's name
SEPARATORS = {".csv": ",", ".tsv": "\t", ".tab": "\t"}
SNIFFED_SEPARATORS = (",", ";", "\t", "|")
SEPARATOR_LINE = re.compile(r'\A"?sep=."?(?=\s*\Z)')  # a line above the header
SNIFFED_LINES = 1000
EXCEL_SUFFIX = ".xlsx"
PACKED = tuple(f"{suffix}.gz" for suffix in SEPARATORS)
SUFFIXES = (*SEPARATORS, *PACKED, *PARQUET_SUFFIXES, EXCEL_SUFFIX)
ROW_SUFFIXES = (*SUFFIXES, *JSON_OUTPUT)  # tables and jsonl
BLOCK = 1 << 20
MOST_LINES_OF_ROW = 100_000
EXCEL_ROWS, EXCEL_CHARACTERS = 1 << 20, (1 << 15) - 1  # limits of a sheet, of a cell
ROWS_PER_BATCH = 8192
OPTIONAL = ("columns.language", "columns.split", "columns.source")
Files = str | list[str] | None
OnBadRow = Callable[[BadRow], None]

OPEN_QUOTE = (
    "a quote opens a value and is not closed, or text follows its end, which glues rows together; "
    "close it, or double a quote that belongs to the text; parquet holds line breaks without any."
)
LONE_RETURN = (
    "a carriage return stands inside the line; replace it by a blank, or by a line feed where all "
    r"lines end so (tr '\r' '\n')."
)

log = logging.getLogger(__name__)
csv.field_size_limit(1 << 24)  # characters; the default, 128 KiB, is too small for documents


@dataclass(frozen=True)
class TableOptions:
    """Format of csv, tsv and Excel files.

    Args:
        separator: the character between values; `None` detects `,`, `;`, tab or `|`.
        encoding: such as windows-1252; `None` detects UTF-8, UTF-16 or Windows-1252.
        sheet: name of an Excel sheet; `None` is the first.
    """

    separator: str | None = None
    encoding: str | None = None
    sheet: str | None = None

    def __post_init__(self) -> None:
        if len(self.separator or ",") != 1:
            raise ValueError(f"table.separator {self.separator!r} is no character; null finds one.")
        try:
            codecs.lookup(self.encoding or "utf-8")
        except LookupError as error:
            raise ValueError(f"table.encoding: {error}; name one of Python's.") from error


class Dialect(NamedTuple):
    """Format of a delimited file; `encoding` is Python's name."""

    separator: str = ","
    encoding: str = "utf-8"
    newline: str = "\n"


# Of delimited text or a sheet: the first line and the values, [] for an empty row.
Row = tuple[int, list[str]] | BadRow


def raise_bad_row(bad: BadRow) -> NoReturn:
    """Raise a ValueError that names this row."""
    raise ValueError(str(bad))


def paths(files: str | Path | Iterable[str | Path] | None) -> list[str]:
    """Return one or several paths and patterns of an option as a list."""
    return [str(one) for one in ([files] if isinstance(files, str | Path) else files or [])]


def expand_files(files: Any, option: str, suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Return the files named by paths and patterns, in order; matches of a pattern are sorted.

    Args:
        files: a path or a pattern such as data/*.csv, or several, see `paths`.
        option: name of the option, for messages.
        suffixes: allowed suffixes.

    Raises:
        FileNotFoundError: a path does not exist or a pattern matches nothing.
        ValueError: a path is a folder, or a file is named twice.
    """
    all_paths: list[Path] = []
    for entry in paths(files):
        path = Path(entry).expanduser()
        is_pattern = not path.exists() and glob.has_magic(entry)
        matches = sorted(map(Path, glob.glob(str(path), recursive=True))) if is_pattern else [path]
        if not matches:
            raise FileNotFoundError(
                f'{option}: no file matches "{entry}", seen from {Path.cwd()}; check the folder '
                "and the suffix."
            )
        all_paths += matches
    times = Counter(path.absolute() for path in all_paths)
    for path in all_paths:
        check_file(path, option, suffixes)
        if times[path.absolute()] > 1:
            raise ValueError(f"{option} names {path} twice; its rows would count double.")
    return all_paths


def check_file(path: Path, option: str = "the table", suffixes: Sequence[str] = SUFFIXES) -> None:
    """Raise FileNotFoundError or ValueError unless this is a file with one of these suffixes."""
    if path.exists() and not path.is_file():  # a pipe can be read only once
        raise ValueError(f"{option}: {path} is a folder, pipe or device; name files: {path}/*.csv.")
    if not path.exists():
        names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f'Did you mean "{path.parent / near[0]}"?' if near else "Name a file that is there."
        hint = f'Name several as a list: "[{path}]".' if "," in path.name else hint
        raise FileNotFoundError(f"{option}: {path} does not exist. {hint}")
    if kind_of(path) not in suffixes:
        raise ValueError(
            f'{option}: {path} ends in "{path.suffix}", which is none of {", ".join(suffixes)}; '
            "save it as one of these."
        )


class Table:
    """A table file, with the `names` of its columns and the `dialect` of delimited text.

    Args:
        path: csv or tsv (also compressed by gzip or zstandard), parquet or xlsx.
        options: its format, where detection needs help.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is empty, binary or damaged, or two columns have the same name.
    """

    def __init__(self, path: Path, options: TableOptions = TableOptions()) -> None:
        check_file(path)
        status = path.stat()
        facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        self.path, self.options = path, options
        self.names, self.dialect = _opened(path, options, facts)

    def check(self, columns: Sequence[str], option: str = "columns") -> None:
        """Raise ValueError unless the table has all these columns; suggest similar names."""
        for name in columns:
            if name in self.names:
                continue
            lower = {column.lower(): column for column in self.names}
            near = difflib.get_close_matches(name.lower(), lower, n=1)
            or_none = ", or none with =null" if option in OPTIONAL else ""
            hint = f" Name one of them with --data.{option}{or_none}." if "." in option else ""
            hint = f' Did you mean "{lower[near[0]]}"?' if near else hint
            raise ValueError(
                f'{self.path} has no column "{name}" ({option}); it has: '
                f"{', '.join(self.names)}.{hint}"
            )

    def rows(
        self, columns: Sequence[str] | None = None, on_bad_row: OnBadRow = raise_bad_row
    ) -> Iterator[tuple[int, dict[str, str]]]:
        """Yield each row in order: its place, and its values by column, "" for missing ones.

        The place counts from 1: the line in a csv or tsv file (the row's first line, if quoted
        values hold line breaks), the row in a parquet file or sheet.

        Args:
            columns: the columns to read; `None` reads all.
            on_bad_row: called with each row that cannot be cut into columns, which is skipped.

        Raises:
            ValueError: the file is damaged, has another encoding, or lacks a column or any row.
        """
        wanted = self.names if columns is None else list(columns)
        self.check(wanted)
        names, suffix = self.names, kind_of(self.path)
        if suffix in PARQUET_SUFFIXES:
            names, rows = wanted, _parquet_rows(self.path, wanted)
        elif suffix == EXCEL_SUFFIX:
            rows = islice(_sheet_rows(self.path, self.options.sheet), 1, None)  # without the header
        else:
            lines = text_lines(self.path, self.dialect.encoding)
            rows = islice(_delimited_rows(self.path, lines, self.dialect.separator), 1, None)
        places = {name: names.index(name) for name in wanted}
        is_empty = True
        for row in rows:
            if isinstance(row, BadRow):
                on_bad_row(row)
            elif values := row[1]:
                yield row[0], {name: values[i] for name, i in places.items()}
            else:
                continue
            is_empty = False
        if is_empty:
            raise ValueError(f"{self.path} holds a header and no rows; give it at least one row.")


def value_rows(
    path: Path,
    columns: Sequence[str] | None = None,
    on_bad_row: OnBadRow = raise_bad_row,
    options: TableOptions = TableOptions(),
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield place and values of each row of a jsonl file (all columns) or a table (these columns,
    as text). Errors as in `Table.rows` and `read_json_rows`."""
    if kind_of(path) in JSON_SUFFIXES:
        yield from ((row.line, row.values) for row in read_json_rows(path))
    else:
        yield from Table(path, options).rows(columns, on_bad_row)


@lru_cache(maxsize=256)
def _opened(path: Path, options: TableOptions, facts: tuple[int, ...]) -> tuple[list[str], Dialect]:
    """Return column names and dialect; an unusual dialect is logged."""
    dialect, suffix = Dialect(), kind_of(path)
    if suffix in PARQUET_SUFFIXES:
        with open_parquet(path) as file:
            names = file.schema_arrow.names
    elif suffix == EXCEL_SUFFIX:
        rows = _sheet_rows(path, options.sheet, is_first=True)
        names = next((row[1] for row in rows if not isinstance(row, BadRow)), [])
    else:
        encoding = options.encoding or _encoding_of(path)
        lines = list(islice(text_lines(path, encoding), SNIFFED_LINES))
        plain = SEPARATORS[suffix]
        separator = options.separator or _separator_of(lines, plain)
        header = next(_delimited_rows(path, iter(lines), separator), None)
        if isinstance(header, BadRow):
            raise ValueError(f"{path}:1: the header cannot be read: {header.rule}")
        names = [] if header is None else header[1]
        newline = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
        dialect = Dialect(separator, encoding, newline)
        mark = "tab" if separator == "\t" else f'"{separator}"'
        traits = [f"separator {mark}"] * (options.separator is None and separator != plain)
        traits += [f"encoding {encoding}"] * (options.encoding is None and encoding[:5] != "utf-8")
        _say(path, ", ".join(traits))
    if not names:
        raise ValueError(f"{path} is empty; it needs a header and rows.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f'{path}: the column name "{twice[0]}" occurs {names.count(twice[0])} times in the '
            "header; name each column, and delete empty columns and a title above the header."
        )
    return names, dialect


def _say(path: Path, traits: str) -> None:
    if traits:
        from lightning.pytorch.utilities.rank_zero import rank_zero_info

        rank_zero_info(f"{path.name} is read with {traits}; data.table, if any, can name another")


def _encoding_of(path: Path) -> str:
    """Return the likely encoding of a file's bytes, all of which are read; Python's name."""
    num_high = num_others = 0  # characters beyond ASCII; bytes that are not UTF-8
    with opened(path) as file:
        first = file.peek()[: len(codecs.BOM_UTF8)]
        if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            return "utf-16"
        with io.TextIOWrapper(file, "utf-8", "surrogateescape") as text:
            while block := text.read(BLOCK):
                num_high += len(block) - len(block.encode("ascii", "ignore"))
                num_others += len(re.findall("[\udc80-\udcff]", block))
    if num_others and 2 * num_others >= num_high:  # else UTF-8 with a few bad bytes
        return "windows-1252"
    return "utf-8-sig" if first == codecs.BOM_UTF8 else "utf-8"


def _separator_of(lines: list[str], plain: str) -> str:
    """Return the separator that gives most rows as many values as the header, else `plain`."""
    scores: dict[str, tuple[float, bool, int]] = {}
    for mark in SNIFFED_SEPARATORS:
        # newline="" leaves line ends to csv, which also accepts a single carriage return.
        rows = csv.reader(io.StringIO("".join(lines), newline=""), delimiter=mark)
        widths = [len(row) for row in rows if row]
        if widths and widths[0] > 1:
            share = widths.count(widths[0]) / len(widths)
            scores[mark] = (share, mark == plain, widths[0])
    return max(scores, key=scores.__getitem__, default=plain)


def text_lines(path: Path, encoding: str) -> Iterator[str]:
    """Yield the lines of a text with their ends; a single carriage return does not end a line.

    Raises:
        ValueError: the file is damaged, binary, or in another encoding; it names the line.
    """
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding, newline="\n") as text:
            for number, line in enumerate(text, start=1):
                if "\0" in line:
                    raise ValueError(
                        f"{path}:{number}: a NUL byte: this is a binary file such as .parquet or "
                        ".xlsx, or UTF-16 without its mark, and no table in text; save it as csv "
                        "(UTF-8)."
                    )
                yield line if number > 1 else SEPARATOR_LINE.sub("", line.removeprefix("\ufeff"))
    except UnicodeDecodeError as error:
        raise undecodable(path, encoding) from error


def first_bad_byte(content: bytes, encoding: str = "utf-8") -> int | None:
    """Return the index of the first byte that is invalid in an encoding, or `None`."""
    try:
        content.decode(encoding)
    except UnicodeDecodeError as error:
        return error.start
    return None


def undecodable(path: Path, encoding: str) -> ValueError:
    """Return an error that names the first byte of a file that is invalid in an encoding."""
    with opened(path) as file:
        content = file.read()
    start = first_bad_byte(content, encoding) or 0
    line = content.count(b"\n", 0, start) + 1
    likely = "cp850" if encoding == "windows-1252" else "windows-1252"  # cp850 of DOS
    likely = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else likely
    option = f", or give a table's --data.table.encoding={likely}" * (kind_of(path) in SEPARATORS)
    return ValueError(
        f"{path}:{line}: byte 0x{content[start]:02X} is not in the encoding {encoding}; correct "
        f"it, or save the file in UTF-8 (iconv -f {likely} -t utf-8 {path}){option}."
    )


def _delimited_rows(path: Path, lines: Iterator[str], separator: str) -> Iterator[Row]:
    """Yield the rows of these lines, first the header, whose number of values others must match.

    If a row over several lines has another number of values, or most of its lines look like rows, a
    quote is not closed: only its first line is reported, and the others are read again.
    """
    waiting: deque[str] = deque()  # lines to read again
    taken: list[str] = []  # lines of the current row
    names: list[str] = []
    number = 1

    def lines_of_row() -> Iterator[str]:
        while len(taken) < MOST_LINES_OF_ROW:
            line = waiting.popleft() if waiting else next(lines, "")
            if not line:
                return
            taken.append(line)
            yield line

    reader = csv.reader(lines_of_row(), delimiter=separator, strict=True)
    while True:
        try:
            values = next(reader, None)
            if values is None:
                return
            if not values and len(names) == 1:
                values = [""]  # only in a one-column table is an empty line a row
            fault = _fault_of(values, names, "quote values that hold the separator")
            if len(taken) > 1 and names:
                # Lines of prose, with blanks behind their commas, do not look like rows.
                cuts = [len(line.split(separator)) for line in taken if f"{separator} " not in line]
                looks_glued = 4 * cuts.count(len(names)) >= 3 * len(taken)
                if fault or (looks_glued and len(names) > 1):
                    fault = OPEN_QUOTE
        except csv.Error as error:
            values = []
            is_return = len(taken) == 1 and "new-line character" in str(error)
            fault = LONE_RETURN if is_return else OPEN_QUOTE
        if fault:  # read all but the first line again
            waiting.extendleft(reversed(taken[1:]))
            del taken[1:]
            reader = csv.reader(lines_of_row(), delimiter=separator, strict=True)
        names = names or values
        if names or fault:  # skip empty lines before the header
            text = "".join(taken).rstrip("\r\n")
            yield BadRow(str(path), number, text, fault) if fault else (number, values)
        number += len(taken)
        taken.clear()


def _fault_of(values: list[str], names: Sequence[str], too_many: str) -> str:
    """Return the fault of a row whose number of values differs from the header's, else ""."""
    if not values or len(names) in (0, len(values)):
        return ""
    too_few = "fill the row up, or check the quotes before it"
    return (
        f"the row has {len(values)} values, the header {len(names)} ({', '.join(names)}); "
        f"{too_many if len(values) > len(names) else too_few}."
    )


def _sheet_rows(path: Path, sheet: str | None, is_first: bool = False) -> Iterator[Row]:
    """Yield the rows of a sheet from the header on, without empty cells at their ends."""
    check_installed(path)
    import openpyxl

    def damaged(error: Exception) -> ValueError:
        reason = f"{type(error).__name__}: {error}"
        return ValueError(f"{path} is damaged or no Excel file ({reason}); write or copy it again.")

    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=True)
    except Exception as error:  # zip, XML and key errors alike
        raise damaged(error) from error
    try:
        sheets, names = [one.title for one in book.worksheets], list[str]()  # without chart sheets
        if sheet is not None and sheet not in sheets:
            raise ValueError(f'{path} has no sheet "{sheet}"; it has: {", ".join(sheets)}.')
        if is_first and sheet is None and len(sheets) > 1:
            _say(path, f'sheet "{sheets[0]}" of {len(sheets)}')
        cells = book[sheet or sheets[0]]
        cells.reset_dimensions()  # some programs write too small ones, which would hide rows
        for number, row in enumerate(cells.iter_rows(), start=1):
            texts = list(map(_sheet_text, row))
            while texts and not texts[-1]:
                texts.pop()
            texts += [""] * (len(names) - len(texts)) * bool(texts)
            fault = _fault_of(texts, names, "empty the cells beside the table")
            if names := names or texts:
                text = " | ".join(texts)
                yield BadRow(str(path), number, text, fault) if fault else (number, texts)
    except (SyntaxError, EOFError, zipfile.BadZipFile, zlib.error) as error:  # in the sheet
        raise damaged(error) from error
    finally:
        book.close()


def _sheet_text(cell: Any) -> str:
    """Return the text of a cell; whole numbers get the leading zeros of formats such as 00000."""
    text, shown = cell_text(cell.value), cell.number_format
    is_padded = type(cell.value) is int and set(shown) == {"0"}
    return text.zfill(len(shown)) if is_padded else text


def cell_text(value: Any) -> str:
    """Return the text of a value from a sheet or JSON: "" for `None`, whole numbers without ".0",
    dates at midnight without the time."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return _number_text(value)
    return "" if value is None else str(value).removesuffix(" 00:00:00")


def _parquet_rows(path: Path, columns: list[str]) -> Iterator[Row]:
    """Yield these columns of all rows."""
    with open_parquet(path) as table:
        batches = table.iter_batches(batch_size=ROWS_PER_BATCH, columns=columns)
        texts = ([as_text(b.column(n), f'{path}, column "{n}"') for n in columns] for b in batches)
        rows = (zip(*(column.to_pylist() for column in own), strict=True) for own in texts)
        yield from enumerate(map(list, chain.from_iterable(rows)), start=1)


def as_text(column: pa.Array, name: str) -> pa.Array:
    """Return the column as text: "" for missing values, whole numbers without ".0".

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


def write_batches(
    path: Path,
    batches: Iterable[pa.RecordBatch],
    way_out: str | None = "choose another name, or allow overwriting",
    like: Table | None = None,
) -> None:
    """Write record batches with equal columns as a table, atomically.

    Args:
        path: .csv, .tsv (or with .gz), .parquet or .xlsx.
        batches: one or more; the file appears after the last one.
        way_out: advice in the FileExistsError if the file exists; `None` replaces the file.
        like: a table whose dialect is used if it has the same suffix.

    Raises:
        ValueError: the suffix is unknown, or there are no batches.
    """
    suffix = kind_of(path)
    if not path.name.lower().endswith(SUFFIXES):
        raise ValueError(f'{path} ends in "{path.suffix}"; write to one of {", ".join(SUFFIXES)}.')
    check_installed(path)
    dialect = Dialect(SEPARATORS.get(suffix, ","))
    if like is not None and kind_of(like.path) == suffix:
        dialect = like.dialect
    with new_file(path, "wb", way_out) as file:
        rest = iter(batches)
        if (first := next(rest, None)) is None:
            raise ValueError(f"{path.name} would hold no row; give at least one.")
        rest = chain([first], rest)
        if suffix in PARQUET_SUFFIXES:
            with pq.ParquetWriter(file, first.schema) as writer:
                for batch in rest:
                    writer.write_batch(batch)
        elif suffix == EXCEL_SUFFIX:
            _write_sheet(path, file, first.schema.names, rest)
        else:
            text = io.TextIOWrapper(file, encoding=dialect.encoding, newline="")
            lines: Any = SimpleNamespace(write=lambda row: text.write(row[:-2] + dialect.newline))
            rows = csv.writer(lines, delimiter=dialect.separator)  # its \r\n makes it quote both
            rows.writerow(first.schema.names)
            for batch in rest:
                columns = map(as_text, batch.columns, first.schema.names)
                rows.writerows(zip(*(column.to_pylist() for column in columns), strict=True))
            text.detach()  # flushes, and leaves the file open


def _write_sheet(
    path: Path, file: BinaryIO, names: list[str], batches: Iterable[pa.RecordBatch]
) -> None:
    from openpyxl import Workbook
    from openpyxl.cell import WriteOnlyCell
    from openpyxl.cell.cell import ILLEGAL_CHARACTERS_RE

    book, num_rows = Workbook(write_only=True), 1
    sheet = book.create_sheet()

    def cell(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if len(value) > EXCEL_CHARACTERS:  # openpyxl would cut it silently
            most = f"a cell of Excel holds {EXCEL_CHARACTERS:,} characters"
            raise ValueError(f"{path}: {most}, a text has {len(value):,}; name a csv file.")
        text = WriteOnlyCell(sheet, ILLEGAL_CHARACTERS_RE.sub("\ufffd", value))
        text.data_type = "s"  # even if it looks like a formula
        return text

    with closing(sheet):
        sheet.append(list(map(cell, names)))
        for batch in batches:
            num_rows += batch.num_rows
            if num_rows > EXCEL_ROWS:
                raise ValueError(f"{path}: a sheet holds {EXCEL_ROWS:,} rows; name a csv file.")
            for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                sheet.append(list(map(cell, row)))
    book.save(file)


def write_beside(
    files: Sequence[Path],
    options: TableOptions,
    path: Path,
    num_rows: int,
    added: Callable[[slice], dict[str, pa.Array]],
    texts: Iterable[str],
) -> None:
    """Write all rows of tables in order with added columns, atomically.

    Args:
        files: tables with equal columns that were read before. Rows that cannot be cut into columns
            are left out.
        path: a table file of any kind. It gets the dialect of the first table, but UTF-8 if the
            tables differ in encoding or theirs cannot hold the added texts, which is logged.
        num_rows: number of rows that were read before.
        added: returns the added columns of a slice of rows by name.
        texts: all texts that may be added.

    Raises:
        FileExistsError: the file exists.
        RuntimeError: a table has changed meanwhile.
    """
    tables = [Table(file, options) for file in files]
    check_same_columns(tables)
    like = Table(files[0], options)  # a copy, whose dialect may become UTF-8
    encoding = like.dialect.encoding
    try:
        "".join(texts).encode(encoding)
        holds_all = all(table.dialect.encoding == encoding for table in tables)
    except UnicodeEncodeError:
        holds_all = False
    if not holds_all:
        log.warning("the table is written in UTF-8: %s cannot hold all of it", encoding)
        like.dialect = like.dialect._replace(encoding="utf-8")

    def batches() -> Iterator[pa.RecordBatch]:
        position, names = 0, list[str]()
        all_rows = chain.from_iterable(table.rows(None, lambda bad: None) for table in tables)
        while some := [row for _, row in islice(all_rows, ROWS_PER_BATCH)]:
            rows = slice(position, position + len(some))
            position = rows.stop
            if position <= num_rows:
                columns = added(rows)
                names = names or [*free_names(like.names, list(columns)), *columns]
                texts = [pa.array([row[name] for row in some], pa.string()) for name in like.names]
                yield pa.RecordBatch.from_arrays([*texts, *columns.values()], names=names)
        if position != num_rows:
            raise RuntimeError(
                f"the tables hold {position} rows, {num_rows} were read before: a table changed "
                "meanwhile; start the prediction again."
            )

    write_batches(path, batches(), like=like)


def check_same_columns(tables: Sequence[Table]) -> None:
    """Raise ValueError unless tables that become one file have the same columns, in any order, and
    only plain values."""
    for table in tables:
        next(table.rows(None, lambda bad: None), None)  # nested values fail here, before any work
        if others := sorted({*table.names} ^ {*tables[0].names}):
            raise ValueError(
                f"{table.path} and {tables[0].path} do not both have {', '.join(others)}; tables "
                "that become one file need the same columns: predict them one by one."
            )


def check_output(path: Path, files: Sequence[Path], options: TableOptions) -> None:
    """Raise ValueError if the rows of these files cannot be written to `path`: jsonl stays jsonl,
    and tables need the same columns."""
    are_json = {kind_of(file) in JSON_SUFFIXES for file in [*files, path]}
    if len(are_json) > 1:
        raise ValueError(
            f"{path} cannot hold {files[0]}: lines of JSON are written as .jsonl, tables as a "
            "table; name another data.predict_output, or predict the files one by one."
        )
    if are_json == {False}:
        check_same_columns([Table(file, options) for file in files])


def check_installed(path: Path) -> None:
    """Raise ValueError if a package that this kind of file needs is not installed."""
    if kind_of(path) == EXCEL_SUFFIX and importlib.util.find_spec("openpyxl") is None:
        raise ValueError(f"{path} needs openpyxl: pip install 'unisono[excel]', or use a csv.")


def output_like(files: Sequence[Path], mark: str, suffixes: Sequence[str]) -> str:
    """Return the default name of predictions: `mine.csv` becomes `mine.MARK.csv`, with the first of
    these suffixes if the input's is not among them."""
    name, kind = files[0].name, kind_of(files[0])
    end = name.lower().rindex(kind)
    alike = [suffix for suffix in (name[end:].lower(), kind) if suffix in suffixes]
    return f"{name[:end]}.{mark}{[*alike, *suffixes][0]}"


def free_names(names: list[str], taken: list[str]) -> list[str]:
    """Return the input's column names, renamed `input_NAME` (and logged) if an added column has the
    name. So is an input's `code_2` beside an added `code_1`, as it would look like an answer."""
    free, kinds = [], {NUMBER.sub("1", name) for name in taken}
    for name in names:
        new = name
        while NUMBER.sub("1", new) in kinds or (new != name and new in names):
            new = f"input_{new}"
        if new != name:
            log.warning('the input\'s column "%s" is written as "%s"', name, new)
        free.append(new)
    return free


def write_table(path: Path, table: list[list[str]]) -> None:
    """Write a csv, replacing an existing file atomically."""
    with new_file(path, way_out=None) as file:
        csv.writer(file).writerows(table)
