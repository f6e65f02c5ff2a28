"""The datasets that give `TextBatch`: blocks of a stream, packed rows, or single documents.

Shapes: R rows of the micro-batch, T positions of its longest; D documents, N pieces of them.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from datamodules.core.batches import IGNORED, TERM
from datamodules.core.plan import rng_for
from datamodules.core.planned import PlannedDataset
from datamodules.text.packing import best_fit
from datamodules.text.token_store import TokenStream
from datamodules.tokenizers.text_tokenizer import TextTokenizer

Layout = Literal["blocks", "packed", "documents"]


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
        layout: `packed` or `documents`, see `TextDataModule`.
        tokenizer: that of the stream, for `describe`.
    """

    def __init__(
        self,
        stream: TokenStream,
        fingerprint: str,
        context_length: int,
        layout: Layout,
        tokenizer: TextTokenizer,
    ) -> None:
        self.stream, self.layout, self.context_length = stream, layout, context_length
        self.tokenizer = tokenizer
        self.is_padded = layout != "documents"
        self.starts, self.sizes = cut_into_pieces(stream, context_length)
        if layout == "packed":
            self.order, self.offsets = best_fit(self.sizes, context_length)
        else:
            self.order = np.arange(len(self.sizes))
            self.offsets = np.arange(len(self.sizes) + 1)
        before = np.concatenate([[0], np.cumsum(self.sizes[self.order])])
        self.lengths = np.diff(before[self.offsets])
        self.fingerprint = f"{fingerprint}-{layout}-{context_length}"
        self.target_counts = {TERM: self.lengths}

    @property
    def packing_efficiency(self) -> float:
        """Share of the positions of all rows that hold a token."""
        return float(self.lengths.sum() / max(1, len(self.lengths) * self.context_length))

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return the pieces of one row."""
        pieces = self.order[self.offsets[sample_id] : self.offsets[sample_id + 1]]
        return [self._piece(int(self.starts[i]), int(self.sizes[i])) for i in pieces]

    def collate(self, examples: list[list[Piece]]) -> dict[str, Any]:
        """Return the rows; samples of single documents follow each other in one row, unpadded."""
        return padded_rows(examples) if self.is_padded else one_row(examples)

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the text of each document of the row, special tokens included."""
        texts = {"positions": str(self.lengths[sample_id])}
        for number, piece in enumerate(self.example(sample_id, epoch), start=1):
            tokens = np.append(piece.input_ids, piece.labels[-1:])
            text = self.tokenizer.decode(tokens, skip_special_tokens=False)
            texts[f"document {number}"] = text
        return texts

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
        tokenizer: that of the stream, for `describe`.
        seed: key of the places; none always cuts from the beginning (evaluation).
    """

    def __init__(
        self,
        stream: TokenStream,
        fingerprint: str,
        context_length: int,
        tokenizer: TextTokenizer,
        seed: int | None,
    ) -> None:
        self.stream, self.layout, self.context_length = stream, "blocks", context_length
        self.tokenizer, self.seed, self.is_padded = tokenizer, seed, True
        self.num_positions = max(0, len(stream.tokens) - 1)
        self.starts = np.arange(0, self.num_positions, context_length)
        self.lengths = np.minimum(context_length, self.num_positions - self.starts)
        self.fingerprint = f"{fingerprint}-blocks-{context_length}"
        self.target_counts = {TERM: self.lengths}
        self._phase_of: tuple[int, int] = (-1, 0)

    def example(self, sample_id: int, epoch: int) -> list[Piece]:
        """Return one block, in two pieces where it passes the end of the stream."""
        start = (int(self.starts[sample_id]) + self.phase(epoch)) % self.num_positions
        size = int(self.lengths[sample_id])
        before_end = min(size, self.num_positions - start)
        pieces = [self._piece(start, before_end)]
        if before_end < size:
            pieces.append(self._piece(0, size - before_end))
        return pieces

    def phase(self, epoch: int) -> int:
        """Return the position at which the blocks of an epoch begin."""
        if self.seed is None:
            return 0
        if self._phase_of[0] != epoch:
            phase = int(rng_for(self.seed, epoch, 0).integers(self.num_positions))
            self._phase_of = epoch, phase
        return self._phase_of[1]


def cut_into_pieces(stream: TokenStream, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return starts [N] and sizes [N] of the pieces of all documents, 1 to `longest` positions."""
    counts = -(-stream.num_positions // longest)  # [D]
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    before = number * longest
    starts = np.repeat(stream.starts, counts) + before
    sizes = np.minimum(longest, np.repeat(stream.num_positions, counts) - before)
    return starts, sizes


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
