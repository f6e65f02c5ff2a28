"""Tables of job descriptions, tokenised once into memory-mapped arrays.

Shapes: T distinct texts, P their characters, N rows, K all codes of all rows.
"""

import hashlib
import json
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once, mapped_array
from datamodules.files.rows import BadRows
from datamodules.files.splitting import (
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    SplitOptions,
    split_by_stem,
)
from datamodules.files.tables import TableOptions, check_file
from datamodules.occupations.rows import UNKNOWN, Columns, Job, RowRules, language_code
from datamodules.tokenizers.characters import TextNormalisation
from datamodules.tokenizers.codes import CodeBook, CodeSystem, build_code_book

STORE_VERSION = 1
RECIPE_VERSION = 1
# What of a recipe decides how a row is encoded; thresholds and the like do not.
ENCODING_KEYS = ("version", "normalisation", "max_length", "languages", "code_book")
ARRAYS = (
    "code_points",  # [P] uint32, the texts one behind the other
    "text_offsets",  # [T + 1] int64
    "is_truncated",  # [T] bool
    "text_id",  # [N] int32
    "language_id",  # [N] int16, index in the recipe's languages
    "code_ids",  # [K] int32
    "code_offsets",  # [N + 1] int64
    "part",  # [N] int8: train, validation, test
    "is_seen_text",  # [N] bool: the text occurs in a training row
    "is_seen_code",  # [N] bool: every code of the row occurs in a training row
)


@dataclass(frozen=True)
class CodeBookOptions:
    """The list of legal codes.

    Args:
        path: table with the columns code and description; `None` takes the codes of the data.
        descriptions_as_examples: each description is one more training example of its code.
        description_language: of the descriptions.
    """

    path: str | None = None
    descriptions_as_examples: bool = False
    description_language: str = "en"

    def __post_init__(self) -> None:
        language_code(self.description_language)


@dataclass(frozen=True)
class TextOptions(TextNormalisation):
    """What is done to texts, equally in training and prediction: `TextNormalisation`, then the cut.

    Args:
        max_length: characters that are kept of a text, at least 1.
    """

    max_length: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_length < 1:
            raise ValueError(f"text.max_length must be at least 1, got {self.max_length}.")

    @property
    def normalisation(self) -> TextNormalisation:
        """The normalisation alone, as a checkpoint keeps it."""
        options = asdict(self)
        del options["max_length"]
        return TextNormalisation(**options)


@dataclass
class StoreRequest:
    """All that the arrays depend on.

    Args:
        files: per part (train, validation, test) the tables with codes.
        columns: which column holds what.
        system: how codes are written.
        book: the legal codes.
        split: how training rows are divided where parts have no files.
        text: normalisation and length.
        on_bad_rows: error or reject.
        table: how the tables are written.
        recipe: that of a checkpoint, which then decides the encoding; none makes a new one.
    """

    files: dict[int, list[Path]]
    columns: Columns
    system: CodeSystem
    book: CodeBookOptions = CodeBookOptions()
    split: SplitOptions = field(default_factory=SplitOptions)
    text: TextOptions = TextOptions()
    on_bad_rows: Literal["error", "reject"] = "error"
    recipe: dict[str, Any] | None = None
    table: TableOptions = field(default_factory=TableOptions)

    def folder(self) -> Path:
        """The cache folder of these arrays; reads the files' digests."""
        book = None
        if self.book.path:
            check_file(Path(self.book.path), "data.code_book")
            book = file_digest(Path(self.book.path))
        files = {
            PART_NAMES[part]: [[str(path), file_digest(path)] for path in paths]
            for part, paths in self.files.items()
        }
        parts = {
            "version": STORE_VERSION,
            "files": files,
            "columns": asdict(self.columns),
            "system": self.system.to_dict(),
            "book": [asdict(self.book), book],
            "split": asdict(self.split),
            "text": asdict(self.text),
            "on_bad_rows": self.on_bad_rows,
            "table": asdict(self.table),
            "recipe": None if self.recipe is None else encoding_digest(self.recipe),
        }
        return cache_root() / "occupations" / digest_of(parts)


def encoding_digest(recipe: dict[str, Any]) -> str:
    """Hex digest of what decides how a row is encoded."""
    return digest_of({key: recipe[key] for key in ENCODING_KEYS})


class OccupationStore:
    """The arrays of one cache folder, memory-mapped; pickled as the name of the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.recipe: dict[str, Any] = facts["recipe"]
        self.fingerprint: str = facts["fingerprint"]
        self.arrays = {name: mapped_array(folder / f"{name}.npy") for name in ARRAYS}

    def __reduce__(self) -> tuple[Any, ...]:
        return OccupationStore, (self.folder,)

    def rows(self, part: int) -> np.ndarray:
        """[rows] int64: the rows of one part, in input order."""
        return np.flatnonzero(self.arrays["part"] == part)

    def texts(self, rows: np.ndarray) -> list[np.ndarray]:
        """[S] uint32 for each of these rows: its text."""
        return self._parts("code_points", "text_offsets", self.arrays["text_id"][rows])

    def code_sets(self, rows: np.ndarray) -> list[np.ndarray]:
        """[1 …] int32 for each of these rows: its codes."""
        return self._parts("code_ids", "code_offsets", rows)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """[rows] int64: characters of each row's text."""
        return np.diff(self.arrays["text_offsets"])[self.arrays["text_id"][rows]]

    def _parts(self, values: str, offsets: str, places: np.ndarray) -> list[np.ndarray]:
        ends = self.arrays[offsets]
        pairs = zip(ends[places].tolist(), ends[places + 1].tolist(), strict=True)
        return [self.arrays[values][start:end] for start, end in pairs]


def text_arrays(texts: Iterable[str], max_length: int) -> dict[str, np.ndarray]:
    """The code points of cut texts one behind the other, their offsets, and which were longer."""
    kept, is_truncated = [], []
    for text in texts:
        kept.append(text[:max_length])
        is_truncated.append(len(text) > max_length)
    return {
        "code_points": np.frombuffer("".join(kept).encode("utf-32-le"), "<u4"),
        "text_offsets": np.cumsum([0, *map(len, kept)], dtype=np.int64),
        "is_truncated": np.array(is_truncated, dtype=bool),
    }


def open_store(request: StoreRequest) -> OccupationStore:
    """The arrays of this request, made where the cache lacks them.

    Raises:
        ValueError: rows break a rule; the first 20 are named.
    """
    folder = request.folder()
    return OccupationStore(made_once(folder, lambda target: _write(request, target)))


class _Rows:
    """Rows as numbers of their distinct texts, languages and codes."""

    def __init__(self) -> None:
        self.text_ids: dict[str, int] = {}
        self.language_ids: dict[str, int] = {}
        self.code_ids: dict[str, int] = {}
        self.text, self.language, self.part = array("i"), array("i"), array("b")
        self.code, self.num_codes = array("i"), array("i")

    def add(self, job: Job, part: int) -> None:
        self.text.append(self.text_ids.setdefault(job.text, len(self.text_ids)))
        self.language.append(self.language_ids.setdefault(job.language, len(self.language_ids)))
        for code in job.codes:
            self.code.append(self.code_ids.setdefault(code, len(self.code_ids)))
        self.num_codes.append(len(job.codes))
        self.part.append(part if job.part is None else job.part)


def _write(request: StoreRequest, folder: Path) -> None:
    """Reads the tables of a request and writes its arrays; ValueError where rows break a rule."""
    recipe, options, book = request.recipe, request.book, None
    normalisation, max_length = request.text.normalisation, request.text.max_length
    if recipe is not None:
        normalisation = TextNormalisation(**recipe["normalisation"])
        max_length, book = recipe["max_length"], CodeBook.from_dict(recipe["code_book"])
    elif options.path is not None:
        book = build_code_book(request.system, Path(options.path), ())
    system = request.system if book is None else book.system
    rows, bad_rows, columns = _Rows(), BadRows(request.on_bad_rows), request.columns
    rules = RowRules(columns, normalisation, system, bad_rows, book, request.table)
    for part, paths in request.files.items():
        for path in paths:
            for job in rules.jobs(path, part == TRAIN and columns.split is not None):
                rows.add(job, part)
    if not rows.text and not bad_rows.count:
        raise ValueError("the tables hold no row; give them at least one.")
    bad_rows.settle(folder)
    parts = _parts(request, rows)
    is_train = parts == TRAIN
    if system.max_codes is None:  # as many codes per record as a row has
        system = CodeSystem(**{**system.to_dict(), "max_codes": max(rows.num_codes)})
        book = book and CodeBook(system, book.codes, book.descriptions)
    book = book or build_code_book(system, None, rows.code_ids)
    languages = [] if recipe is None else recipe["languages"]
    if recipe is None:
        named = list(rows.language_ids)
        used = {named[i] for i in np.unique(np.array(rows.language)[is_train])}
        used.add(columns.default_language)
        if options.descriptions_as_examples:
            used.add(language_code(options.description_language))
        languages = [UNKNOWN, *sorted(used - {UNKNOWN})]

    # Text, and every code, occur in a training row; descriptions apart.
    text_id, num_codes = np.array(rows.text), np.array(rows.num_codes)
    row_of_code = np.repeat(np.arange(len(text_id)), num_codes)
    code = np.array(rows.code)
    seen_codes = np.isin(code, code[is_train[row_of_code]])
    num_seen = np.bincount(row_of_code, seen_codes, minlength=len(text_id))
    seen = {"text": np.isin(text_id, text_id[is_train]), "code": num_seen == num_codes}
    if options.descriptions_as_examples and request.files.get(TRAIN):
        language = language_code(options.description_language)
        for name, description in zip(book.codes, book.descriptions, strict=True):
            text = normalisation(description)
            if text and name not in book.system.specials:
                rows.add(Job(0, text, language, (name,), None), TRAIN)
    num_new = len(rows.text) - len(parts)  # descriptions are training rows themselves
    index = {name: i for i, name in enumerate(languages)}  # 0, unknown, where training had none
    language_id = np.array([index.get(name, 0) for name in rows.language_ids], np.int16)
    code_id = np.array([book.index(name) for name in rows.code_ids], np.int32)
    arrays = {
        **text_arrays(rows.text_ids, max_length),
        "text_id": np.array(rows.text, np.int32),
        "language_id": language_id[np.array(rows.language)],
        "code_ids": code_id[np.array(rows.code)],
        "code_offsets": np.cumsum([0, *rows.num_codes], dtype=np.int64),
        "part": np.concatenate([parts, np.full(num_new, TRAIN, dtype=np.int8)]),
        "is_seen_text": np.concatenate([seen["text"], np.ones(num_new, bool)]),
        "is_seen_code": np.concatenate([seen["code"], np.ones(num_new, bool)]),
    }
    content = hashlib.sha256()
    for name in ARRAYS:
        np.save(folder / f"{name}.npy", arrays[name])
        content.update(f"{name} {arrays[name].dtype.str} {len(arrays[name])};".encode())
        content.update(np.ascontiguousarray(arrays[name]).data)
    made = recipe or {
        "version": RECIPE_VERSION,
        "normalisation": normalisation.to_dict(),
        "max_length": max_length,
        "languages": languages,
        "default_language": columns.default_language,
        "code_book": book.to_dict(),
    }
    facts = {"recipe": made, "fingerprint": content.hexdigest()[:32]}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _parts(request: StoreRequest, rows: _Rows) -> np.ndarray:
    """[N] int8; training rows are divided where the parts have no rows of their own."""
    parts = np.array(rows.part, dtype=np.int8)
    files, split, train = request.files, request.split, np.flatnonzero(parts == TRAIN)
    if request.columns.split is None and not files.get(VALIDATION) and len(train):
        if files.get(TEST):
            split = replace(split, test_share=0.0)
        if split.validation_share + split.test_share:
            texts, codes = list(rows.text_ids), list(rows.code_ids)
            first = np.cumsum([0, *rows.num_codes])[train]
            parts[train] = split_by_stem(
                [texts[rows.text[i]] for i in train], [codes[rows.code[i]] for i in first], split
            )
    if files.get(TRAIN) and not (parts == TRAIN).any():
        raise ValueError(
            "no row is left for training; lower data.split.validation_share and test_share, "
            "or check the split column."
        )
    return parts
