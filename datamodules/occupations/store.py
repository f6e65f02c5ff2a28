"""Tables of job descriptions, tokenised once into memory-mapped arrays.

Shapes: T distinct texts, P their characters, N rows, K all codes of all rows.
"""

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from datamodules.core.store import cache_root, digest_of, file_digest, made_once
from datamodules.files.rows import BadRows
from datamodules.files.splitting import (
    PART_NAMES,
    TEST,
    TRAIN,
    VALIDATION,
    SplitOptions,
    keyed_hashes,
    split_by_stem,
    split_digest,
)
from datamodules.files.tables import TableOptions, check_file
from datamodules.occupations.rows import UNKNOWN, Columns, Job, RowRules, language_code
from datamodules.tokenizers.characters import TextNormalisation, encode
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
        self.arrays = {name: _open(folder / f"{name}.npy") for name in ARRAYS}

    def __reduce__(self) -> tuple[Any, ...]:
        return OccupationStore, (self.folder,)

    def rows(self, part: int) -> np.ndarray:
        """[rows] int64: the rows of one part, in input order."""
        return np.flatnonzero(self.arrays["part"] == part)

    def code_points(self, row: int) -> np.ndarray:
        """[S] uint32: the text of a row."""
        text = self.arrays["text_id"][row]
        offsets = self.arrays["text_offsets"]
        return self.arrays["code_points"][offsets[text] : offsets[text + 1]]

    def code_ids(self, row: int) -> np.ndarray:
        """[1 …] int32: the codes of a row."""
        offsets = self.arrays["code_offsets"]
        return self.arrays["code_ids"][offsets[row] : offsets[row + 1]]

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


def _open(path: Path) -> np.ndarray:
    mapped = np.load(path, mmap_mode="r")
    # Seen as a plain array, of which a slice takes a tenth of the time; an empty file has no map.
    return np.asarray(mapped) if mapped.size else np.array(mapped)


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
        normalisation = request.text.normalisation
        if recipe is not None:
            normalisation = TextNormalisation.from_dict(recipe["normalisation"])
        book = self._book_before_reading()
        rules = RowRules(
            request.columns,
            normalisation,
            request.system if book is None else book.system,
            BadRows(request.on_bad_rows),
            book,
            request.table,
        )
        self._read(rules)
        rules.bad_rows.settle(folder)
        parts = self._parts()
        if book is None:
            book = build_code_book(self._settled(request.system), None, self.code_ids)
        elif book.system.max_codes is None:
            book = CodeBook(self._settled(book.system), book.codes, book.descriptions)
        seen = self._seen(parts)
        languages = self._languages(parts)
        parts = self._add_descriptions(book, normalisation, parts)
        max_length = request.text.max_length if recipe is None else recipe["max_length"]
        arrays = self._arrays(parts, seen, languages, book, max_length)
        for name in ARRAYS:
            np.save(folder / f"{name}.npy", arrays[name])
        made = recipe or self._recipe(normalisation, languages, book, arrays)
        facts = {"recipe": made, "fingerprint": _fingerprint(arrays)}
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")

    def _book_before_reading(self) -> CodeBook | None:
        if self.request.recipe is not None:
            return CodeBook.from_dict(self.request.recipe["code_book"])
        if self.request.book.path is None:
            return None
        return build_code_book(self.request.system, Path(self.request.book.path), ())

    def _settled(self, system: CodeSystem) -> CodeSystem:
        """The code system with as many codes per record as a row has, where it names no number."""
        most = system.max_codes or max(self.row_num_codes)
        return CodeSystem.from_dict({**system.to_dict(), "max_codes": most})

    def _read(self, rules: RowRules) -> None:
        for part, paths in self.request.files.items():
            with_split = part == TRAIN and self.request.columns.split is not None
            for path in paths:
                for job in rules.jobs(path, with_split):
                    self._take(job, part)
        if not self.row_text and not rules.bad_rows.count:
            raise ValueError("the tables hold no row; give them at least one.")

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
        shares = split.validation_share + split.test_share
        if self.request.columns.split is None and not files.get(VALIDATION) and files.get(TRAIN):
            if files.get(TEST):
                split = replace(split, test_share=0.0)
            train = np.flatnonzero(parts == TRAIN)
            if shares and len(train):
                texts, codes = list(self.text_ids), list(self.code_ids)
                first = np.cumsum([0, *self.row_num_codes])[train]
                drawn = split_by_stem(
                    [texts[self.row_text[i]] for i in train],
                    [codes[self.row_code[i]] for i in first],
                    split,
                )
                parts[train] = drawn.parts
        if files.get(TRAIN) and not (parts == TRAIN).any():
            raise ValueError(
                "no row is left for training; lower data.split.validation_share and test_share, "
                "or check the split column."
            )
        return parts

    def _seen(self, parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[N] bool twice: text, and every code, occur in a training row (descriptions apart)."""
        text_id, num_codes = np.array(self.row_text), np.array(self.row_num_codes)
        code = np.array(self.row_code)
        row_of_code = np.repeat(np.arange(len(text_id)), num_codes)
        train_text = np.zeros(len(self.text_ids), dtype=bool)
        train_text[text_id[parts == TRAIN]] = True
        train_code = np.zeros(len(self.code_ids), dtype=bool)
        train_code[code[parts[row_of_code] == TRAIN]] = True
        num_seen = np.bincount(row_of_code, train_code[code], minlength=len(text_id))
        return train_text[text_id], num_seen == num_codes

    def _languages(self, parts: np.ndarray) -> list[str]:
        if self.request.recipe is not None:
            return list(self.request.recipe["languages"])
        names = list(self.language_ids)
        used = {names[i] for i in np.unique(np.array(self.row_language)[parts == TRAIN])}
        used.add(self.request.columns.default_language)
        if self.request.book.descriptions_as_examples:
            used.add(language_code(self.request.book.description_language))
        return [UNKNOWN, *sorted(used - {UNKNOWN})]

    def _add_descriptions(
        self, book: CodeBook, normalisation: TextNormalisation, parts: np.ndarray
    ) -> np.ndarray:
        options = self.request.book
        if not options.descriptions_as_examples or not self.request.files.get(TRAIN):
            return parts
        language = language_code(options.description_language)
        for code, description in zip(book.codes, book.descriptions, strict=True):
            text = normalisation(description)
            if text and code not in book.system.specials:
                self._take(Job(0, text, language, (code,), None), TRAIN)
        num_new = len(self.row_text) - len(parts)
        return np.concatenate([parts, np.full(num_new, TRAIN, dtype=np.int8)])

    def _arrays(
        self,
        parts: np.ndarray,
        seen: tuple[np.ndarray, np.ndarray],
        languages: Sequence[str],
        book: CodeBook,
        max_length: int,
    ) -> dict[str, np.ndarray]:
        encoded = [encode(text, max_length) for text in self.text_ids]
        language_id = np.array([_index(languages, name) for name in self.language_ids], np.int16)
        code_id = np.array([book.index(code) for code in self.code_ids], np.int32)
        num_new = len(parts) - len(seen[0])
        as_seen = np.ones(num_new, dtype=bool)  # descriptions are training rows themselves
        return {
            "code_points": np.concatenate([e.code_points for e in encoded]).astype(np.uint32),
            "text_offsets": np.cumsum([0, *(len(e.code_points) for e in encoded)], dtype=np.int64),
            "is_truncated": np.array([e.is_truncated for e in encoded]),
            "text_id": np.array(self.row_text, np.int32),
            "language_id": language_id[np.array(self.row_language)],
            "code_ids": code_id[np.array(self.row_code)],
            "code_offsets": np.cumsum([0, *self.row_num_codes], dtype=np.int64),
            "part": parts,
            "is_seen_text": np.concatenate([seen[0], as_seen]),
            "is_seen_code": np.concatenate([seen[1], as_seen]),
        }

    def _recipe(
        self,
        normalisation: TextNormalisation,
        languages: list[str],
        book: CodeBook,
        arrays: dict[str, np.ndarray],
    ) -> dict[str, Any]:
        texts = list(self.text_ids)
        parts, text_id = arrays["part"], arrays["text_id"]
        train_texts = np.unique(text_id[parts == TRAIN])
        alphabet = sorted({letter for i in train_texts for letter in texts[i]})
        hashes = keyed_hashes(texts, 0)[text_id]
        return {
            "version": RECIPE_VERSION,
            "normalisation": normalisation.to_dict(),
            "max_length": self.request.text.max_length,
            "languages": languages,
            "default_language": self.request.columns.default_language,
            "code_book": book.to_dict(),
            "alphabet": "".join(alphabet),
            "split_digest": split_digest(hashes, parts),
        }


def _index(languages: Sequence[str], name: str) -> int:
    """The index of a language; 0, unknown, for one that training did not have."""
    return languages.index(name) if name in languages else 0


def _fingerprint(arrays: dict[str, np.ndarray]) -> str:
    content = hashlib.sha256()
    for name in ARRAYS:
        content.update(f"{name} {arrays[name].dtype.str} {len(arrays[name])};".encode())
        content.update(np.ascontiguousarray(arrays[name]).data)
    return content.hexdigest()[:32]
