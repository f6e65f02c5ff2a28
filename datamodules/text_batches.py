"""The datasets that give `TextBatch`: blocks of a stream, packed rows, or single documents.

Shapes: R rows of the micro-batch, T positions of its longest.
"""

from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from datamodules.packing import best_fit
from datamodules.plan import rng_for
from datamodules.planned import PlannedDataset
from datamodules.token_store import TokenStream

IGNORED = -100
Layout = Literal["blocks", "packed", "documents"]
TERM = "tokens"


class Piece(NamedTuple):
    """Some successive positions of one document: input_ids [n] and labels [n], int64."""

    input_ids: np.ndarray
    labels: np.ndarray


class TokenDataset(PlannedDataset):
    """One part of a token store. A sample is a list of pieces, which share a row.

    Args:
        stream: the tokens.
        fingerprint: of the store and the part.
        context_length: most positions of a row.
        layout: see `TextDataModule`.
    """

    def __init__(
        self, stream: TokenStream, fingerprint: str, context_length: int, layout: Layout
    ) -> None:
        self.stream, self.layout, self.context_length = stream, layout, context_length
        self.starts, self.sizes = cut_into_pieces(stream, context_length)
        if layout == "packed":
            self.order, self.offsets = best_fit(self.sizes, context_length)
        else:
            self.order = np.arange(len(self.sizes))
            self.offsets = np.arange(len(self.sizes) + 1)
        self.lengths = np.add.reduceat(self.sizes[self.order], self.offsets[:-1])
        self.fingerprint = f"{fingerprint}-{layout}-{context_length}"
        self.target_counts = {TERM: self.lengths}

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the pieces of one row."""
        pieces = self.order[self.offsets[sample_id] : self.offsets[sample_id + 1]]
        return [self._piece(int(self.starts[i]), int(self.sizes[i])) for i in pieces]

    def collate(self, examples: list[list[Piece]]) -> dict[str, Tensor]:
        """Return the rows; samples of single documents follow each other in one row, unpadded."""
        if self.layout == "documents":
            return one_row(examples)
        return padded_rows(examples)

    def _piece(self, start: int, size: int) -> Piece:
        tokens = self.stream.tokens[start : start + size + 1].astype(np.int64)
        return Piece(tokens[:-1], tokens[1:])


class BlockDataset(TokenDataset):
    """Successive blocks of a stream, whatever its documents; each epoch cuts at other places.

    The stream is a ring: a block that passes its end goes on at its beginning, as a document of
    its own. So every epoch has the same number of blocks and uses each position exactly once.

    Args:
        stream: the tokens.
        fingerprint: of the store and the part.
        context_length: positions of a block; the last one may be shorter.
        seed: key of the places; none always cuts from the beginning (evaluation).
    """

    def __init__(
        self, stream: TokenStream, fingerprint: str, context_length: int, seed: int | None
    ) -> None:
        self.stream, self.layout, self.seed = stream, "blocks", seed
        self.num_positions = max(0, len(stream.tokens) - 1)
        self.starts = np.arange(0, self.num_positions, context_length)
        self.lengths = np.minimum(context_length, self.num_positions - self.starts)
        self.fingerprint = f"{fingerprint}-blocks-{context_length}"
        self.target_counts = {TERM: self.lengths}

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return one block, in two pieces where it passes the end of the stream."""
        phase = 0
        if self.seed is not None:
            phase = int(rng_for(self.seed, epoch, 0).integers(self.num_positions))
        start = (int(self.starts[sample_id]) + phase) % self.num_positions
        size = int(self.lengths[sample_id])
        before_end = min(size, self.num_positions - start)
        pieces = [self._piece(start, before_end)]
        if before_end < size:
            pieces.append(self._piece(0, size - before_end))
        return pieces


def cut_into_pieces(stream: TokenStream, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts [N] and sizes [N] of the pieces of all documents, none longer than `longest`."""
    counts = -(-stream.num_positions // longest)  # [D]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    before = number * longest
    starts = np.repeat(stream.starts, counts) + before
    sizes = np.minimum(longest, np.repeat(stream.num_positions, counts) - before)
    return starts, sizes


def padded_rows(examples: list[list[Piece]]) -> dict[str, Tensor]:
    """Return one row per sample, its pieces one after the other, padded to the longest row."""
    widths = [sum(len(piece.labels) for piece in pieces) for pieces in examples]
    batch = _empty(len(examples), max(widths))
    document = 0
    for row, pieces in enumerate(examples):
        position = 0
        batch["sample_index"][row] = row
        for piece in pieces:
            _fill(batch, row, position, piece, document)
            position, document = position + len(piece.labels), document + 1
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def one_row(examples: list[list[Piece]]) -> dict[str, Tensor]:
    """Return all samples in one row, without any padding."""
    batch = _empty(1, sum(len(piece.labels) for pieces in examples for piece in pieces))
    document = position = 0
    for sample, pieces in enumerate(examples):
        for piece in pieces:
            end = position + len(piece.labels)
            batch["sample_index"][0, position:end] = sample
            _fill(batch, 0, position, piece, document)
            position, document = end, document + 1
    return {name: torch.from_numpy(values) for name, values in batch.items()}


def _empty(num_rows: int, width: int) -> dict[str, np.ndarray]:
    fills = {
        "input_ids": 0,
        "labels": IGNORED,
        "position_ids": 0,
        "document_ids": -1,
        "sample_index": 0,
    }
    return {name: np.full((num_rows, width), fill, np.int64) for name, fill in fills.items()}


def _fill(batch: dict[str, np.ndarray], row: int, start: int, piece: Piece, document: int) -> None:
    end = start + len(piece.labels)
    batch["input_ids"][row, start:end] = piece.input_ids
    batch["labels"][row, start:end] = piece.labels
    batch["position_ids"][row, start:end] = np.arange(end - start)
    batch["document_ids"][row, start:end] = document
