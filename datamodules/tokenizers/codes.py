"""Normalised texts as code points, code systems, and code books.

Shapes: S characters, C codes, L symbols per block (the longest code), V symbols.
"""

import difflib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.batches import PADDING_ID
from datamodules.core.plan import check_range
from datamodules.files.splitting import APOSTROPHES, STATUS_WORDS, fold_accents
from datamodules.files.tables import Table, check_file

CONTROL_SYMBOLS = ("<pad>", "<begin>", "<end>", "<empty>")
END_ID = CONTROL_SYMBOLS.index("<end>")
DIGITS = "0123456789"
MOST_CODES = 5  # codes of one record; the loss tries all their orders
LOST_ZEROS = (
    'code "{}" seems to have lost its leading zeros ("{}"); read and save code columns as text.'
)
_AROUND = ".,;:()[]"
_NO_APOSTROPHES = dict.fromkeys(map(ord, APOSTROPHES))
_STATUS = frozenset(word for words in STATUS_WORDS.values() for word in words)
_FOLDED_STATUS = frozenset(map(fold_accents, _STATUS))


@dataclass(frozen=True)
class TextOptions:
    """Normalisation and length limit of texts, the same in training and prediction.

    Texts are lowercased, as case carries no meaning in most records. Ligatures, full-width letters
    and the like become plain letters (NFKC). Every run of white space, line breaks included,
    becomes one blank, and the ends are stripped.

    Args:
        drop_status_words: drop words such as "deceased" that say nothing about the work, with the
            punctuation around them; a text of such words only is not changed.
        fold_accents: remove accents, with æ as ae and ø as o, as in texts transliterated to ASCII.
        max_length: maximum number of characters per text, at least 1; longer texts lose their end.
    """

    drop_status_words: bool = False
    fold_accents: bool = False
    max_length: int = 128

    def __post_init__(self) -> None:
        check_range("text", 1, max_length=self.max_length)

    def __call__(self, text: str) -> str:
        """Return the normalised text; normalising it again changes nothing."""
        text, before = text.replace("\0", " "), None  # 0 is padding
        # Lowercasing can undo NFKC (İ becomes two characters) and NFKC can make capitals (™ becomes
        # TM), so both are repeated until nothing changes.
        while text != before:
            before, text = text, unicodedata.normalize("NFKC", text).lower()
        if self.fold_accents:
            text = fold_accents(text)
        if self.drop_status_words:
            words, status = text.split(), _FOLDED_STATUS if self.fold_accents else _STATUS
            stems = [word.strip(_AROUND).lower().translate(_NO_APOSTROPHES) for word in words]
            rest = [word for word, stem in zip(words, stems, strict=True) if stem not in status]
            if len(rest) < len(words):
                text = " ".join(rest).strip(" ,;:-") or text
        return " ".join(text.split())

    def to_recipe(self) -> dict[str, Any]:
        """Return the options as plain JSON types for a recipe; newer ones only if they are set, so
        that recipes of earlier checkpoints stay equal."""
        kept = {"lowercase": True, "drop_status_words": self.drop_status_words}
        kept |= {"fold_accents": True} if self.fold_accents else {}
        return {"normalisation": kept, "max_length": self.max_length}

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> "TextOptions":
        """Return the options of `to_recipe`; ValueError for options of earlier checkpoints that are
        gone."""
        kept = recipe["normalisation"]
        if gone := [name for name in ("lowercase", "strip") if not kept.get(name, True)]:
            raise ValueError(
                f"the model was trained on texts with {gone[0]}: false, an option that is gone: "
                "it would silently misread texts. Train it again."
            )
        folds = kept.get("fold_accents", False)
        return cls(kept["drop_status_words"], folds, recipe["max_length"])


def encode(text: str, max_length: int) -> np.ndarray:
    """Return the first `max_length` code points of a normalised text, [S] int32, never 0."""
    return np.frombuffer(text[:max_length].encode("utf-32-le"), dtype="<i4").astype(np.int32)


def decode(code_points: np.ndarray) -> str:
    """Return the text of these code points, without padding."""
    return code_points[code_points != PADDING_ID].astype("<u4").tobytes().decode("utf-32-le")


class CodeSystem:
    """The rules for valid codes; `parse` checks a code and returns its normal form.

    Args:
        length: number of characters of every ordinary code; `None` allows any.
        alphabet: characters that a code may contain; `None` allows any.
        specials: codes exempt from the rules, each a single symbol, such as -1 for "no title", with
            the description to use if the code book has none.
        max_codes: maximum number of codes per record, 1 to 5; `None` is the largest of any row.
        symbol_separator: text between the symbols of a code, such as "," in 1,14,0; `None` makes
            every character a symbol.
    """

    def __init__(
        self,
        length: int | None = None,
        alphabet: str | None = None,
        specials: dict[str, str] | None = None,
        max_codes: int | None = None,
        symbol_separator: str | None = None,
    ) -> None:
        check_range("code_system", 1, length=length)
        check_range("code_system", 1, MOST_CODES, max_codes=max_codes)
        self.length, self.alphabet = length, alphabet
        self.specials, self.max_codes = specials or {}, max_codes
        self.symbol_separator = symbol_separator

    @property
    def is_open(self) -> bool:
        """Whether codes may have any length and are not cut by a separator."""
        return self.length is None and self.symbol_separator is None

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments of `CodeSystem` as plain JSON types; a separator only if it is set,
        so that recipes of earlier checkpoints stay equal."""
        return {n: v for n, v in vars(self).items() if n != "symbol_separator" or v}

    def split(self, code: str) -> list[str]:
        """Return the symbols of a code in normal form; a special code is one symbol."""
        if code in self.specials:
            return [code]
        return code.split(self.symbol_separator) if self.symbol_separator else list(code)

    def parse(self, raw: str) -> str:
        """Return the code in normal form, which is the code without outer spaces.

        Raises:
            ValueError: the code breaks a rule; the message names it and suggests the right code.
        """
        code = raw.strip()
        if code in self.specials:
            return code
        if not code:
            raise ValueError("the code is empty; leave the row out or give it a code.")
        if re.fullmatch(r"#(REF!|VALUE!|DIV/0!|NUM!|NULL!|NAME\?)", code):
            raise ValueError(f'code "{code}" is an error of Excel; mend its formula, or empty it.')
        decimal = re.fullmatch(r"(-?\d+)\.0*", code)
        has_rules = self.alphabet is not None or self.length is not None
        if decimal and has_rules and "." not in (self.alphabet or ""):
            number = decimal[1]
            right = number if number in self.specials else number.zfill(self.length or 0)
            raise ValueError(
                f'code "{code}" was written as a decimal number; keep code columns as text '
                f'(here "{right}").'
            )
        for place, symbol in enumerate(code if self.alphabet else "", start=1):
            if symbol not in str(self.alphabet):
                specials = f" or one of {', '.join(self.specials)}" if self.specials else ""
                raise ValueError(
                    f'code "{code}" holds the unknown symbol "{symbol}" at place {place}; '
                    f'a code is made of "{self.alphabet}"{specials}.'
                )
        if self.length is not None and len(code) != self.length:
            if len(code) < self.length and re.fullmatch(r"\d+", code):
                raise ValueError(LOST_ZEROS.format(code, code.zfill(self.length)))
            raise ValueError(f'code "{code}" has {len(code)} symbols, and must have {self.length}.')
        return code


# HISCO codes have five digits, besides -1, -2 and -3; those of the census of 1950 have three.
SYSTEMS: dict[str, dict[str, Any]] = {
    "hisco": {
        "length": 5,
        "alphabet": DIGITS,
        "specials": {
            "-1": "Missing, no title",
            "-2": "Source explicitly states that the person does not work",
            "-3": "Non work related title",
        },
        "max_codes": 5,
    },
    "occ1950": {"length": 3, "alphabet": DIGITS, "max_codes": 2},
    "from_data": {},
}


def named_code_system(system: str | CodeSystem) -> CodeSystem:
    """Return the code system with this name (hisco, occ1950, from_data), or a given CodeSystem."""
    if isinstance(system, CodeSystem):
        return system
    if system not in SYSTEMS:
        near = difflib.get_close_matches(system, SYSTEMS, n=1)
        hint = f' Did you mean "{near[0]}"?' if near else ""
        raise ValueError(
            f'code_system "{system}" is not one of {", ".join(SYSTEMS)}.{hint} Any other '
            "system is a class: {class_path: datamodules.CodeSystem, init_args: …}."
        )
    return CodeSystem(**SYSTEMS[system])


class CodeBook:
    """The valid codes with their descriptions and symbol ids.

    Args:
        codes: C distinct codes in normal form; their order determines the code ids.
        descriptions: one text per code, possibly empty.
        symbols: the V symbols, control symbols first; `None` takes the codes' symbols, sorted.

    `table` [C, L] int64 holds the symbol ids of each code, padded with <end>; `block_size` is L.
    """

    def __init__(
        self,
        system: CodeSystem,
        codes: Sequence[str],
        descriptions: Sequence[str],
        symbols: Sequence[str] | None = None,
    ) -> None:
        self.system = system
        self.codes = list(codes)
        self.descriptions = list(descriptions)
        self.max_codes = system.max_codes or 1
        spelled = [system.split(code) for code in self.codes]
        if symbols is None:
            distinct = {symbol for row in spelled for symbol in row}
            # Numbers sort by value, before other symbols.
            order = {s: (not s.isdecimal(), int(s) if s.isdecimal() else 0, s) for s in distinct}
            symbols = [*CONTROL_SYMBOLS, *sorted(distinct, key=order.__getitem__)]
        self.symbols = list(symbols)
        self._symbol_id = {symbol: i for i, symbol in enumerate(self.symbols)}
        self._code_id = {code: i for i, code in enumerate(self.codes)}
        self.block_size = max(len(row) for row in spelled)
        self.table = np.full((len(spelled), self.block_size), END_ID, dtype=np.int64)
        for i, row in enumerate(spelled):
            self.table[i, : len(row)] = [self._symbol_id[symbol] for symbol in row]

    def __len__(self) -> int:
        return len(self.codes)

    def __contains__(self, code: str) -> bool:
        return code in self._code_id

    def index(self, code: str) -> int:
        """Return the id of a code in normal form.

        Raises:
            ValueError: the book lacks the code; the message lists the nearest codes.
        """
        code_id = self._code_id.get(code)
        if code_id is not None:
            return code_id
        fills = (code.zfill(n) for n in range(len(code) + 1, self.block_size + 1))
        zeros = next((fill for fill in fills if code.isdigit() and fill in self), None)
        if zeros is not None:
            raise ValueError(LOST_ZEROS.format(code, zeros))
        if code.isdigit() and code.lstrip("0") in self:
            raise ValueError("in the code book, " + LOST_ZEROS.format(code.lstrip("0"), code))
        near = ", ".join(f"{c} ({d})" if d else c for c, d in self.nearest(code))
        raise ValueError(
            f'code "{code}" is not in the code book ({len(self)} codes); nearest: {near}. '
            "Correct the row or add the code to the book."
        )

    def nearest(self, code: str, count: int = 5) -> list[tuple[str, str]]:
        """Return the codes with the fewest different symbols; early differences count more."""
        row = [self._symbol_id.get(s, -1) for s in self.system.split(code)][: self.block_size]
        row += [END_ID] * (self.block_size - len(row))
        places = 1 + np.arange(self.block_size, 0, -1) / (self.block_size + 1) ** 2
        distance = (self.table != np.array(row)) @ places
        best = np.argsort(distance, kind="stable")[:count]
        return [(self.codes[i], self.descriptions[i]) for i in best]

    def to_dict(self) -> dict[str, Any]:
        """Return the book as plain JSON types; `from_dict` restores it with equal ids."""
        return {
            "system": self.system.to_dict(),
            "codes": self.codes,
            "descriptions": self.descriptions,
            "symbols": self.symbols,
        }

    @classmethod
    def from_dict(cls, state: dict[str, Any]) -> "CodeBook":
        """Return the book of `to_dict`."""
        return cls(**{**state, "system": CodeSystem(**state["system"])})


def build_code_book(
    system: CodeSystem, book_path: Path | None, codes_in_data: Iterable[str]
) -> CodeBook:
    """Return the book of valid codes: those of a file, else those in the data, and all specials.

    Args:
        book_path: csv, tsv or parquet with the columns `code` and `description`, or `None`.
        codes_in_data: codes in normal form, used only without a file; with one, a row with a code
            that the file lacks is a bad row.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: file or data have no codes, or a line of the file is invalid.
    """
    descriptions: dict[str, str] = {}
    if book_path is not None:
        check_file(book_path, "data.code_book")
        errors: list[str] = []
        for line, row in Table(book_path).rows(("code", "description")):
            try:
                code, text = system.parse(row["code"]), row["description"].strip()
                if (first := descriptions.setdefault(code, text)) != text:
                    raise ValueError(
                        f'code "{code}" has two descriptions, "{first}" and "{text}"; keep one.'
                    )
            except ValueError as error:
                errors.append(f"{book_path}:{line}: {error}")
        if errors:
            head = f"{len(errors)} wrong lines in the code book; correct or remove them:"
            raise ValueError("\n".join([head, *errors]))
    else:
        descriptions = dict.fromkeys(sorted(set(codes_in_data)), "")
        if not descriptions:
            raise ValueError("the data hold no code; name the code columns or give a code book.")
        refuse_decimals(descriptions)
    for special, description in system.specials.items():
        descriptions[special] = descriptions.get(special) or description
    return CodeBook(system, list(descriptions), list(descriptions.values()))


def refuse_decimals(codes: Iterable[str]) -> None:
    """Raise ValueError if a spreadsheet has turned codes into decimal numbers, such as 51020 into
    51020.0 in a column with empty cells. If any code has other digits after the point, the points
    belong to the codes."""
    decimal = sorted(code for code in codes if re.fullmatch(r"-?\d+\.\d+", code))
    if decimal and all(code.rstrip("0").endswith(".") for code in decimal):
        raise ValueError(
            f'{len(decimal)} codes of the data are decimal numbers (such as "{decimal[0]}"); read '
            "and save the code columns as text."
        )


def code_warnings(codes: Iterable[str]) -> list[str]:
    """Return warnings of codes that a spreadsheet may have changed or that should be cut, for open
    code systems, in which `CodeSystem.parse` cannot tell."""
    known, warnings = sorted(set(codes)), []
    if cut := lost_zero_suspects(known):
        warnings.append(
            f"{len(cut)} codes may have lost a leading zero: {', '.join(cut[:10])}; read and save "
            "code columns as text."
        )
    if marks := [code for code in known if not any(map(str.isalnum, code))]:
        warnings.append(
            f"{len(marks)} codes have no letter or digit: {', '.join(marks[:10])}; empty such "
            "cells if they mean that there is no code."
        )
    for mark in ",;|/+ ":
        parts = {code: {part.strip() for part in code.split(mark)} for code in known}
        if joined := [code for code in known if mark in code and parts[code] <= {*known}]:
            warnings.append(
                f'{len(joined)} codes look like several in one, such as "{joined[0]}"; cut such '
                f"cells with --data.columns.code_separator='{mark}'."
            )
    return warnings


def lost_zero_suspects(codes: Iterable[str]) -> list[str]:
    """Return the codes, sorted, that may have lost zeros; for systems without a fixed length.

    These are numbers that with zeros in front are other codes; else all shorter numbers, if they
    lack a single digit, are fewer than half, and no number begins with 0."""
    digits = {code for code in codes if code.isdecimal()}
    longest = max((len(code) for code in digits), default=0)
    shorter = sorted(code for code in digits if len(code) < longest)
    if cut := [code for code in shorter if code.zfill(longest) in digits]:
        return cut
    has_zero_first = any(code.startswith("0") for code in digits if len(code) == longest)
    if has_zero_first or any(len(code) < longest - 1 or code[0] == "0" for code in shorter):
        return []
    return shorter if len(shorter) < len(digits) / 2 else []
