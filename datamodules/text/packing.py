"""Rows of tokens: ragged pieces packed by best fit, joined and padded."""

from abc import abstractmethod
from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.core.batches import IGNORED
from datamodules.core.planned import PlannedDataset


class Piece(NamedTuple):
    """Some successive positions of one document: input_ids [n] and labels [n], int64."""

    input_ids: np.ndarray
    labels: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of pieces, filled so that little room is left.

    Pieces are taken from the longest to the shortest, equal ones in their order, each into the row
    with the least room that still holds it, of several into the one that has had it longest. Equal
    pieces are laid at once, so that the time depends on the number of lengths more than on that of
    the pieces.

    Args:
        lengths: [N] positions of each piece, 1 to capacity.
        capacity: positions of a row.

    Returns:
        order [N] int64, the pieces row by row in ascending order, and offsets [rows + 1] int64:
        row r holds order[offsets[r]:offsets[r + 1]].

    Raises:
        ValueError: a piece does not fit in a row, or is empty.

    Source: best-fit decreasing (Johnson 1973); for language models Ding et al. 2024.
    """
    if not len(lengths):
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    if not 1 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(
            f"pieces must have 1 to {capacity} positions, got {lengths.min()} to {lengths.max()}."
        )
    by_length = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes, firsts = np.unique(-lengths[by_length].astype(np.int64), return_index=True)
    row_of, rows = np.empty(len(lengths), np.int64), _Rows(capacity)
    for size, pieces in zip((-sizes).tolist(), np.split(by_length, firsts[1:]), strict=True):
        done = 0
        while done < len(pieces):
            done += rows.lay(size, pieces[done:], row_of)
    order = np.argsort(row_of, kind="stable")
    counts = np.bincount(row_of, minlength=rows.num_rows)
    return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


class _Rows:
    """The rows that have room, by the amount of it."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.num_rows = capacity, 0
        self.rooms: list[int] = []  # ascending
        self.with_room: dict[int, list[np.ndarray]] = {}

    def lay(self, size: int, pieces: np.ndarray, row_of: np.ndarray) -> int:
        """Lay as many pieces of one size as rows of one amount of room take; return how many."""
        room, rows = self._taken(size, len(pieces))
        each = room // size
        count = min(len(pieces), each * len(rows))
        row_of[pieces[:count]] = np.repeat(rows, each)[:count]
        full, rest = divmod(count, each)
        self._give(room - each * size, rows[:full])
        if rest:
            self._give(room - rest * size, rows[full : full + 1])
            full += 1
        self._give(room, rows[full:])
        return count

    def _taken(self, size: int, num_pieces: int) -> tuple[int, np.ndarray]:
        """Return the rows with the least room that holds a piece, new ones where there is none."""
        place = bisect_left(self.rooms, size)
        if place < len(self.rooms):
            room = self.rooms.pop(place)
            return room, np.concatenate(self.with_room.pop(room))
        needed = -(-num_pieces // (self.capacity // size))
        self.num_rows += needed
        return self.capacity, np.arange(self.num_rows - needed, self.num_rows)

    def _give(self, room: int, rows: np.ndarray) -> None:
        if not room or not len(rows):
            return
        if room not in self.with_room:
            insort(self.rooms, room)
        self.with_room.setdefault(room, []).append(rows)


def padded_rows(examples: list[list[Piece]]) -> dict[str, Any]:
    """Return one row per sample, its pieces one after the other, padded to the longest row."""
    flat, widths = _joined(examples)
    has_single_documents = all(len(pieces) == 1 for pieces in examples)
    width = int(widths.max())
    flat["sample_index"] = np.repeat(np.arange(len(widths)), widths)
    if int(widths.min()) == width:
        rows_of = {n: torch.from_numpy(v.reshape(len(widths), width)) for n, v in flat.items()}
        return {**rows_of, "has_single_documents": has_single_documents}
    fills = dict.fromkeys(flat, 0) | {"labels": IGNORED, "document_ids": -1}
    is_token = np.arange(width) < widths[:, None]  # [R, T]
    batch: dict[str, Any] = {"has_single_documents": has_single_documents}
    for name, values in flat.items():
        rows = np.full(is_token.shape, fills[name], np.int64)
        rows[is_token] = values
        batch[name] = torch.from_numpy(rows)
    batch["sample_index"][:] = torch.arange(len(widths))[:, None]
    return batch


def one_row(examples: list[list[Piece]]) -> dict[str, Any]:
    """Return all samples in one row, without any padding."""
    flat, widths = _joined(examples)
    flat["sample_index"] = np.repeat(np.arange(len(widths)), widths)
    row = {name: torch.from_numpy(values[None]) for name, values in flat.items()}
    return {**row, "has_single_documents": sum(map(len, examples)) == 1}


def _joined(examples: list[list[Piece]]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the positions of all samples one after the other, and how many each has, [B]."""
    pieces = [piece for example in examples for piece in example]
    sizes = np.array([len(piece.labels) for piece in pieces])
    widths = [sum(len(piece.labels) for piece in example) for example in examples]
    document_ids = np.repeat(np.arange(len(pieces)), sizes)
    flat = {
        "input_ids": np.concatenate([piece.input_ids for piece in pieces]),
        "labels": np.concatenate([piece.labels for piece in pieces]),
        "position_ids": np.arange(len(document_ids)) - (np.cumsum(sizes) - sizes)[document_ids],
        "document_ids": document_ids,
    }
    return flat, np.array(widths)


class RowDataset(PlannedDataset):
    """Rows of pieces of documents. A sample is a list of pieces, which share a row.

    Args:
        sizes: [N] positions of each piece.
        context_length: most positions of a row.
        layout: `packed` fills rows by best fit; `documents` gives each piece its own, and joins
            those of a micro-batch without padding.
    """

    def __init__(self, sizes: np.ndarray, context_length: int, layout: str) -> None:
        self.context_length, self.is_padded = context_length, layout != "documents"
        if layout == "packed":
            self.order, self.offsets = best_fit(sizes, context_length)
        else:
            self.order, self.offsets = np.arange(len(sizes)), np.arange(len(sizes) + 1)
        self.lengths = self.per_row(sizes)

    def per_row(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of values [N] of pieces over each row."""
        before = np.concatenate([[0], np.cumsum(values[self.order])])
        return np.diff(before[self.offsets])

    def pieces_of(self, sample_id: int) -> list[int]:
        """Return the numbers of the pieces of one row."""
        return self.order[self.offsets[sample_id] : self.offsets[sample_id + 1]].tolist()

    @abstractmethod
    def piece(self, number: int) -> Piece:
        """Return one piece."""

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the pieces of one row."""
        return [self.piece(number) for number in self.pieces_of(sample_id)]

    def collate(self, examples: list[list[Piece]]) -> dict[str, Any]:
        """Return the rows; samples of single documents follow each other in one row, unpadded."""
        return padded_rows(examples) if self.is_padded else one_row(examples)
