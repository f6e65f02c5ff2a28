"""How token ids of a text, or of a query and a document, become the input of an encoder.

Marks are those of a pretrained tokenizer (BERT's [CLS] and [SEP]) or, of an own one, its
end-of-text token. Shapes: R rows, T positions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from datamodules.text.terms import check_languages, terms_by
from datamodules.tokenizers.text_tokenizer import TextTokenizer

DOCUMENT = 1  # segment; that of a query or an only text is 0


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

    def single(self, ids: np.ndarray, max_length: int | None = None) -> "Framed":
        """Return one text between its marks, cut at `max_length` positions."""
        room = (max_length or self.limits.max_length) - self.num_marks
        return Framed(self, (ids[:room],))

    def query(self, ids: np.ndarray) -> "Framed":
        """Return a query between its marks."""
        return Framed(self, (ids[: self.limits.max_query_length],))

    def pair(self, query: np.ndarray, document: np.ndarray) -> "Framed":
        """Return a query and a document in one row; the document's end is cut."""
        (row,) = self.pairs(query, [document])
        return row

    def pairs(self, query: np.ndarray, documents: Iterable[np.ndarray]) -> list["Framed"]:
        """Return the rows of a query and each of several documents."""
        query = query[: self.limits.max_query_length]
        room = self.limits.max_length - self.num_marks - 1 - len(query)
        return [Framed(self, (query, document[:room])) for document in documents]

    def chunks(self, ids: np.ndarray, stride: int, most: int) -> list["Framed"]:
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
        return [Framed(self, (ids[start : start + room],)) for start in starts]


class Framed(NamedTuple):
    """One row: texts that `padded` puts between their marks, together with those of other rows.

    Args:
        framing: whose marks they get.
        texts: token ids of the query or the only text, then of a document, [n] integers.
    """

    framing: Framing
    texts: tuple[np.ndarray, ...]

    @property
    def ids(self) -> np.ndarray:
        """The token ids of the row, [T] int64."""
        return padded([self])["input_ids"][0].numpy()


def padded(rows: Sequence[Framed]) -> dict[str, torch.Tensor]:
    """Return input_ids and segment_ids [R, T] int64, and attention_mask [R, T] bool.

    Args:
        rows: of one framing.
    """
    framing, texts = rows[0].framing, [text for row in rows for text in row.texts]
    has_begin = framing.begin_id is not None
    sizes = np.fromiter(map(len, texts), np.int64, len(texts))
    counts = np.fromiter((len(row.texts) for row in rows), np.int64, len(rows))
    firsts, row_of = np.cumsum(counts) - counts, np.repeat(np.arange(len(rows)), counts)
    ends = np.cumsum(sizes + 1)  # of all texts with their marks behind them
    before = ends[firsts] - sizes[firsts] - 1
    behind = ends - before[row_of] - 1 + has_begin  # place of each text's mark in its row
    lengths = behind[firsts + counts - 1] + 1
    place = np.arange(lengths.max())
    mask = place < lengths[:, None]
    is_text, ids = mask.copy(), np.zeros(mask.shape, np.int64)
    if has_begin:
        is_text[:, 0], ids[:, 0] = False, framing.begin_id
    is_text[row_of, behind], ids[row_of, behind] = False, framing.separator_id
    ids[is_text] = np.concatenate(texts)
    segments = np.zeros(mask.shape, np.int64)
    if counts.max() > 1:
        segments[mask & (place > behind[firsts, None]) & (counts > 1)[:, None]] = DOCUMENT
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": torch.from_numpy(mask),
        "segment_ids": torch.from_numpy(segments),
    }
