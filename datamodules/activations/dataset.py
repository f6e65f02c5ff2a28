"""The activations of one part as planned samples.

Shapes: N activations, B of a micro-batch, T tokens of the longest document, A attributes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.activations.attributes import NONE, DocumentFacts
from datamodules.activations.pieces import Pieces
from datamodules.plan import hash_ids
from datamodules.planned import PlannedDataset

# Terms of the lens's loss, each counted once per sample.
TERMS = (
    *("teacher_text", "teacher_reconstruction", "reconstruction"),
    *("reference", "effect", "fluency", "entropy"),
)


class Sample(NamedTuple):
    """One activation: tokens of its document, its position, itself if it is kept, and its key."""

    number: int
    tokens: np.ndarray
    position: int
    activation: np.ndarray | None
    key: int


class ActivationDataset(PlannedDataset):
    """One part of a store, or of documents whose activations are computed in the step.

    Args:
        pieces: the documents.
        piece: [N] which of them an activation is in.
        position: [N] its position there.
        activations: [N, D]; none where they are not kept.
        facts: attributes and files of the documents; none in training.
        fingerprint: of the store and the part.
        seed: key of whatever is drawn for a sample.
        pairs_others: give each sample another one, of another document.
    """

    def __init__(
        self,
        pieces: Pieces,
        piece: np.ndarray,
        position: np.ndarray,
        activations: np.ndarray | None,
        facts: DocumentFacts | None,
        fingerprint: str,
        seed: int,
        pairs_others: bool = False,
    ) -> None:
        self.pieces, self.piece, self.position = pieces, piece, position
        self.activations, self.facts, self.seed = activations, facts, seed
        self.fingerprint = fingerprint
        self.lengths = pieces.sizes[piece]
        self.target_counts = dict.fromkeys(TERMS)
        self.others = self.partners if pairs_others else None

    def example(self, sample_id: int, epoch: int) -> list[Sample]:
        """Return the sample, and its partner where there are some."""
        numbers = [sample_id]
        if self.others is not None:
            numbers.append(int(self.others[sample_id]))
        return [self._sample(number, epoch) for number in numbers]

    def collate(self, examples: list[list[Sample]]) -> dict[str, Any]:
        """Return the batch, with `other` beside it where samples have partners."""
        batch = self._joined([example[0] for example in examples])
        if self.others is not None:
            batch["other"] = self._joined([example[1] for example in examples])
        return batch

    @cached_property
    def partners(self) -> np.ndarray:
        """[N] for each activation another one of another document."""
        return partners(self.pieces.document[self.piece])

    def chosen(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Return a batch of these samples, each with its partner: a look at a few of them."""
        batch = self._joined([self._sample(number, 0) for number in numbers])
        others = [self._sample(int(self.partners[number]), 0) for number in numbers]
        weight = torch.ones(len(numbers))
        return {**batch, "other": self._joined(others), "weight": weight}

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the document up to the position, and how it goes on."""
        tokens, position = self.pieces.tokens(int(self.piece[sample_id])), self.position[sample_id]
        decode = self.pieces.store.tokenizer.decode
        return {
            "position": str(position),
            "text": decode(tokens[: position + 1], skip_special_tokens=False),
            "goes on": decode(tokens[position + 1 :], skip_special_tokens=False),
        }

    def _sample(self, number: int, epoch: int) -> Sample:
        tokens = self.pieces.tokens(int(self.piece[number]))
        activation = None if self.activations is None else np.array(self.activations[number])
        key = hash_ids(np.array([number]), hash_key(self.seed, epoch))
        return Sample(number, tokens, int(self.position[number]), activation, int(key[0] >> 1))

    def _joined(self, samples: list[Sample]) -> dict[str, Any]:
        sizes = np.array([len(sample.tokens) for sample in samples])
        rows = np.zeros((len(samples), int(sizes.max())), np.int64)
        rows[np.arange(rows.shape[1]) < sizes[:, None]] = np.concatenate(
            [s.tokens for s in samples]
        )
        numbers = np.array([sample.number for sample in samples])
        document = self.pieces.document[self.piece[numbers]]
        hashes = self.pieces.store.hashes(self.pieces.part)[document]
        batch = {
            "input_ids": torch.from_numpy(rows),
            "lengths": torch.from_numpy(sizes),
            "position": torch.tensor([sample.position for sample in samples]),
            "noise_key": torch.tensor([sample.key for sample in samples]),
            "document": torch.from_numpy(hashes.astype(np.int64)),
        }
        if self.activations is not None:
            batch["activation"] = torch.from_numpy(np.stack([s.activation for s in samples]))
        if self.facts is not None:
            batch["group"] = torch.from_numpy(self.facts.group[document])
            attributes = [self._seen(s, d) for s, d in zip(samples, document, strict=True)]
            batch["attributes"] = torch.from_numpy(np.stack(attributes))
        return batch

    def _seen(self, sample: Sample, document: int) -> np.ndarray:
        """[A] attributes that stand before the position and are not the current token."""
        assert self.facts is not None
        words = self.facts.attributes[document]
        before = sample.tokens[: sample.position]
        is_seen = np.isin(words, before) & (words != sample.tokens[sample.position])
        return np.where(is_seen, words, NONE)


def hash_key(seed: int, epoch: int) -> int:
    """Return the key of all draws of an epoch."""
    return seed * 1_000_003 + epoch


def partners(document: np.ndarray) -> np.ndarray:
    """Return [N] for each activation another one, of another document if there are two.

    Samples stand in a keyed random order of documents, and each takes the one half a round on:
    every sample is the partner of one, unless a document holds more than half of them.

    Args:
        document: [N] of each.
    """
    order = np.lexsort((np.arange(len(document)), document, hash_ids(document, 1)))
    others = np.empty(len(document), np.int64)
    others[order] = np.roll(order, -(len(order) // 2))
    alone = np.flatnonzero(document[others] == document)  # all of the same document
    if len(alone):
        rest = order[document[order] != document[alone[0]]]
        others[alone] = np.resize(rest, len(alone)) if len(rest) else others[alone]
    return others
