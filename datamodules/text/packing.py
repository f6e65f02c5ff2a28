"""Rows of tokens: documents cut into pieces, packed by best fit, joined and padded.

Shapes: R rows of the micro-batch, T positions of the longest row; D documents, N pieces.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.core.batches import IGNORED, TERM, document_bounds
from datamodules.core.plan import rng_for
from datamodules.core.planned import PlannedDataset
from datamodules.text.store import TokenStore, TokenStream


class Piece(NamedTuple):
    """Successive positions of one document: input_ids [n] and labels [n], int64."""

    input_ids: np.ndarray
    labels: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack pieces into rows so that little room is left.

    Pieces are placed from longest to shortest, equal ones together and in order, each into the row
    with the least room that still holds it; among equal rows, into the one that has had this room
    longest.

    Args:
        lengths: [N] positions of each piece, 1 to capacity.
        capacity: positions of a row.

    Returns:
        order [N] int64, the pieces row by row and ascending within a row, and offsets [rows + 1]
        int64: row r holds order[offsets[r]:offsets[r + 1]].

    Source: best-fit decreasing (Johnson 1973); for language models Ding et al. 2024.
    """
    if not len(lengths):
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, firsts = np.unique(-lengths[by_length].astype(np.int64), return_index=True)
    row_of, num_rows = np.empty(len(lengths), np.int64), 0
    rooms: list[int] = []  # free positions that occur in rows, ascending
    with_room: dict[int, list[np.ndarray]] = {}
    for size, pieces in zip((-sizes).tolist(), np.split(by_length, firsts[1:]), strict=True):
        while len(pieces):
            place = bisect_left(rooms, size)
            if place < len(rooms):  # the least room that holds a piece
                room = rooms.pop(place)
                rows = np.concatenate(with_room.pop(room))
            else:
                room, needed = capacity, -(-len(pieces) // (capacity // size))
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            each = room // size
            count = min(len(pieces), each * len(rows))
            row_of[pieces[:count]] = np.repeat(rows, each)[:count]
            full, rest = divmod(count, each)
            used = full + (rest > 0)
            left = (room - each * size, rows[:full]), (room - rest * size, rows[full:used])
            for room_left, some in (*left, (room, rows[used:])):
                if room_left and len(some):
                    if room_left not in with_room:
                        insort(rooms, room_left)
                    with_room.setdefault(room_left, []).append(some)
            pieces = pieces[count:]
    order = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=num_rows)
    return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


def joined_rows(
    examples: list[list[Piece]], in_one_row: bool = False, least_shape: tuple[int, int] = (0, 0)
) -> dict[str, Any]:
    """Return one row per sample, its pieces concatenated and padded to the longest row; rows of
    padding, which count as the last sample's, fill up to `least_shape` [R, T]. With `in_one_row`
    all samples form one row without padding."""
    pieces = [piece for example in examples for piece in example]
    sizes = np.array([len(piece.labels) for piece in pieces])
    widths = np.array([sum(len(piece.labels) for piece in example) for example in examples])
    document_ids = np.repeat(np.arange(len(pieces)), sizes)
    flat = {
        "input_ids": np.concatenate([piece.input_ids for piece in pieces]),
        "labels": np.concatenate([piece.labels for piece in pieces]),
        "position_ids": np.arange(len(document_ids)) - (np.cumsum(sizes) - sizes)[document_ids],
        "document_ids": document_ids,
        "sample_index": np.repeat(np.arange(len(widths)), widths),
    }
    fills = dict.fromkeys(flat, 0) | {"labels": IGNORED, "document_ids": -1}
    least_rows, least_length = (1, 0) if in_one_row else least_shape
    filled = widths.sum(keepdims=True) if in_one_row else widths
    filled = np.pad(filled, (0, max(0, least_rows - len(filled))))
    is_token = np.arange(max(filled.max(), least_length)) < filled[:, None]  # [R, T]
    batch: dict[str, Any] = {}
    for name, values in flat.items():
        rows = np.full(is_token.shape, fills[name], np.int64)
        rows[is_token] = values
        batch[name] = torch.from_numpy(rows)
    if not in_one_row:
        samples = torch.arange(len(filled)).clamp(max=len(examples) - 1)
        batch["sample_index"][:] = samples[:, None]
    bounds, longest = document_bounds(batch["document_ids"].numpy())
    batch |= {"document_bounds": torch.from_numpy(bounds), "longest_document": longest}
    number = 1 if in_one_row else len(examples)
    return {**batch, "has_single_documents": len(pieces) == number}


class RowDataset(PlannedDataset):
    """Rows of pieces of documents. A sample is the list of pieces of one row.

    Args:
        stream: tokens of the documents.
        starts: [N] first position of each piece in the stream.
        sizes: [N] positions of each piece.
        context_length: maximum number of positions per row.
        layout: `packed` fills rows by best fit; `documents` makes each piece a sample and joins
            those of a micro-batch without padding.
    """

    losses: Sequence[str] = ()  # a sentence for each kind of document that is cut or left out

    def __init__(
        self,
        stream: TokenStream,
        starts: np.ndarray,
        sizes: np.ndarray,
        context_length: int,
        layout: str,
    ) -> None:
        self.stream: Any = stream
        self.starts, self.sizes = starts, sizes
        self.context_length, self.is_padded = context_length, layout != "documents"
        if layout == "packed":
            self.order, self.offsets = best_fit(sizes, context_length)
        else:
            self.order, self.offsets = np.arange(len(sizes)), np.arange(len(sizes) + 1)
        self.lengths = self.per_row(sizes)

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of the pieces' values [N] in each row."""
        return np.diff(np.concatenate([[0], np.cumsum(values[self.order])])[self.offsets])

    def pieces_of(self, sample_id: int) -> list[int]:
        """Return the indices of the pieces of one row."""
        return self.order[self.offsets[sample_id] : self.offsets[sample_id + 1]].tolist()

    def document_lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.concatenate([self.sizes[self.pieces_of(i)] for i in ids.tolist()])

    def piece(self, number: int) -> Piece:
        """Return one piece."""
        return self.stretch(int(self.starts[number]), int(self.sizes[number]))

    def stretch(self, start: int, size: int) -> Piece:
        """Return successive positions of the stream."""
        tokens = self.stream.tokens[start : start + size + 1].astype(np.int64)
        return Piece(tokens[:-1], tokens[1:])

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the pieces of one row."""
        return [self.piece(number) for number in self.pieces_of(sample_id)]

    def collate(self, examples: list[list[Piece]]) -> dict[str, Any]:
        """Return the rows; in layout `documents` all samples in one row without padding."""
        return joined_rows(examples, not self.is_padded, self.least_shape)


class TokenDataset(RowDataset):
    """One part of a store with its documents cut into pieces, see `RowDataset`."""

    def __init__(self, store: TokenStore, part: int, context_length: int, layout: str) -> None:
        self.store, stream = store, store.stream(part)
        pieces = cut_into_pieces(stream.starts, stream.num_positions, context_length)
        super().__init__(stream, *pieces[:2], context_length, layout)
        self.fingerprint = f"{store.fingerprint}-{part}-{layout}-{context_length}"
        self.target_counts = {TERM: self.lengths}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the text of each document in the row, with special tokens."""
        texts = {"positions": str(self.lengths[sample_id])}
        for number, piece in enumerate(self.example(sample_id, epoch), start=1):
            tokens = np.append(piece.input_ids, piece.labels[-1:])
            text = self.store.tokenizer.decode(tokens, skip_special_tokens=False)
            texts[f"document {number}"] = text
        return texts


class BlockDataset(TokenDataset):
    """Successive blocks of a part, across document boundaries; each epoch cuts at other places.

    The stream is a ring: a block that passes its end continues at its beginning, as a separate
    document. So every epoch has the same number of blocks and uses each position exactly once.

    Args:
        context_length: positions of a block; the last block may be shorter.
        seed: key of the places to cut; `None` always cuts from the beginning (evaluation).
    """

    def __init__(self, store: TokenStore, part: int, context_length: int, seed: int | None) -> None:
        self.store, self.stream = store, store.stream(part)
        self.context_length, self.seed, self.is_padded = context_length, seed, True
        self.num_positions = max(0, len(self.stream.tokens) - 1)
        self.starts = np.arange(0, self.num_positions, context_length)
        self.lengths = np.minimum(context_length, self.num_positions - self.starts)
        self.fingerprint = f"{store.fingerprint}-{part}-blocks-{context_length}"
        self.target_counts = {TERM: self.lengths}

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return one block, in two pieces where it passes the end of the stream."""
        start = (int(self.starts[sample_id]) + self.phase(epoch)) % self.num_positions
        size = int(self.lengths[sample_id])
        before_end = min(size, self.num_positions - start)
        pieces = [self.stretch(start, before_end)]
        if before_end < size:
            pieces.append(self.stretch(0, size - before_end))
        return pieces

    def document_lengths(self, ids: np.ndarray) -> np.ndarray:
        return self.lengths[ids]

    def phase(self, epoch: int) -> int:
        """Return the position where the first block of an epoch begins."""
        if self.seed is None:
            return 0
        return int(rng_for(self.seed, epoch, 0).integers(self.num_positions))


def cut_into_pieces(
    starts: np.ndarray, num_positions: np.ndarray, longest: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents [D] into pieces of 1 to `longest` positions; return starts [N], sizes [N] and
    document [N] of each piece."""
    counts = -(-num_positions // longest)  # [D]
    document = np.repeat(np.arange(len(counts)), counts)
    before = longest * (np.arange(len(document)) - (np.cumsum(counts) - counts)[document])
    sizes = np.minimum(longest, num_positions[document] - before)
    return starts[document] + before, sizes, document
