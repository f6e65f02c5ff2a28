"""How token ids of a text, or of a query and a document, become the input of an encoder.

Marks are those of a pretrained tokenizer (BERT's [CLS] and [SEP]) or, of an own one, its
end-of-text token. Shapes: R rows, T positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from datamodules.terms import check_languages, terms_by
from datamodules.tokenizers.text_tokenizer import TextTokenizer

QUERY, DOCUMENT = 0, 1  # segments


@dataclass(frozen=True)
class TextLimits:
    """How much of a text an encoder sees.

    Args:
        max_length: most positions of a row, marks included; the end of a text is cut.
        max_query_length: most tokens of a query.
        lower_case: whether letters are made small before they become tokens.
        stemmer: language of a Snowball stemmer, such as english; a text then becomes its terms,
            words without punctuation, before they become tokens.
        stopwords: language whose commonest words are left out; a text then becomes its terms.

    Raises:
        ValueError: a length below 4, a query that leaves no room for a document, or an unknown
            language.
    """

    max_length: int = 256
    max_query_length: int = 64
    lower_case: bool = True
    stemmer: str | None = None
    stopwords: str | None = None

    def __post_init__(self) -> None:
        check_languages(self.stemmer, self.stopwords)
        if self.max_length < 4:
            raise ValueError(f"text.max_length must be at least 4, got {self.max_length}.")
        if not 1 <= self.max_query_length <= self.max_length - 3:
            raise ValueError(
                f"text.max_query_length must be 1 to {self.max_length - 3} (text.max_length less "
                f"its marks), got {self.max_query_length}."
            )

    def normalised(self, text: str) -> str:
        """Return a text as it is tokenised."""
        if self.stemmer or self.stopwords:
            return " ".join(terms_by(self.stemmer, self.stopwords)(text))
        return text.lower() if self.lower_case else text


class Framed(NamedTuple):
    """One row in parts, the texts and the marks around them; `padded` puts all rows together.

    Args:
        parts: token ids of each part, [n] integers.
        segments: of each part.
    """

    parts: tuple[np.ndarray, ...]
    segments: tuple[int, ...]

    @property
    def ids(self) -> np.ndarray:
        """The token ids of the row, [T] int64."""
        return np.concatenate(self.parts, dtype=np.int64)


@dataclass(frozen=True)
class Framing:
    """Marks and lengths.

    Args:
        begin_id: token before a text; none where the tokenizer has no such mark.
        separator_id: token behind each text.
        limits: how much of a text is seen.
    """

    begin_id: int | None
    separator_id: int
    limits: TextLimits

    @classmethod
    def of(cls, tokenizer: TextTokenizer, limits: TextLimits) -> "Framing":
        """Return the framing of a tokenizer."""
        named = dict(tokenizer.special_tokens)
        ids = {name: tokenizer.backend.token_to_id(token) for name, token in named.items()}
        begin, separator = ids.get("cls_token"), ids.get("sep_token")
        if begin is None:
            begin = tokenizer.begin_id
        return cls(begin, tokenizer.end_id if separator is None else separator, limits)

    @property
    def num_marks(self) -> int:
        """Marks around a single text."""
        return 1 + (self.begin_id is not None)

    def single(self, ids: np.ndarray, max_length: int | None = None) -> Framed:
        """Return one text between its marks, cut at `max_length` positions."""
        return self._alone(ids[: (max_length or self.limits.max_length) - self.num_marks])

    def query(self, ids: np.ndarray) -> Framed:
        """Return a query between its marks."""
        return self._alone(ids[: self.limits.max_query_length])

    def pair(self, query: np.ndarray, document: np.ndarray) -> Framed:
        """Return a query and a document in one row; the document's end is cut."""
        query = query[: self.limits.max_query_length]
        room = self.limits.max_length - self.num_marks - 1 - len(query)
        parts = (*self._begin, query, self._separator, document[:room], self._separator)
        return Framed(parts, self._segments)

    def chunks(self, ids: np.ndarray, stride: int, most: int) -> list[Framed]:
        """Return a long text in overlapping rows; a short one is one row.

        Args:
            ids: of the text.
            stride: tokens from the beginning of one chunk to that of the next, at most the room
                of a chunk.
            most: chunks that are kept; what follows is cut.
        """
        room = self.limits.max_length - self.num_marks
        last = max(0, len(ids) - room)
        starts = range(0, last + stride, stride)[:most]
        return [self._alone(ids[start : start + room]) for start in starts]

    @cached_property
    def _begin(self) -> tuple[np.ndarray, ...]:
        return () if self.begin_id is None else (np.array([self.begin_id]),)

    @cached_property
    def _separator(self) -> np.ndarray:
        return np.array([self.separator_id])

    def _alone(self, text: np.ndarray) -> Framed:
        return Framed((*self._begin, text, self._separator), self._segments[:-2])

    @cached_property
    def _segments(self) -> tuple[int, ...]:
        return (*[QUERY] * len(self._begin), QUERY, QUERY, DOCUMENT, DOCUMENT)


def padded(rows: Sequence[Framed]) -> dict[str, torch.Tensor]:
    """Return input_ids and segment_ids [R, T] int64, and attention_mask [R, T] bool."""
    parts = [part for row in rows for part in row.parts]
    sizes = np.fromiter(map(len, parts), np.int64, len(parts))
    counts = np.fromiter((len(row.parts) for row in rows), np.int64, len(rows))
    lengths = np.add.reduceat(sizes, np.cumsum(counts) - counts)
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids, segments = np.zeros(mask.shape, np.int64), np.zeros(mask.shape, np.int64)
    ids[mask] = np.concatenate(parts)
    if any(row.segments[-1] != QUERY for row in rows):
        segments[mask] = np.repeat([part for row in rows for part in row.segments], sizes)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask),
        "segment_ids": torch.from_numpy(segments),
    }
