"""Scored texts: rows of files as memory-mapped arrays, their split, and output files.

Shapes: N rows, D distinct texts, W numbers per row (labels of all heads).
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from datamodules.core.store import (
    ArrayFile,
    ArrayFolder,
    cache_folder,
    file_digest,
    made_once,
    text_hash,
    write_arrays,
)
from datamodules.files.rows import (
    JSON_SUFFIXES,
    MISSING,
    BadRows,
    OnBadRows,
    RowFault,
    accepted,
    check_characters,
    kind_of,
    refuse,
)
from datamodules.files.splitting import TRAIN, SplitOptions, split_by_stem, stem_key
from datamodules.files.tables import TableOptions, cell_text, value_rows, write_beside
from datamodules.text.prompts import read_rows, write_rows

Kind = Literal["regression", "ordinal", "binary", "multiclass", "multilabel"]
NO, YES = ("0", "false", "no"), ("1", "true", "yes")
MOST_LEVELS = 100
DIGITS = 6  # decimals of a prediction
STORE_VERSION = 7
LINES_AT_ONCE = 8192
REJECTED = -1
NUM_BINS = 5  # quantile bins that stratify a regression


@dataclass(frozen=True)
class LabelOptions:
    """Kind and column of a head's labels.

    Args:
        kind: `regression` for a number; `ordinal` for ordered levels; `binary` for 0/1, true/false
            or yes/no; `multiclass` for one of several names; `multilabel` for several names in one
            cell, cut by `separator`. (For one 0/1 column per label, use one binary head each.)
        column: name of the column; `None` is the name of the head.
        classes: names of the classes, for `ordinal` in order, for `binary` with the positive one
            last. `None` takes them from the data, for `ordinal` all whole numbers from the
            smallest to the largest.
        separator: text between the names in one cell of a `multilabel` head. A cell with only the
            separator is the empty set, an empty cell a missing label.

    Raises:
        ValueError: options that contradict each other.
    """

    kind: Kind
    column: str | None = None
    classes: list[str] | None = None
    separator: str | None = None

    def __post_init__(self) -> None:
        if (self.kind == "multilabel") != (self.separator is not None):
            raise ValueError(
                f"separator {self.separator!r} on a {self.kind} head: a multilabel head needs one, "
                "and no other has one."
            )
        if self.classes is None:
            if self.kind == "multilabel":
                raise ValueError("a multilabel head needs the names of its classes.")
        elif self.kind == "regression":
            raise ValueError(f"classes {self.classes} have no effect on a regression head.")
        elif len(set(self.classes)) != len(self.classes) or len(self.classes) < 2:
            raise ValueError(f"classes must be two or more different names, got {self.classes}.")
        elif self.kind == "binary" and len(self.classes) != 2:
            raise ValueError(f"a binary head has two classes, got {self.classes}.")


class LabelReader:
    """Parser of one head's cells; it collects the class names if they are not given."""

    def __init__(self, name: str, options: LabelOptions) -> None:
        self.name, self.options = name, options
        self.column = options.column or name
        self.width = len(options.classes or ()) if options.kind == "multilabel" else 1
        self.is_open = options.classes is None and options.kind in ("ordinal", "multiclass")
        self._ids = {c: float(i) for i, c in enumerate(options.classes or [])}
        are_whole = all(name.lstrip("-").isdecimal() for name in self._ids)
        self._are_numbers = options.kind == "ordinal" and are_whole
        if options.kind == "binary" and options.classes in (None, ["0", "1"]):  # as in a recipe
            self._ids = {**dict.fromkeys(NO, 0.0), **dict.fromkeys(YES, 1.0)}
            self._are_numbers = True

    def parse(self, cell: str) -> list[float]:
        """Return the numbers of one cell, NaN for a missing label.

        Raises:
            RowFault: the cell breaks a rule.
        """
        kind, cell = self.options.kind, cell.strip()
        if cell.lower() in MISSING and cell not in self._ids:
            return [math.nan] * self.width
        if kind == "multilabel":
            parts = [part.strip() for part in cell.split(self.options.separator) if part.strip()]
            ids = {int(self._class(part)) for part in parts}
            return [float(i in ids) for i in range(self.width)]
        if kind == "regression" or (kind == "ordinal" and self.is_open):
            value = _number(cell)
            if value is None or not math.isfinite(value):
                raise self._fault(cell, "must be a finite number such as 3.5, not 1,234 or 5%.")
            if kind == "ordinal" and not value.is_integer():
                raise self._fault(cell, "must be a whole number, or one of the option classes.")
            return [value]
        return [self._class(cell)]

    def finish(self, values: np.ndarray) -> tuple[np.ndarray, list[str] | None]:
        """Return the numbers of all rows with final class numbers, and the class names. In the
        values [N, width] float64 of `parse`, classes are numbered by first occurrence.

        Raises:
            ValueError: fewer than two classes, or too many levels.
        """
        kind = self.options.kind
        if kind == "regression":
            return values, None
        if not self.is_open:
            return values, list(self.options.classes or ["0", "1"])
        known = np.unique(values[~np.isnan(values)])
        if len(known) < 2:
            raise ValueError(
                f'head "{self.name}": its column holds {len(known)} different labels; it needs two '
                "or more, or the names of its classes in the option classes."
            )
        if kind == "multiclass":
            names = sorted(self._ids)
            new = {self._ids[name]: float(place) for place, name in enumerate(names)}
            return np.array([[new.get(v, v) for v in row] for row in values.tolist()]), names
        low, high = int(known[0]), int(known[-1])
        if high - low >= MOST_LEVELS:
            raise ValueError(
                f'head "{self.name}": levels from {low} to {high} are more than {MOST_LEVELS}; '
                "make it a regression, or name its classes."
            )
        return values - low, [str(level) for level in range(low, high + 1)]

    def _class(self, cell: str) -> float:
        key = cell
        if cell not in self._ids and self._are_numbers:  # 1.0 is 1, and True is true
            value = _number(cell)
            key = cell.lower() if value is None or value % 1 else str(int(value))
        if self.is_open:
            return self._ids.setdefault(key, float(len(self._ids)))
        if key not in self._ids:
            raise self._fault(cell, f"must be one of {', '.join(self._ids)}; or leave it empty.")
        return self._ids[key]

    def _fault(self, cell: str, rule: str) -> RowFault:
        return RowFault("label", cell, f'head "{self.name}": {rule}')


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def trained_heads(
    trained: dict[str, dict[str, Any]], options: dict[str, LabelOptions] | None
) -> dict[str, LabelOptions]:
    """Return a model's heads; `options` may change their columns and separators."""
    heads = {}
    for name, facts in trained.items():
        own = (options or {}).get(name)
        column = facts["column"] if own is None else own.column or name
        separator = (own and own.separator) or facts["separator"]
        heads[name] = LabelOptions(facts["kind"], column, facts["classes"], separator)
    return heads


def scores_of(name: str, facts: dict[str, Any], values: np.ndarray) -> dict[str, list[Any]]:
    """Return the output columns of one head, with its `facts` from the recipe, for values [n, P] of
    `predict_step`: number, level or class, and its probability."""
    kind, classes = facts["kind"], facts["classes"]
    rounded = np.round(values.astype(np.float64), DIGITS)
    if kind == "regression":
        digits = DIGITS + max(0, int(-math.log10(facts["std"])))  # more for a small spread
        return {f"predicted_{name}": np.round(values[:, 0].astype(np.float64), digits).tolist()}
    if kind == "binary":
        return {f"probability_{name}": rounded[:, 0].tolist()}
    if kind == "multilabel":
        columns = zip(classes, rounded.T, strict=True)
        return {f"probability_{name}_{label}": column.tolist() for label, column in columns}
    if kind == "multiclass":
        return {
            f"predicted_{name}": [classes[i] for i in values.argmax(1)],
            f"probability_{name}": rounded.max(1).tolist(),
        }
    # Levels that are successive whole numbers keep their scale; named levels count from 0.
    lowest = int(classes[0]) if classes[0].lstrip("-").isdigit() else 0
    if classes != [str(lowest + i) for i in range(len(classes))]:
        lowest = 0
    expected = (values.astype(np.float64) * np.arange(len(classes))).sum(1)
    return {
        f"predicted_{name}": [classes[i] for i in np.floor(expected + 0.5).astype(int)],
        f"expected_{name}": np.round(expected + lowest, DIGITS).tolist(),
    }


@dataclass(frozen=True)
class TextColumns:
    """Names of the columns, except those of the labels.

    Args:
        text: column of the text; several, such as title and body, are joined by line breaks.
        group: column of groups, such as sites; the split keeps a group in one part. Without a
            column or with an empty cell, texts with the same words form a group.
    """

    text: str | list[str] = "text"
    group: str | None = None


@dataclass(frozen=True)
class ScoredRequest:
    """All inputs that determine a store."""

    files: Mapping[int, Sequence[Path]]  # files of each part: train, validation, test
    columns: TextColumns
    heads: dict[str, LabelOptions]  # name -> labels; empty for texts to predict
    table: TableOptions = TableOptions()  # noqa: RUF009 - frozen

    def paths(self) -> list[tuple[int, Path]]:
        """Return part and path of each file."""
        return [(part, path) for part, paths in self.files.items() for path in paths]

    def folder(self) -> Path:
        """Return the store's cache folder; reads all files to hash them."""
        facts = {
            "version": STORE_VERSION,
            "files": [[n, str(p), file_digest(p)] for n, p in self.paths()],
            "columns": asdict(self.columns),
            "heads": [[name, asdict(head)] for name, head in self.heads.items()],
            "table": asdict(self.table),
        }
        return cache_folder("scored_texts", facts)


class ScoredStore(ArrayFolder):
    """Rows of files as arrays.

    Attributes:
        text_of_row: [N] int64, distinct text of each row; -1 = rejected.
        file_part: [N] int8, part of the row's file.
        labels: [N, W] float64, NaN = missing.
        keys: [N] uint64 hash of the row's group.
        num_bytes: [D] int64, length of each distinct text in UTF-8.
        heads: name -> facts of a head's labels, with its classes, in the order of `labels`.
        columns: name -> the head's columns in `labels`.
        files: path -> number of valid rows, in reading order.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.heads: dict[str, dict[str, Any]] = self.facts["heads"]
        self.files: dict[str, int] = self.facts["files"]
        self.text_of_row, self.file_part = self.arrays["text_of_row"], self.arrays["file_part"]
        self.labels, self.keys = self.arrays["labels"], self.arrays["keys"]
        self._texts, self._offsets = self.arrays["texts"], self.arrays["offsets"]
        self.num_bytes = np.diff(self._offsets)
        self.columns: dict[str, slice] = {}
        start = 0
        for name, head in self.heads.items():
            width = len(head["classes"]) if head["kind"] == "multilabel" else 1
            self.columns[name] = slice(start, start + width)
            start += width

    def text(self, number: int) -> str:
        """Return one distinct text."""
        start, end = self._offsets[number : number + 2]
        return self._texts[start:end].tobytes().decode()


def open_store(request: ScoredRequest, on_bad_rows: OnBadRows = "error") -> ScoredStore:
    """Return the store of these files, made at first use.

    Raises:
        ValueError: rows break a rule, or no row is valid.
    """
    make = partial(_write, request, BadRows(on_bad_rows))
    return ScoredStore(accepted(made_once(request.folder(), make), on_bad_rows))


def _rows(
    path: Path, request: ScoredRequest, heads: Sequence[LabelReader], bad_rows: BadRows
) -> Iterator[tuple[str, str, list[float]] | None]:
    """Yield text, group and labels of each row of a file, `None` for one that breaks a rule.

    Raises:
        ValueError: the file lacks a column, or is damaged.
    """
    texts, group = request.columns.text, request.columns.group if heads else None
    names = [texts] if isinstance(texts, str) else list(texts)
    separators: dict[str, str | None] = dict.fromkeys([*names, *([group] if group else ())])
    separators |= {head.column: head.options.separator for head in heads}
    for line, values in value_rows(path, list(separators), bad_rows.add, request.table):
        try:
            cells = {name: _cell_text(values.get(name), mark) for name, mark in separators.items()}
            text = "\n".join(cells[name] for name in names if cells[name].strip())
            check_characters(text)
            if not text:
                rule = f"the column {' or '.join(names)} holds no text; fill it or drop the row."
                raise RowFault("label", "", rule)
            of_group = cells[group].strip() if group else ""
            yield text, of_group, [value for h in heads for value in h.parse(cells[h.column])]
        except RowFault as fault:
            bad_rows.add_fault(path, line, fault)
            yield None


def _cell_text(value: Any, separator: str | None) -> str:
    """Return a JSON value as a table cell; a list is joined by `separator`."""
    if not isinstance(value, list):
        return cell_text(value)
    if separator is None:
        rule = "a list must be joined: name a separator for this head."
        raise RowFault("label", str(value), rule)
    return separator.join(map(str, value)) or separator


def _write(request: ScoredRequest, bad_rows: BadRows, folder: Path) -> None:
    heads = [LabelReader(name, options) for name, options in request.heads.items()]
    width = sum(head.width for head in heads)
    text_of, part_of, labels, keys = array("q"), array("b"), array("d"), array("Q")
    offsets, number_of, content = array("q", [0]), dict[bytes, int](), hashlib.sha256()
    files = dict.fromkeys((str(path) for _, path in request.paths()), 0)
    with ArrayFile(folder / "texts.npy", np.uint8) as texts:
        for part, path in request.paths():
            for row in _rows(path, request, heads, bad_rows):
                part_of.append(part)
                if row is None:
                    text_of.append(REJECTED)
                    keys.append(0)
                    labels.extend([np.nan] * width)
                    continue
                text, group, numbers = row
                encoded = text.encode()
                digest = hashlib.blake2b(encoded, digest_size=16).digest()
                number = number_of.setdefault(digest, len(number_of))
                if number == len(offsets) - 1:
                    texts.add(np.frombuffer(encoded, np.uint8))
                    offsets.append(offsets[-1] + len(encoded))
                text_of.append(number)
                keys.append(text_hash(group or stem_key(text)))
                labels.extend(numbers)
                content.update(digest)
                files[str(path)] += 1
    bad_rows.settle(folder)
    if not number_of:
        refuse(bad_rows.rows)
        raise ValueError(f"{', '.join(files)}: no row can be used.")
    values = np.array(labels, np.float64).reshape(len(part_of), width)
    facts, ends = {}, np.cumsum([head.width for head in heads], dtype=int)
    for head, own in zip(heads, np.split(values, ends, axis=1), strict=False):
        own[:], classes = head.finish(own)  # final class numbers
        facts[head.name] = {**asdict(head.options), "column": head.column, "classes": classes}
    content.update(values.tobytes() + part_of.tobytes() + keys.tobytes())
    arrays: dict[str, Any] = {
        "text_of_row": text_of,
        "file_part": part_of,
        "labels": values,
        "keys": keys,
        "offsets": offsets,
    }
    fingerprint = content.hexdigest()[:32]
    write_arrays(folder, arrays, fingerprint=fingerprint, heads=facts, files=files)


def divided(store: ScoredStore, split: SplitOptions) -> np.ndarray:
    """Return the part of each row, [N] int8: 0 train, 1 validation, 2 test; -1 = rejected.

    Rows of validation and test files keep their part. A part without a file is drawn from the
    training files, stratified by the first head's labels, with groups kept whole.
    """
    parts = np.where(store.text_of_row < 0, -1, store.file_part).astype(np.int8)
    rows = np.flatnonzero(parts == TRAIN)
    split = split.without(np.unique(store.file_part).tolist())
    if rows.size and split.validation_share + split.test_share > 0:
        name, facts = next(iter(store.heads.items()))
        labels = store.labels[rows][:, store.columns[name]]
        keys = [f"{key:016x}" for key in store.keys[rows].tolist()]
        parts[rows] = split_by_stem(keys, strata_of(labels, facts["kind"] == "regression"), split)
    return parts


def strata_of(values: np.ndarray, is_number: bool) -> list[str]:
    """Return the stratum of each row by a head's labels [N, width] float64: its classes, or one of
    `NUM_BINS` quantile bins of a number; missing labels (NaN) are a stratum of their own."""
    if is_number:
        known = values[~np.isnan(values)]
        edges = np.quantile(known, np.arange(1, NUM_BINS) / NUM_BINS) if known.size else []
        bins = np.searchsorted(edges, values, side="right").astype(np.float64)
        values = np.where(np.isnan(values), np.nan, bins)
    return [" ".join("-" if np.isnan(v) else f"{v:g}" for v in row) for row in values]


def write_with(
    store: ScoredStore,
    added: Callable[[np.ndarray], dict[str, pa.Array]],
    path: Path,
    options: TableOptions,
    texts: Iterable[str],
) -> None:
    """Write all rows with added columns: tables as `write_beside` does, and jsonl. `added` returns
    the columns for the texts [n] of some rows, -1 = a rejected row."""
    files, text_of_row = list(map(Path, store.files)), store.text_of_row
    if kind_of(path) in JSON_SUFFIXES:
        starts = range(0, len(text_of_row), LINES_AT_ONCE)
        tables = (pa.table(added(text_of_row[n : n + LINES_AT_ONCE])) for n in starts)
        rows = (row for table in tables for row in table.to_pylist())
        write_rows(read_rows(files), rows, path)
        return
    number = len(text_of_row)
    write_beside(files, options, path, number, lambda rows: added(text_of_row[rows]), texts)


def write_scored(
    store: ScoredStore,
    heads: dict[str, Any],
    results: dict[str, np.ndarray],
    path: Path,
    options: TableOptions = TableOptions(),  # noqa: B008 - frozen
) -> None:
    """Write all rows with scores, as `write_with`. `heads` are name -> facts of a recipe, `results`
    name -> [D, P] numbers of the scorer's `predict_step`."""

    def added(texts: np.ndarray) -> dict[str, pa.Array]:
        columns: dict[str, pa.Array] = {}
        for name, facts in heads.items():
            scores = scores_of(name, facts, results[name][np.maximum(texts, 0)])
            for column, values in scores.items():
                columns[column] = pa.array(values, mask=texts < 0)
        return columns

    classes = [str(name) for facts in heads.values() for name in facts.get("classes") or ()]
    write_with(store, added, path, options, classes)
