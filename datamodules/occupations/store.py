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
        path: csv, tsv or parquet with the columns code and description; none takes the codes of
            the data.
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
        options.pop("max_length")
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
        root = cache_root()
        named = {PART_NAMES[part]: [[str(p), file_digest(p, root)] for p in paths]
                 for part, paths in self.files.items()}  # fmt: skip
        if self.book.path:
            check_file(Path(self.book.path), "data.code_book")
        book = file_digest(Path(self.book.path), root) if self.book.path else None
        parts = {
            "version": STORE_VERSION,
            "files": named,
            "columns": asdict(self.columns),
            "system": self.system.to_dict(),
            "book": [asdict(self.book), book],
            "split": asdict(self.split),
            "text": asdict(self.text),
            "on_bad_rows": self.on_bad_rows,
            "table": asdict(self.table),
            "recipe": None if self.recipe is None else encoding_digest(self.recipe),
        }
        return root / "occupations" / digest_of(parts)


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

    def code_points(self, row: int) -> np.ndarray:
        """[S] uint32: the text of a row."""
        return self.texts(np.array([row]))[0]

    def code_ids(self, row: int) -> np.ndarray:
        """[1 …] int32: the codes of a row."""
        return self.code_sets(np.array([row]))[0]

    def texts(self, rows: np.ndarray) -> list[np.ndarray]:
        """[S] uint32 for each of these rows: its text."""
        return _parts(self.arrays, "code_points", "text_offsets", self.arrays["text_id"][rows])

    def code_sets(self, rows: np.ndarray) -> list[np.ndarray]:
        """[1 …] int32 for each of these rows: its codes."""
        return _parts(self.arrays, "code_ids", "code_offsets", rows)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """[rows] int64: characters of each row's text."""
        return np.diff(self.arrays["text_offsets"])[self.arrays["text_id"][rows]]


def _parts(
    arrays: dict[str, np.ndarray], values: str, offsets: str, places: np.ndarray
) -> list[np.ndarray]:
    """Return what lies from one offset to the next, at each of these places."""
    ends = arrays[offsets]
    pairs = zip(ends[places].tolist(), ends[places + 1].tolist(), strict=True)
    return [arrays[values][start:end] for start, end in pairs]


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
    return OccupationStore(made_once(folder, lambda target: _Writer(request).write(target)))


class _Writer:
    """Reads the tables of a request and writes its arrays."""

    def __init__(self, request: StoreRequest) -> None:
        self.request = request
        self.text_ids: dict[str, int] = {}
        self.language_ids: dict[str, int] = {}
        self.code_ids: dict[str, int] = {}
        self.row_text, self.row_language = array("i"), array("i")
        self.row_code, self.row_num_codes, self.row_part = array("i"), array("i"), array("b")

    def write(self, folder: Path) -> None:
        """Fills the folder; raises ValueError where rows break a rule."""
        request, recipe = self.request, self.request.recipe
        normalisation, max_length = request.text.normalisation, request.text.max_length
        book = None
        if recipe is not None:
            normalisation = TextNormalisation(**recipe["normalisation"])
            max_length, book = recipe["max_length"], CodeBook.from_dict(recipe["code_book"])
        elif request.book.path is not None:
            book = build_code_book(request.system, Path(request.book.path), ())
        system, bad_rows = (
            request.system if book is None else book.system,
            BadRows(request.on_bad_rows),
        )
        rules = RowRules(request.columns, normalisation, system, bad_rows, book, request.table)
        for part, paths in request.files.items():
            for path in paths:
                for job in rules.jobs(path, part == TRAIN and request.columns.split is not None):
                    self._take(job, part)
        if not self.row_text and not bad_rows.count:
            raise ValueError("the tables hold no row; give them at least one.")
        bad_rows.settle(folder)
        parts = self._parts()
        if system.max_codes is None:  # as many codes per record as a row has
            state = {**system.to_dict(), "max_codes": max(self.row_num_codes)}
            system = CodeSystem(**state)
            book = book and CodeBook(system, book.codes, book.descriptions)
        book = book or build_code_book(system, None, self.code_ids)
        languages = self._languages(parts) if recipe is None else recipe["languages"]
        seen = self._seen(parts)
        self._add_descriptions(book, normalisation)

        num_new = len(self.row_text) - len(parts)  # descriptions are training rows themselves
        parts = np.concatenate([parts, np.full(num_new, TRAIN, dtype=np.int8)])
        seen_text, seen_code = (np.concatenate([rows, np.ones(num_new, bool)]) for rows in seen)
        index = {name: i for i, name in enumerate(languages)}  # 0, unknown, where training had none
        language_id = np.array([index.get(name, 0) for name in self.language_ids], np.int16)
        code_id = np.array([book.index(code) for code in self.code_ids], np.int32)
        arrays = {
            **text_arrays(self.text_ids, max_length),
            "text_id": np.array(self.row_text, np.int32),
            "language_id": language_id[np.array(self.row_language)],
            "code_ids": code_id[np.array(self.row_code)],
            "code_offsets": np.cumsum([0, *self.row_num_codes], dtype=np.int64),
            "part": parts,
            "is_seen_text": seen_text,
            "is_seen_code": seen_code,
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
            "default_language": request.columns.default_language,
            "code_book": book.to_dict(),
        }
        facts = {"recipe": made, "fingerprint": content.hexdigest()[:32]}
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    def _take(self, job: Job, part: int) -> None:
        self.row_text.append(self.text_ids.setdefault(job.text, len(self.text_ids)))
        language = self.language_ids.setdefault(job.language, len(self.language_ids))
        self.row_language.append(language)
        for code in job.codes:
            self.row_code.append(self.code_ids.setdefault(code, len(self.code_ids)))
        self.row_num_codes.append(len(job.codes))
        self.row_part.append(part if job.part is None else job.part)

    def _parts(self) -> np.ndarray:
        """[N] int8; training rows are divided where the parts have no rows of their own."""
        parts = np.array(self.row_part, dtype=np.int8)
        files, split = self.request.files, self.request.split
        if self.request.columns.split is None and not files.get(VALIDATION) and files.get(TRAIN):
            if files.get(TEST):
                split = replace(split, test_share=0.0)
            train = np.flatnonzero(parts == TRAIN)
            if split.validation_share + split.test_share and len(train):
                texts, codes = list(self.text_ids), list(self.code_ids)
                first = np.cumsum([0, *self.row_num_codes])[train]
                parts[train] = split_by_stem(
                    [texts[self.row_text[i]] for i in train],
                    [codes[self.row_code[i]] for i in first],
                    split,
                )
        if files.get(TRAIN) and not (parts == TRAIN).any():
            raise ValueError(
                "no row is left for training; lower data.split.validation_share and test_share, "
                "or check the split column."
            )
        return parts

    def _seen(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[N] bool twice: text, and every code, occur in a training row (descriptions apart)."""
        text_id, code, num_codes = map(np.array, (self.row_text, self.row_code, self.row_num_codes))
        row_of_code = np.repeat(np.arange(len(text_id)), num_codes)
        is_seen_code = np.isin(code, code[parts[row_of_code] == TRAIN])
        num_seen = np.bincount(row_of_code, is_seen_code, minlength=len(text_id))
        return np.isin(text_id, text_id[parts == TRAIN]), num_seen == num_codes

    def _languages(self, parts: np.ndarray) -> list[str]:
        names = list(self.language_ids)
        used = {names[i] for i in np.unique(np.array(self.row_language)[parts == TRAIN])}
        used.add(self.request.columns.default_language)
        if self.request.book.descriptions_as_examples:
            used.add(language_code(self.request.book.description_language))
        return [UNKNOWN, *sorted(used - {UNKNOWN})]

    def _add_descriptions(self, book: CodeBook, normalisation: TextNormalisation) -> None:
        options = self.request.book
        if options.descriptions_as_examples and self.request.files.get(TRAIN):
            language = language_code(options.description_language)
            for code, description in zip(book.codes, book.descriptions, strict=True):
                text = normalisation(description)
                if text and code not in book.system.specials:
                    self._take(Job(0, text, language, (code,), None), TRAIN)
