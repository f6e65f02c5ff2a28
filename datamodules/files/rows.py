"""Rows of jsonl, json and parquet files with their places, and records of bad rows."""

import csv
import io
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

NUM_NAMED = 5  # faults that an error names
ENOUGH = 10_000  # bad rows that end the reading: a wrong column makes all rows bad
MOST_SHOWN = 60  # characters of a value in a message
REJECTED_FILE = "rejected.csv"
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none")  # missing cells, lower case
OnBadRows = Literal["error", "reject"]
T = TypeVar("T")
V = TypeVar("V")
log = logging.getLogger(__name__)
PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = (".jsonl", ".ndjson")
JSON_OUTPUT = (*JSON_SUFFIXES, *(f"{suffix}.gz" for suffix in JSON_SUFFIXES))
LIST_SUFFIX = ".json"  # one list of all rows, as published for ShareGPT and Alpaca
SUFFIXES = (*JSON_SUFFIXES, LIST_SUFFIX, *PARQUET_SUFFIXES)
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # first bytes -> Arrow's name
ROWS_PER_BATCH = 1024
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark and spaces


class BadRow(NamedTuple):
    """A row that breaks a rule: its place, the value, and the rule with the way out."""

    file: str
    line: int
    value: str
    rule: str
    kind: str = "columns"

    def __str__(self) -> str:
        """File, line, value (shortened) and rule."""
        value = self.value if len(self.value) <= MOST_SHOWN else self.value[:MOST_SHOWN] + "…"
        is_in_rule = self.value and f'"{self.value}"' in self.rule
        return f"{self.file}:{self.line}: " + ("" if is_in_rule else f'"{value}": ') + self.rule


def first_of_each(rows: Sequence[BadRow], most: int) -> list[str]:
    """Return a line for each file and rule, up to `most`: its first row and how many more there
    are; then a line that counts the remaining faults."""
    times = Counter((row.file, row.rule) for row in rows)
    first = {(row.file, row.rule): row for row in reversed(rows)}
    lines = [
        f"{first[key]} [and {count - 1:,} more]" if count > 1 else str(first[key])
        for key, count in islice(times.items(), most)
    ]
    if (others := len(times) - most) > 0:
        lines.append(f"… and {others:,} other faults")
    return lines


def refuse(rows: Sequence[BadRow], mode: OnBadRows = "error") -> None:
    """Raise a ValueError that names the first ones of these rows, if any, in mode `error`."""
    if rows and mode != "reject":
        more = " or more" if len(rows) >= ENOUGH else ""
        noun = "1 row breaks" if len(rows) == 1 else f"{len(rows):,}{more} rows break"
        first = "\n".join(first_of_each(rows, NUM_NAMED))
        raise ValueError(
            f"{noun} the rules of the data:\n{first}\n--data.on_bad_rows=reject writes them to "
            f"{REJECTED_FILE} and goes on without; `unisono check` explains each."
        )


class BadRows:
    """Collector of bad rows.

    Args:
        mode: in `settle`, `error` raises and `reject` writes the rows to a file.
    """

    def __init__(self, mode: OnBadRows) -> None:
        self.mode = mode
        self.rows: list[BadRow] = []

    def add(self, row: BadRow) -> None:
        """Add one row; in mode `error`, raise at once after `ENOUGH` rows."""
        self.rows.append(row)
        if self.mode == "error" and len(self.rows) == ENOUGH:
            refuse(self.rows)

    def add_fault(self, file: Path, line: int, fault: "RowFault") -> None:
        """Add a file's row with this fault."""
        kind, value, rule = fault.args
        self.add(BadRow(str(file), line, value, rule, kind))

    def settle(self, folder: Path) -> None:
        """Raise, or write the rows, if any, to `rejected.csv` in the folder.

        Raises:
            ValueError: there are bad rows in mode `error`; it names the first ones.
        """
        refuse(self.rows, self.mode)
        if self.rows:
            rows = [(row.file, row.line, row.value, row.kind, row.rule) for row in self.rows]
            with (folder / REJECTED_FILE).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("file", "line", "value", "kind", "reason"), *rows])


def read_rejected(folder: Path) -> list[BadRow]:
    """Return the rows that `settle` wrote to a folder."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            BadRow(row["file"], int(row["line"]), row["value"], row["reason"], row["kind"])
            for row in csv.DictReader(file)
        ]


def accepted(folder: Path, mode: OnBadRows) -> Path:
    """Return a cache folder, which both modes share; in mode `error` raise ValueError if `settle`
    has written rejected rows there."""
    refuse(() if mode == "reject" else read_rejected(folder), mode)
    return folder


def hand_over_rejected(cache_folder: Path, run_folder: Path) -> None:
    """Report a cache folder's rejected rows, see `report_rejected`."""
    report_rejected(read_rejected(cache_folder), run_folder)


def report_rejected(rows: Sequence[BadRow], run_folder: Path) -> None:
    """Add rejected rows to those of the run folder, and log their number."""
    if rows:
        run_folder.mkdir(parents=True, exist_ok=True)
        both, target = BadRows("reject"), run_folder / REJECTED_FILE
        both.rows = [*dict.fromkeys([*read_rejected(run_folder), *rows])]  # of fit and predict
        both.settle(run_folder)
        log.warning("%d rows were rejected; they are listed with reasons in %s", len(rows), target)


class JsonRow(NamedTuple):
    """A row: file, line (jsonl) or row number (json, parquet) from 1, values by name."""

    file: Path
    line: int
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"


def read_json_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[JsonRow]:
    """Yield the rows of one file, skipping blank lines of jsonl.

    Args:
        path: jsonl, parquet, or json with a list of all rows.
        columns: the columns to read of a parquet file that has all of them; () reads all.

    Raises:
        ValueError: a line is not a JSON object or not UTF-8, or the parquet file is damaged.
    """
    if kind_of(path) in PARQUET_SUFFIXES:
        with open_parquet(path) as table:
            has_them = bool(columns) and set(columns) <= set(table.schema_arrow.names)
            names = list(columns) if has_them else None
            batches = table.iter_batches(ROWS_PER_BATCH, columns=names)
            rows = (values for batch in batches for values in batch.to_pylist())
            for row, values in enumerate(rows, start=1):
                yield JsonRow(path, row, values)
        return
    with opened(path) as file:
        if kind_of(path) == LIST_SUFFIX and file.peek(4096).lstrip(BLANK)[:1] == b"[":
            try:
                listed = json.loads(file.read().decode("utf-8-sig"))
            except (UnicodeDecodeError, json.JSONDecodeError) as error:
                raise ValueError(
                    f"{path} is no JSON list ({error}); write it again, in UTF-8."
                ) from error
            numbered: Iterable[tuple[int, Any]] = enumerate(listed, start=1)
        else:
            lines = ((line, text) for line, text in enumerate(file, start=1) if text.strip())
            numbered = ((line, _parsed(path, line, text)) for line, text in lines)
        for line, values in numbered:
            if not isinstance(values, dict):
                raise ValueError(
                    f"{path}:{line}: the row is a JSON {type(values).__name__}; every row must be "
                    'an object such as {"text": "…"}.'
                )
            yield JsonRow(path, line, values)


def kind_of(path: Path) -> str:
    """Return the suffix in lower case without a compression suffix: .csv of mine.csv.gz."""
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in (".gz", ".zst") else name).suffix


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Yield a binary reader of a file, decompressed if it is gzip or zstandard; ValueError if the
    file is damaged or ends too soon."""
    try:
        with path.open("rb") as file:
            first = file.peek()
            packing = next((p for mark, p in PACKINGS.items() if first.startswith(mark)), None)
            packed: Any = None if packing is None else pa.CompressedInputStream(file, packing)
            yield file if packed is None else io.BufferedReader(packed)
    except OSError as error:
        if error.errno is not None:  # an error of the storage
            raise
        raise ValueError(f"{path} is damaged ({error}); write or copy it again.") from error


class RowFault(Exception):
    """Fault of a row, with arguments kind, value and rule."""


def placed(place: str, make: Callable[[V], T], value: V) -> T:
    """Return `make(value)`; its RowFault or ValueError becomes a ValueError with the place."""
    try:
        return make(value)
    except (RowFault, ValueError) as error:
        raise ValueError(f"{place}: {error.args[-1]}") from error


def sound_rows(path: Path, make: Callable[[JsonRow], T], bad_rows: BadRows) -> Iterator[T]:
    """Yield `make(row)` for the rows of `read_json_rows`; rows for which it raises RowFault go to
    `bad_rows`."""
    for row in read_json_rows(path):
        try:
            yield make(row)
        except RowFault as fault:
            bad_rows.add_fault(row.file, row.line, fault)


def check_characters(text: str) -> None:
    r"""Raise RowFault for a text with a lone surrogate, such as \ud83d, which JSON can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        rule = (
            f'"{half}" is half of a surrogate pair, which no text in UTF-8 can hold; write the '
            "whole character."
        )
        raise RowFault("half character", half, rule) from error


@contextmanager
def open_parquet(path: Path) -> Iterator[pq.ParquetFile]:
    """Open a parquet file; ValueError if it is damaged."""
    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"{path} is damaged or no parquet file ({reason}); write or copy it again."
        ) from error


def _parsed(path: Path, line: int, content: bytes) -> Any:
    try:
        return json.loads(content.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}:{line}: the line is not UTF-8; every line of a jsonl file must be one JSON "
            "object, written in UTF-8."
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}:{line}: the line is no JSON ({error.msg}); every line must be one object. "
            f"`jq -c . {path}` prints objects of several lines in one each."
        ) from error
