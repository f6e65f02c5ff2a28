"""Scored texts as planned batches. Shapes: B texts in the micro-batch, C chunks, L labels."""

import hashlib
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from datamodules.core.planned import PlannedDataset
from datamodules.scored.labels import label_text
from datamodules.scored.store import ScoredStore
from datamodules.text.encoding import Framed, Framing, TextEncoding, kept_tokens, padded
from datamodules.text.store import ReadTokens, TokenRows, Tokens

SHOWN = 300  # characters of a text in a description


@dataclass(frozen=True)
class ChunkOptions:
    """How a text that is longer than `text.max_length` is cut.

    Args:
        most: chunks of a text that are read; what follows them is cut.
        stride: tokens from the beginning of a chunk to that of the next; none lets chunks touch
            without overlap.

    Raises:
        ValueError: a number below 1.
    """

    most: int = 1
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.most < 1:
            raise ValueError(f"chunks.most must be at least 1, got {self.most}.")
        if self.stride is not None and self.stride < 1:
            raise ValueError(f"chunks.stride must be at least 1, got {self.stride}.")
        if self.stride is not None and self.most == 1:
            raise ValueError(
                f"chunks.stride {self.stride} has no effect on single chunks; raise chunks.most."
            )

    def stride_in(self, framing: Framing) -> int:
        """Return the tokens from the beginning of a chunk to that of the next.

        Raises:
            ValueError: chunks would leave out what stands between them.
        """
        room = framing.limits.max_length - framing.num_marks
        if self.stride is not None and self.stride > room:
            raise ValueError(
                f"chunks.stride is {self.stride}, and a chunk holds {room} tokens (text.max_length "
                f"{framing.limits.max_length} less {framing.num_marks} marks): it must be at most "
                "that, or tokens between chunks would be read by none. Lower chunks.stride, or "
                "raise text.max_length."
            )
        return room if self.stride is None else self.stride

    def longest(self, framing: Framing) -> int:
        """Return the tokens of a text that stand in its chunks."""
        room = framing.limits.max_length - framing.num_marks
        return room + (self.most - 1) * self.stride_in(framing)


class ScoredExample(NamedTuple):
    """One text: its chunks, and the numbers of its labels [W], NaN = missing."""

    chunks: list[Framed]
    labels: np.ndarray


class ScoredTextDataset(PlannedDataset):
    """Texts of a store; a sample is a row, or in prediction a distinct text.

    Args:
        store: of the texts.
        encoding: of the texts.
        chunks: how long ones are cut.
        rows: [n] rows of the store; none takes each distinct text once, without labels.

    Raises:
        ValueError: the stride is longer than a chunk.
    """

    def __init__(
        self,
        store: ScoredStore,
        encoding: TextEncoding,
        chunks: ChunkOptions,
        rows: np.ndarray | None = None,
    ) -> None:
        self.store, self.encoding, self.chunks = store, encoding, chunks
        self.stride = chunks.stride_in(encoding.framing)
        self.texts = np.arange(store.num_texts) if rows is None else store.text_of_row[rows]
        self.has_labels = rows is not None
        self.tokens: Tokens
        if rows is None:  # each comes once
            self.tokens, self.row_of = ReadTokens(encoding.ids_once, store.text), self.texts
        else:
            self.tokens, self.row_of = kept_texts(store, encoding, chunks, self.texts)
        self.rows = rows
        # Bytes say enough about tokens to put texts of like length together.
        longest = encoding.limits.max_length * chunks.most
        self.lengths = np.minimum(store.num_bytes[self.texts] + 2, longest)
        content = hashlib.sha256(np.ascontiguousarray(self.texts).tobytes()).hexdigest()[:16]
        facts = f"{chunks.most}-{chunks.stride}"
        self.fingerprint = f"{store.fingerprint}-{content}-{encoding.digest}-{facts}"
        is_labelled = ~np.isnan(store.labels if rows is None else store.labels[rows])
        self.target_counts = {
            name: is_labelled[:, store.columns_of(name)].sum(1) for name in store.heads
        }
        # Of a head with one number for each text, that column; of others, all of theirs.
        columns = {name: store.columns_of(name) for name in store.heads}
        self.columns: dict[str, slice | int] = {
            name: of if store.heads[name]["kind"] == "multilabel" else of.start
            for name, of in columns.items()
        }

    def example(self, sample_id: int, epoch: int) -> ScoredExample:
        """Return one text, the same in every epoch."""
        ids = self.tokens[self.row_of[sample_id]]
        chunks = self.encoding.framing.chunks(ids, self.stride, self.chunks.most)
        return ScoredExample(chunks, self._labels(sample_id))

    def collate(self, examples: list[ScoredExample]) -> dict[str, object]:
        """Return the padded batch."""
        batch: dict[str, object] = padded([chunk for e in examples for chunk in e.chunks])
        del batch["segment_ids"]  # a single text is all one segment
        sizes = torch.tensor([len(example.chunks) for example in examples])
        batch["chunk_of"] = torch.arange(len(examples)).repeat_interleave(sizes)
        if not self.has_labels:
            return batch
        return {**batch, **self._targets(np.stack([example.labels for example in examples]))}

    def _targets(self, labels: np.ndarray) -> dict[str, dict[str, torch.Tensor]]:
        """Return what heads learn from labels [B, W], NaN = missing."""
        numbers = torch.from_numpy(labels)
        is_there = ~numbers.isnan()
        values = numbers.nan_to_num(nan=0.0).float()  # masked, wherever it is read
        targets, known = {}, {}
        for name, columns in self.columns.items():
            # Whole in memory, as a copy to a GPU from pinned memory needs it.
            targets[name] = values[:, columns].contiguous()
            known[name] = is_there[:, columns].contiguous()
        return {"targets": targets, "is_labelled": known}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the beginning of the text, and its labels by their names."""
        text = self.store.text(int(self.texts[sample_id]))[:SHOWN]
        numbers, columns_of = self._labels(sample_id), self.store.columns_of
        shown = {name: numbers[columns_of(name)] for name in self.store.heads}
        return {"text": text, **{n: label_text(self.store.heads[n], x) for n, x in shown.items()}}

    def _labels(self, sample_id: int) -> np.ndarray:
        if self.rows is None:
            return np.zeros(0)
        return self.store.labels[self.rows[sample_id]]


def kept_texts(
    store: ScoredStore, encoding: TextEncoding, chunks: ChunkOptions, texts: np.ndarray
) -> tuple[TokenRows, np.ndarray]:
    """Return the tokens of texts, tokenised once into the cache, and the row of each, [n] int64.

    Args:
        store: of the texts.
        encoding: of the texts.
        chunks: how long ones are cut; what is in no chunk is not kept.
        texts: [n] their numbers; some may be there several times.
    """
    distinct, rows = np.unique(texts, return_inverse=True)
    chosen = hashlib.sha256(distinct.tobytes()).hexdigest()
    facts = ["scored", store.fingerprint, chosen]
    read = partial(map, store.text, distinct.tolist())
    return kept_tokens(facts, encoding, read, chunks.longest(encoding.framing)), rows


def chunk_facts(chunks: ChunkOptions) -> dict[str, int | None]:
    """Return plain values from which ChunkOptions makes the same."""
    return asdict(chunks)
