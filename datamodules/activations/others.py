"""Draws of other activations, keyed by the sample alone.

Shapes: N activations, B of a micro-batch, W wrong ones of each.
"""

import numpy as np

from datamodules.core.plan import hash_ids


def partners(document: np.ndarray) -> np.ndarray:
    """Return [N] for each activation another one, of another document if there are two.

    Samples stand in a keyed random order of documents, and each takes the one half a round on:
    every sample is the partner of one, unless a document holds more than half of them.
    """
    order = np.lexsort((np.arange(len(document)), document, hash_ids(document, 1)))
    others = np.empty(len(document), np.int64)
    others[order] = np.roll(order, -(len(order) // 2))
    alone = np.flatnonzero(document[others] == document)  # all of the same document
    if len(alone):
        rest = order[document[order] != document[alone[0]]]
        others[alone] = np.resize(rest, len(alone)) if len(rest) else others[alone]
    return others


class WrongOnes:
    """Wrong activations, W for each sample of a part: those of other samples at the same token [N],
    which share what the token alone says."""

    def __init__(self, tokens: np.ndarray, number: int) -> None:
        self.tokens, self.number = tokens, number
        self.order, self.counts = np.argsort(tokens, kind="stable"), np.bincount(tokens)
        self.ends = np.cumsum(self.counts)

    def of(self, numbers: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Return [B, W] int64 for samples [B] with keys [B] uint64 of their draws: never a sample
        itself, but where no other is at its token."""
        tokens, turns = self.tokens[numbers], np.arange(self.number, dtype=np.uint64)
        with np.errstate(over="ignore"):
            drawn = hash_ids(keys[:, None] + turns, 1)  # [B, W]
        ends, counts = self.ends[tokens][:, None], self.counts[tokens][:, None]  # [B, 1]
        places = (drawn % np.maximum(counts - 1, 1).astype(np.uint64)).astype(np.int64)
        found = self.order[ends - counts + places]
        # The last one of a token is not drawn, and stands where the sample itself would.
        return np.where(found == numbers[:, None], self.order[ends - 1], found)
