"""Tables of job descriptions are tokenised once, into the arrays of `occupation_store`.

Shapes: T distinct texts, P their characters, N rows, K all codes of all rows.
"""

import hashlib
import json
import platform
from array import array
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.bad_rows import BadRows
from datamodules.cache import made_once
from datamodules.languages import UNKNOWN, language_code
from datamodules.occupation_request import StoreRequest
from datamodules.occupation_rows import Job, RowRules
from datamodules.occupation_store import ARRAYS, OccupationStore
from datamodules.splitting import (
    TEST,
    TRAIN,
    VALIDATION,
    keyed_hashes,
    split_by_stem,
    split_digest,
)
from datamodules.tokenizers.characters import TextNormalisation, encode
from datamodules.tokenizers.codes import CodeBook, build_code_book

RECIPE_VERSION = 1


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
        )
        self._read(rules)
        rules.bad_rows.settle(folder)
        parts = self._parts()
        if book is None:
            book = build_code_book(request.system, None, self.code_ids)
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
            "versions": _versions(),
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


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "numpy": np.__version__}
    for name in ("unisono", "torch", "lightning", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"  # a checkout that runs in place
    return found
