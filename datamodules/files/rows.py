"""Rows of nested values (jsonl, json, parquet) with their places, and rows that break a rule."""

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

NUM_NAMED = 5  # faults in an error
ENOUGH = 10_000  # rows: a wrong column makes all of them bad
MOST_SHOWN = 60  # characters of a value
REJECTED_FILE = "rejected.csv"
MISSING = ("", "na", "n/a", "#n/a", "nan", "null", "none")  # cells without a value, in lower case
OnBadRows = Literal["error", "reject"]
T = TypeVar("T")
V = TypeVar("V")
log = logging.getLogger(__name__)
PARQUET_SUFFIXES = (".parquet", ".pq")
JSON_SUFFIXES = (".jsonl", ".ndjson")
JSON_OUTPUT = (*JSON_SUFFIXES, *(f"{suffix}.gz" for suffix in JSON_SUFFIXES))
LIST_SUFFIX = ".json"  # one list of all rows, as ShareGPT and Alpaca came
SUFFIXES = (*JSON_SUFFIXES, LIST_SUFFIX, *PARQUET_SUFFIXES)
PACKINGS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # first bytes -> Arrow's name
ROWS_PER_BATCH = 1024
BLANK = b"\xef\xbb\xbf \t\r\n"  # a byte order mark and spaces


class BadRow(NamedTuple):
    """One row that breaks a rule: its place, the value, the rule with the way out."""

    file: str
    line: int
    value: str
    rule: str
    kind: str = "columns"

    def __str__(self) -> str:
        """File, line, value and rule; a long value loses its end."""
        value = self.value if len(self.value) <= MOST_SHOWN else self.value[:MOST_SHOWN] + "…"
        is_in_rule = self.value and f'"{self.value}"' in self.rule
        return f"{self.file}:{self.line}: " + ("" if is_in_rule else f'"{value}": ') + self.rule


def first_of_each(rows: Sequence[BadRow], most: int) -> list[str]:
    """Returns the first row of each file and rule with the number of those like it, up to `most`
    of them, and how many others there are."""
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
    """Raises a ValueError with the first of these rows, if there are some and they are an error."""
    if mode not in ("error", "reject"):
        raise ValueError(f'on_bad_rows must be "error" or "reject", got "{mode}".')
    if rows and mode == "error":
        more = " or more" if len(rows) >= ENOUGH else ""
        noun = "1 row breaks" if len(rows) == 1 else f"{len(rows):,}{more} rows break"
        first = "\n".join(first_of_each(rows, NUM_NAMED))
        raise ValueError(
            f"{noun} the rules of the data:\n{first}\n--data.on_bad_rows=reject writes them to "
            f"{REJECTED_FILE} and goes on without; `unisono check` explains each."
        )


class BadRows:
    """Takes the bad rows of tables.

    Args:
        mode: `error` raises in `settle`, `reject` keeps them, and writes them down there.
    """

    def __init__(self, mode: OnBadRows) -> None:
        self.mode = mode
        self.rows: list[BadRow] = []

    def add(self, row: BadRow) -> None:
        """Takes one row; where they are an error, enough of them end the reading."""
        self.rows.append(row)
        if self.mode == "error" and len(self.rows) == ENOUGH:
            refuse(self.rows)

    def add_fault(self, file: Path, line: int, fault: "RowFault") -> None:
        """Takes the row of a file that has this fault."""
        kind, value, rule = fault.args
        self.add(BadRow(str(file), line, value, rule, kind))

    def settle(self, folder: Path) -> None:
        """Raises, or writes `rejected.csv` into the folder where there is something to write.

        Raises:
            ValueError: there are bad rows and the mode is `error`; the first are named.
        """
        refuse(self.rows, self.mode)
        if self.rows:
            rows = [(row.file, row.line, row.value, row.kind, row.rule) for row in self.rows]
            with (folder / REJECTED_FILE).open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([("file", "line", "value", "kind", "reason"), *rows])


def read_rejected(folder: Path) -> list[BadRow]:
    """Returns the rows that `settle` wrote into a folder."""
    path = folder / REJECTED_FILE
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [
            BadRow(row["file"], int(row["line"]), row["value"], row["reason"], row["kind"])
            for row in csv.DictReader(file)
        ]


def accepted(folder: Path, mode: OnBadRows) -> Path:
    """Returns a folder of the cache, which both modes share; a ValueError names the first of the
    rows that `settle` wrote into it, where they are an error."""
    refuse(() if mode == "reject" else read_rejected(folder), mode)
    return folder


def hand_over_rejected(cache_folder: Path, run_folder: Path) -> None:
    """Adds the rejected rows of a cache to those of the run folder, and says how many there are."""
    if rows := read_rejected(cache_folder):
        run_folder.mkdir(parents=True, exist_ok=True)
        both, target = BadRows("reject"), run_folder / REJECTED_FILE
        both.rows = [*dict.fromkeys([*read_rejected(run_folder), *rows])]  # of a fit, a prediction
        both.settle(run_folder)
        log.warning("%d rows were rejected; they are listed with reasons in %s", len(rows), target)


class JsonRow(NamedTuple):
    """One row: the file, its line (jsonl) or row (json, parquet) from 1, its values by name."""

    file: Path
    line: int
    values: dict[str, Any]

    @property
    def place(self) -> str:
        """File and line, for messages."""
        return f"{self.file}:{self.line}"


def read_json_rows(path: Path, columns: Sequence[str] = ()) -> Iterator[JsonRow]:
    """Yield the rows of one file; blank lines of jsonl are passed over.

    Args:
        path: jsonl, parquet, or json with a list of all rows.
        columns: enough of a parquet file, if it has them; () is all.

    Raises:
        ValueError: a line is no JSON object or not UTF-8, or the parquet file is damaged.
    """
    if kind_of(path) in PARQUET_SUFFIXES:
        with open_parquet(path) as table:
            has_them = bool(columns) and set(columns) <= set(table.schema_arrow.names)
            wanted = list(columns) if has_them else None
            batches = table.iter_batches(ROWS_PER_BATCH, columns=wanted)
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
    """Return the suffix in lower case, without that of a packing: .csv of mine.csv.gz."""
    name = Path(path.name.lower())
    return Path(name.stem if name.suffix in (".gz", ".zst") else name).suffix


@contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
    """Give the bytes of a file, of gzip or zstandard those it packed; ValueError where it is
    damaged or ends too soon."""
    try:
        with path.open("rb") as file:
            first = file.peek()
            packing = next((p for mark, p in PACKINGS.items() if first.startswith(mark)), None)
            packed: Any = None if packing is None else pa.CompressedInputStream(file, packing)
            yield file if packed is None else io.BufferedReader(packed)
    except OSError as error:
        if error.errno is not None:  # of the storage
            raise
        raise ValueError(f"{path} is damaged ({error}); write or copy it again.") from error


class RowFault(Exception):
    """kind, value and rule of a bad row."""


def placed(place: str, make: Callable[[V], T], value: V) -> T:
    """Return what `make` makes of a value; what it refuses is a ValueError with the place."""
    try:
        return make(value)
    except (RowFault, ValueError) as error:
        raise ValueError(f"{place}: {error.args[-1]}") from error


def sound_rows(path: Path, make: Callable[[JsonRow], T], bad_rows: BadRows) -> Iterator[T]:
    """Yield what `make` returns for the rows of `read_json_rows`; those for which it raises
    `RowFault` go to `bad_rows`."""
    for row in read_json_rows(path):
        try:
            yield make(row)
        except RowFault as fault:
            bad_rows.add_fault(row.file, row.line, fault)


def check_characters(text: str) -> None:
    r"""Raise RowFault for a text with a lone surrogate, such as \ud83d, which JSON can name."""
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
    """Open a parquet file; ValueError where it is damaged."""
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
