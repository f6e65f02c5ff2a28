"""Activations of one part as planned samples, and their explanations as lines of jsonl.

Shapes: N activations, B of a micro-batch, T tokens of the longest document, A attributes.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from datamodules.activations.documents import NONE, DocumentFacts, Pieces
from datamodules.core.batches import TERMS
from datamodules.core.loader import PlannedDataset, Sample
from datamodules.core.plan import hash_ids
from datamodules.core.store import mapped_array
from datamodules.files.splitting import PART_NAMES
from datamodules.tokenizers.text import TextTokenizer

AROUND = 8  # tokens before and after the one that is shown


class Context(NamedTuple):
    """The text around a token; where it is a part of a character, \ufffd stands for the parts."""

    before: str
    token: str
    after: str


def token_texts(tokenizer: TextTokenizer, ids: Sequence[int] | np.ndarray) -> list[str]:
    """Return the text of each token of a text that may go on from another; \ufffd for a part of a
    character."""
    return [tokenizer.decode_continuation([i], skip_special_tokens=False) for i in ids]


def context_of(tokenizer: TextTokenizer, ids: np.ndarray, position: int) -> Context:
    """Return the text around a position of a document with token ids [n]."""
    stretches = (
        ids[max(0, position - AROUND) : position],
        ids[position : position + 1],
        ids[position + 1 : position + 1 + AROUND],
    )
    texts = (tokenizer.decode_continuation(some, skip_special_tokens=False) for some in stretches)
    return Context(*texts)


EPOCHS_APART = 1_000_003  # between the keys of two seeds


class ActivationDataset(PlannedDataset):
    """One part of a store, or of documents whose activations are computed in the step.

    Args:
        pieces: the documents.
        piece: [N] which of them an activation is in.
        position: [N] its position there.
        path: npy file of the activations [N, D]; `None` where the step computes them.
        facts: attributes and files of the documents; `None` in training.
        fingerprint: of the store and the part.
        seed: key of whatever is drawn for a sample.
        pairs_others: give each sample another one, of another document.
    """

    def __init__(
        self,
        pieces: Pieces,
        piece: np.ndarray,
        position: np.ndarray,
        path: Path | None,
        facts: DocumentFacts | None,
        fingerprint: str,
        seed: int,
        pairs_others: bool = False,
    ) -> None:
        self.pieces, self.piece, self.position = pieces, piece, position
        self.path, self.facts, self.seed, self.fingerprint = path, facts, seed, fingerprint
        self.lengths = pieces.sizes[piece]
        self.target_counts = dict.fromkeys(TERMS)
        self.others = partners(pieces.document[piece]) if pairs_others else None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a worker gets that is no fork: it maps the file itself."""
        return {name: value for name, value in vars(self).items() if name != "activations"}

    @cached_property
    def activations(self) -> np.ndarray | None:
        """[N, D], memory-mapped."""
        return None if self.path is None else mapped_array(self.path)

    def example(self, sample_id: int, epoch: int) -> Sample:
        """Return which sample it is; `collate` reads all of a batch at once."""
        return Sample(sample_id, epoch)

    def collate(self, examples: list[Sample]) -> dict[str, Any]:
        """Return the batch, with `other` beside it where samples have partners.

        Args:
            examples: of one epoch.
        """
        numbers = np.array([example.number for example in examples])
        return self.batch(numbers, examples[0].epoch)

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the same of sample ids [B]."""
        batch = self._batch(sample_ids, epoch)
        if self.others is not None:
            batch["other"] = self._batch(self.others[sample_ids], epoch)
        return batch

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return the document up to the position, and how it goes on."""
        tokens, position = self.pieces.tokens(int(self.piece[sample_id])), self.position[sample_id]
        decode = self.pieces.store.tokenizer.decode
        return {
            "position": str(position),
            "text": decode(tokens[: position + 1], skip_special_tokens=False),
            "goes on": decode(tokens[position + 1 :], skip_special_tokens=False),
        }

    def _batch(self, numbers: np.ndarray, epoch: int) -> dict[str, Any]:
        piece, position = self.piece[numbers], np.asarray(self.position[numbers])
        lengths = self.pieces.sizes[piece] + 1  # the token after the last position
        rows = self.pieces.rows(piece, lengths)
        keys = hash_ids(numbers, self.seed * EPOCHS_APART + epoch) >> np.uint64(1)
        hashes = self.pieces.document_hashes[piece]
        batch = {
            "input_ids": torch.from_numpy(rows),
            "lengths": torch.from_numpy(lengths),
            "position": torch.from_numpy(position),
            "noise_key": torch.from_numpy(keys.astype(np.int64)),
            "document": torch.from_numpy(hashes.astype(np.int64)),
        }
        if self.activations is not None:
            batch["activation"] = torch.from_numpy(self.activations[numbers])
        if self.facts is not None:
            document = self.pieces.document[piece]
            seen = seen_words(self.facts.attributes[document], rows, position)
            batch["group"] = torch.from_numpy(self.facts.group[document])
            batch["attributes"] = torch.from_numpy(seen)
        return batch


def seen_words(words: np.ndarray, rows: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return [B, A] the words that stand before the position and are not the current token.

    Others are -1.

    Args:
        words: [B, A] int64 tokens, -1 = none.
        rows: [B, T] int64 tokens.
        position: [B] int64.
    """
    is_before = np.arange(rows.shape[1]) < position[:, None]  # [B, T]
    has_stood = ((words[:, :, None] == rows[:, None]) & is_before[:, None]).any(2)
    current = rows[np.arange(len(rows)), position]
    return np.where(has_stood & (words != current[:, None]), words, NONE)


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


NEAREST = 3  # controls that a line names


def explanation_line(
    dataset: ActivationDataset,
    number: int,
    values: dict[str, np.ndarray],
    controls: tuple[str, ...],
) -> dict[str, Any]:
    """Return what is said of one activation.

    document: part and index. position: from 0. before, token, after: the text around it; the
    token is the last one that the activation knows of. explanation. error: squared, in units of
    the training part's variance. nearest_controls: those that come nearest to the activation, and
    their errors.

    Args:
        dataset: of the activations.
        number: of the sample.
        values: token_ids [t], error [] and control_errors [C].
        controls: names of the C controls.
    """
    pieces, piece = dataset.pieces, int(dataset.piece[number])
    position, tokenizer = int(dataset.position[number]), pieces.store.tokenizer
    errors = dict(zip(controls, values["control_errors"].tolist(), strict=True))
    nearest = sorted(errors, key=lambda name: (errors[name], name))
    return {
        "document": f"{PART_NAMES[pieces.part]}:{int(pieces.document[piece])}",
        "position": position,
        **context_of(tokenizer, pieces.tokens(piece), position)._asdict(),
        "explanation": tokenizer.decode(values["token_ids"]),
        "error": round(float(values["error"]), 6),
        "nearest_controls": {name: round(errors[name], 6) for name in nearest[:NEAREST]},
    }
