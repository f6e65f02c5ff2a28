"""Csv and tsv files as record batches: one line is one row, so every row knows its line.

A fast parser (pyarrow) takes the blocks that hold nothing unusual; a careful one, line by line,
takes the others and names what is wrong. Both read the same values from a sound block.
"""

import codecs
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

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

OnBadLine = Callable[[int, str, str], None]


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
