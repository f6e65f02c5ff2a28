"""One part of a corpus as a lens reads it: documents, cut where they are longer than the context.

Shapes: N pieces, D documents.
"""

from functools import cached_property

import numpy as np

from datamodules.text_batches import cut_into_pieces
from datamodules.token_store import TokenStore


class Pieces:
    """The documents of one part, in pieces of at most `context_length` positions.

    Args:
        store: of the tokens; pickled as its folder.
        part: 0 train, 1 validation, 2 test.
        context_length: positions of the longest piece.
    """

    def __init__(self, store: TokenStore, part: int, context_length: int) -> None:
        self.store, self.part, self.context_length = store, part, context_length
        self.stream = store.stream(part)
        self.starts, self.sizes = cut_into_pieces(self.stream, context_length)
        counts = -(-self.stream.num_positions // context_length)
        self.document = np.repeat(np.arange(len(counts)), counts)  # [N]

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def hashes(self) -> np.ndarray:
        """[N] uint64, of the document's text and the piece's place in it."""
        place = self.starts - self.stream.starts[self.document]
        with np.errstate(over="ignore"):
            return self.store.hashes(self.part)[self.document] + place.astype(np.uint64)

    def tokens(self, piece: int) -> np.ndarray:
        """Return [size + 1] int64: the tokens of a piece, and the one that follows it."""
        start = int(self.starts[piece])
        return self.stream.tokens[start : start + int(self.sizes[piece]) + 1].astype(np.int64)
