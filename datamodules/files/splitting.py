"""Splits into training, validation and test parts that keep variants of a text together."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, Self

import numpy as np

from datamodules.core.plan import check_range, hash_ids
from datamodules.files.rows import RowFault

# Words by language, for English with the abbreviations of registers.
_STATUS_WORDS = """
en deceased retired reserve late former dead formerly pensioned dec decd dcsd deceasd retd retrd;
da afdød pensioneret fhv død forhenværende reserve afskediget;
no avdød pensjonert fhv død forhenværende reserve;
sv avliden pensionerad fd död avlidne förre förra reserv;
nl overleden gepensioneerd gewezen wijlen voormalig voormalige rustend;
de verstorben pensioniert ehemaliger weiland gewesener ehemalige ehem verstorbener verstorbene
gewesen pensionierter emeritiert reserve;
fr décédé retraité ancien feu défunt ancienne décédée défunte retraitée réserve;
es difunto jubilado fallecido difunta jubilada fallecida retirado;
pt falecido reformado falecida reformada aposentado;
it defunto pensionato defunta pensionata fu;
ca difunt jubilat difunta;
fi entinen kuollut vainaja
"""
STATUS_WORDS: dict[str, tuple[str, ...]] = {
    language: tuple(words) for language, *words in map(str.split, _STATUS_WORDS.split(";"))
}
TRAIN, VALIDATION, TEST = range(3)
PART_NAMES = ("train", "validation", "test")
PART_ALIASES = {
    **{"train": TRAIN, "training": TRAIN},
    **{"validation": VALIDATION, "valid": VALIDATION, "val": VALIDATION, "dev": VALIDATION},
    "test": TEST,
}
MAX_SHARE = 0.9
_LETTERS = str.maketrans({"æ": "ae", "ø": "o", "œ": "oe", "ß": "ss", "ł": "l", "đ": "d", "ð": "d"})
_ACCENTS = re.compile("[\u0300-\u036f]")
APOSTROPHES = "'`\u00b4\u2018\u2019"
_PUNCTUATION = {
    **{i: " " for i in range(0x3100) if unicodedata.category(chr(i))[0] in "PSZC"},
    **dict.fromkeys(map(ord, APOSTROPHES), None),
}


@dataclass(frozen=True)
class Split:
    """How training data are divided if validation or test has no data of its own.

    Args:
        validation_share: share of the training queries (or other units) for validation, 0 to 0.9.
        test_share: share for the test; both together at most 0.9.
        seed: another seed draws another split.
    """

    validation_share: float = 0.1
    test_share: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        shares = {"validation_share": self.validation_share, "test_share": self.test_share}
        check_range("split", 0, MAX_SHARE, **shares)
        if (held := sum(shares.values())) > MAX_SHARE:
            raise ValueError(
                f"validation_share + test_share must be at most {MAX_SHARE}, got {held:g}: too "
                "little is left for training."
            )

    def without(self, parts: Iterable[int]) -> Self:
        """Return the split without shares for these parts, which have data of their own."""
        held = set(parts)
        return replace(
            self,
            validation_share=0.0 if VALIDATION in held else self.validation_share,
            test_share=0.0 if TEST in held else self.test_share,
        )

    def beside(self, files: Mapping[int, Sequence[Path]]) -> Self | None:
        """Return the split of the training files, given the files of all parts; `None` if
        validation has files or both shares are 0. Test files set the test share to 0."""
        if files.get(VALIDATION):
            return None
        split = self.without(part for part in files if files[part])
        return split if split.validation_share or split.test_share else None

    def by_lot(self, keys: Iterable[str]) -> np.ndarray:
        """Return the part [N] of each string, which depends only on seed and string."""
        lots = keyed_hashes(keys, self.seed) / 2.0**64
        held = np.where(lots < self.test_share + self.validation_share, VALIDATION, TRAIN)
        return np.where(lots < self.test_share, TEST, held)


@dataclass(frozen=True)
class SplitOptions(Split):
    """How training rows are divided into parts; variants of a text stay together.

    Args:
        validation_share: share of the distinct texts for validation, 0 to 0.9.
        test_share: share for the test; both together at most 0.9.
        seed: another seed draws another split.
    """

    test_share: float = 0.1


@dataclass(frozen=True)
class TextSplit(Split):
    """How training files of texts are divided if there are no validation files.

    Args:
        validation_share: share of the documents or characters for validation, 0 to 0.9.
        test_share: share for the test, if it has no files; both together at most 0.9.
        seed: another seed draws other documents.
        by: `documents` draws whole documents by a hash of their text, equal ones together; `tail`
            takes the last characters of every document, for validation and then for the test.
    """

    by: Literal["documents", "tail"] = "documents"

    def drawn(self, parts: np.ndarray, hashes: np.ndarray) -> np.ndarray:
        """Return the part [N] int8 of each text. Of the distinct training texts, those with the
        lowest keyed hashes are held out; a share above 0 gives at least one text if possible.

        Args:
            parts: [N] int8, the part of each text's file.
            hashes: [N] uint64, equal for equal texts.
        """
        in_training, parts = parts == TRAIN, parts.copy()
        distinct = np.unique(hashes[in_training])
        distinct = distinct[np.argsort(hash_ids(distinct, self.seed), kind="stable")]
        shares = (self.test_share, self.validation_share)
        num_test, num_validation = (max(round(s * len(distinct)), s > 0) for s in shares)
        num_held = max(0, min(num_test + num_validation, len(distinct) - 1))
        num_test = max(0, num_held - num_validation)
        parts[in_training & np.isin(hashes, distinct[:num_held])] = VALIDATION
        parts[in_training & np.isin(hashes, distinct[:num_test])] = TEST
        return parts

    def tails(self, size: int) -> list[tuple[int, int, int]]:
        """Return (part, start, stop) of each part's characters in a training text."""
        held = self.validation_share + self.test_share
        ends = [0, int(size * (1 - held)), int(size * (1 - self.test_share)), size]
        return [(part, a, b) for part, (a, b) in enumerate(pairwise(ends)) if a < b]


def split_by_stem(texts: Sequence[str], codes: Sequence[str], options: SplitOptions) -> np.ndarray:
    """Return the part of each row, [N] int8: 0 train, 1 validation, 2 test; texts with the same
    `stem_key` share a part.

    The shares hold within each code; a key with several codes counts for the first in sorting
    order. Counts are rounded up or down by a hash of the code, so that shares hold on average over
    rare codes; a code with two or more keys keeps one in training.

    Args:
        texts: [N] descriptions, which may repeat.
        codes: [N] one code or code set per row.
    """
    group_of_key: dict[str, int] = {}
    group_of_text: dict[str, int] = {}
    code_of_group: dict[int, str] = {}
    for text, code in zip(texts, codes, strict=True):
        if text not in group_of_text:
            group_of_text[text] = group_of_key.setdefault(stem_key(text), len(group_of_key))
        group = group_of_text[text]
        code_of_group[group] = min(code, code_of_group.get(group, code))
    strata = {code: i for i, code in enumerate(dict.fromkeys(code_of_group.values()))}
    stratum = np.array([strata[code_of_group[i]] for i in range(len(group_of_key))], np.int64)

    lots = keyed_hashes(strata, options.seed) / 2.0**64
    sizes = np.bincount(stratum, minlength=len(strata))
    num_held = np.floor(sizes * (options.test_share + options.validation_share) + lots)
    num_held = np.minimum(num_held, np.where(sizes > 1, sizes - 1, sizes))
    num_test = np.minimum(np.floor(sizes * options.test_share + lots), num_held)
    order = np.lexsort((keyed_hashes(group_of_key, options.seed), stratum))
    rank = np.empty(len(stratum), dtype=np.int64)  # rank of each key in its stratum
    rank[order] = np.arange(len(stratum)) - (np.cumsum(sizes) - sizes)[stratum[order]]
    parts = np.where(rank < num_held[stratum], VALIDATION, TRAIN)
    parts = np.where(rank < num_test[stratum], TEST, parts).astype(np.int8)
    return parts[[group_of_text[text] for text in texts]]


def parse_part(value: str) -> int:
    """Return 0, 1 or 2 for train(ing), validation (valid, val, dev) or test, in any case; RowFault
    for other values."""
    name = value.strip().lower()
    if name in PART_ALIASES:
        return PART_ALIASES[name]
    raise RowFault(
        "split",
        value,
        f'split "{value}" is not one of train, validation (or dev) and test. Leave the split '
        "column unnamed to have the rows split by their strings.",
    )


def stem_key(text: str) -> str:
    """Return the distinct words of a text, sorted, without case, accents, punctuation and status
    words. A text of status words only keeps them; one of punctuation only is returned unchanged.
    """
    folded = text.lower()
    if not folded.isascii():
        folded = fold_accents(folded)
    words = set(folded.translate(_PUNCTUATION).split())
    return " ".join(sorted(words - _STATUS_STEMS or words)) or text


def keyed_hashes(keys: Iterable[str], seed: int) -> np.ndarray:
    """Return a hash of each string, [N] uint64, that depends only on seed and string."""
    salt = hashlib.blake2b(b"unisono split", key=str(seed).encode(), digest_size=8)
    digests = []
    for key in keys:
        keyed = salt.copy()
        keyed.update(key.encode("utf-8", "surrogatepass"))
        digests.append(keyed.digest())
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def fold_accents(text: str) -> str:
    """Return the text without accents; æ becomes ae, ø o, ß ss."""
    return _ACCENTS.sub("", unicodedata.normalize("NFKD", text.translate(_LETTERS)))


_STATUS_STEMS = frozenset(fold_accents(word) for words in STATUS_WORDS.values() for word in words)
