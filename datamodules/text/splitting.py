"""How text is divided into training, validation and test: whole documents, or their ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np

from datamodules.core.plan import hash_ids
from datamodules.files.splitting import MAX_SHARE, TEST, TRAIN, VALIDATION

DivideBy = Literal["documents", "tail"]


@dataclass(frozen=True)
class TextSplit:
    """How the training files are divided where there are no validation files.

    Args:
        validation_share: share of the documents or characters for validation, 0 to 0.9.
        test_share: share for the test, where it has no files; both together at most 0.9.
        by: `documents` draws whole documents by a hash of their text, equal ones together; `tail`
            takes the last characters of every document, validation before test.
        seed: another seed draws other documents.
    """

    validation_share: float = 0.1
    test_share: float = 0.0
    by: DivideBy = "documents"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("validation_share", "test_share"):
            share = getattr(self, name)
            if not 0 <= share <= MAX_SHARE:
                raise ValueError(f"split.{name} must be 0 to {MAX_SHARE}, got {share}.")
        if self.validation_share + self.test_share > MAX_SHARE:
            raise ValueError(
                f"split.validation_share + split.test_share must be at most {MAX_SHARE}, got "
                f"{self.validation_share + self.test_share:g}: too little is left for training."
            )
        if self.by not in get_args(DivideBy):
            raise ValueError(
                f'split.by must be one of {", ".join(get_args(DivideBy))}, got "{self.by}".'
            )

    def beside(self, files: Mapping[int, Sequence[Path]]) -> "TextSplit | None":
        """Return how the training files are divided; `None` where they are not.

        Validation files leave the training files whole; test files leave them undivided but for
        validation.

        Args:
            files: per part (train, validation, test) the files.
        """
        if files.get(VALIDATION):
            return None
        split = replace(self, test_share=0.0) if files.get(TEST) else self
        return split if split.validation_share or split.test_share else None


def without_text(stage: str, split: TextSplit | None, num_documents: int) -> str:
    """Return what to say where a part has no text.

    Args:
        stage: train, validation or test.
        split: how the training files are divided; `None` where they are not.
        num_documents: of training.
    """
    start, option = f"no text is for {stage}", f"data.split.{stage}_share"
    if stage == "train":
        return f"{start}; give data.train_files longer texts, or lower the shares of data.split."
    if split is None:
        return f"{start}; name data.{stage}_files."
    share = getattr(split, f"{stage}_share")
    if share and split.by == "documents":
        return (
            f"{start}: the training files hold {num_documents} documents, too few to keep one "
            f"for {stage}; set data.split.by to tail, or data.documents_by to blank_line or line, "
            f"or name data.{stage}_files."
        )
    return f"{start}; name data.{stage}_files, or raise {option} above {share}."


class Fragments(NamedTuple):
    """What is known of all fragments, in the order of reading; a document has one or more.

    part [F] int8 of the file it stands in; characters [F] int64; hashes [F] uint64 of the text;
    begins [F] bool, a document begins in it; ends [F] bool.
    """

    part: np.ndarray
    characters: np.ndarray
    hashes: np.ndarray
    begins: np.ndarray
    ends: np.ndarray

    @property
    def document(self) -> np.ndarray:
        """[F] int64, the number of the document, from 0."""
        return np.cumsum(self.begins) - 1

    def document_hashes(self) -> np.ndarray:
        """[D] uint64, of the whole text of each document."""
        hashes, document = self.hashes[self.begins].copy(), self.document
        for later in np.flatnonzero(~self.begins):
            one = document[later : later + 1]
            hashes[one] = hash_ids(hashes[one], int(self.hashes[later]))
        return hashes


def cuts_of(fragments: Fragments, split: TextSplit | None) -> np.ndarray:
    """Return [F, 2] int64: training has the characters before the first, the test from the second.

    Args:
        fragments: all of them.
        split: how those of the training files are divided; `None` keeps every part as it is.
    """
    size, part = fragments.characters, fragments.part
    if split is not None and split.by == "documents":
        part = np.where(part == TRAIN, _drawn(fragments, split)[fragments.document], part)
    first = np.where(part == TRAIN, size, 0)
    second = np.where(part <= VALIDATION, size, 0)
    if split is not None and split.by == "tail":
        first, second = _tails(fragments, split, first, second)
    return np.stack([first, second], axis=1)


def _drawn(fragments: Fragments, split: TextSplit) -> np.ndarray:
    """[D] int8: of the distinct texts of the training files, those with the lowest lots are held.

    A share above 0 gives at least one, training and then validation first.
    """
    hashes = fragments.document_hashes()
    in_training = fragments.part[fragments.begins] == TRAIN
    parts = np.full(len(hashes), TRAIN, np.int8)
    distinct = np.unique(hashes[in_training])
    lots = hash_ids(distinct, split.seed)
    distinct = distinct[np.argsort(lots, kind="stable")]
    shares = (split.test_share, split.validation_share)
    num_test, num_validation = (max(round(s * len(distinct)), s > 0) for s in shares)
    num_held = max(0, min(num_test + num_validation, len(distinct) - 1))
    num_test = max(0, num_held - num_validation)
    parts[in_training & np.isin(hashes, distinct[:num_held])] = VALIDATION
    parts[in_training & np.isin(hashes, distinct[:num_test])] = TEST
    return parts


def _tails(
    fragments: Fragments, split: TextSplit, first: np.ndarray, second: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    document, size = fragments.document, fragments.characters
    total = np.bincount(document, size).astype(np.int64)  # [D]
    before = np.cumsum(size) - size
    before -= before[fragments.begins][document]  # characters of the document before the fragment
    kept = (total * (1 - (split.validation_share + split.test_share))).astype(np.int64)[document]
    held = (total * (1 - split.test_share)).astype(np.int64)[document]
    is_training = fragments.part == TRAIN
    return (
        np.where(is_training, np.clip(kept - before, 0, size), first),
        np.where(is_training, np.clip(held - before, 0, size), second),
    )
