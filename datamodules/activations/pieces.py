"""One part of a corpus as a lens reads it: documents, cut where they are longer than the context.

Shapes: N pieces, D documents.
"""

from functools import cached_property

import numpy as np

from datamodules.text.store import TokenStore
from datamodules.text.texts import cut_into_pieces


class Pieces:
    """The documents of one part, in pieces of at most `context_length` tokens.

    The last token of a piece is only predicted, and has no position that could be taken; the next
    piece of the same document begins with it.

    Args:
        store: of the tokens.
        part: 0 train, 1 validation, 2 test.
        context_length: tokens of the longest piece, at least 2.
    """

    def __init__(self, store: TokenStore, part: int, context_length: int) -> None:
        self.store, self.part, self.context_length = store, part, context_length
        self.stream = store.stream(part)
        self.starts, self.sizes = cut_into_pieces(self.stream, context_length - 1)
        counts = -(-self.stream.num_positions // (context_length - 1))
        self.document = np.repeat(np.arange(len(counts)), counts)  # [N]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def document_hashes(self) -> np.ndarray:
        """[N] uint64, of the whole text of the document that a piece is of."""
        return self.store.hashes(self.part)[self.document]

    @cached_property
    def hashes(self) -> np.ndarray:
        """[N] uint64, of the document's text and the piece's place in it."""
        place = self.starts - self.stream.starts[self.document]
        with np.errstate(over="ignore"):
            return self.document_hashes + place.astype(np.uint64)

    def tokens(self, piece: int) -> np.ndarray:
        """Return [size + 1] int64: the tokens of a piece, and the one that follows it."""
        start = int(self.starts[piece])
        return self.stream.tokens[start : start + int(self.sizes[piece]) + 1].astype(np.int64)

    def rows(self, pieces: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return [B, T] int64: the first `lengths` [B] tokens of `pieces` [B], padded with 0."""
        places = np.arange(int(lengths.max()))
        is_token = places < lengths[:, None]
        wanted = np.where(is_token, self.starts[pieces, None] + places, 0)
        return np.where(is_token, self.stream.tokens[wanted], 0).astype(np.int64)
