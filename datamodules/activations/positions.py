"""Which activations are taken: some positions of every document, drawn by the document itself."""

from dataclasses import dataclass

import numpy as np

from datamodules.core.plan import hash_ids

SEEDS_APART = 1_000_003  # more than positions of a document


@dataclass(frozen=True)
class PositionRule:
    """Which positions of a document are taken.

    Args:
        min_position: first position that may be taken, from 0; what comes before has too little
            context to explain.
        per_document: positions of each document; shorter ones give as many as they have.
        seed: another seed draws others.

    Raises:
        ValueError: one of them is outside its range.
    """

    min_position: int = 6
    per_document: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.min_position < 0:
            raise ValueError(f"positions.min_position must be 0 or more, got {self.min_position}.")
        if self.per_document < 1:
            raise ValueError(
                f"positions.per_document must be at least 1, got {self.per_document}; usual is 4."
            )


def drawn_positions(
    sizes: np.ndarray, hashes: np.ndarray, rule: PositionRule
) -> tuple[np.ndarray, np.ndarray]:
    """Return the document [N] and the position [N] of each activation, int64, both ascending.

    Draws are keyed by the document's text, so that neither order nor neighbours change them. Every
    choice of positions of a document is as likely as any other.

    Args:
        sizes: [D] positions of each document.
        hashes: [D] uint64 of their texts.
        rule: how they are drawn.

    Source: Floyd's algorithm (Bentley and Floyd, Programming pearls, CACM 30, 1987), for all
    documents at once.
    """
    open_places = np.maximum(sizes.astype(np.int64) - rule.min_position, 0)
    counts = np.minimum(open_places, rule.per_document)
    drawn = np.full((len(sizes), int(counts.max(initial=0))), np.iinfo(np.int64).max)
    for turn in range(drawn.shape[1]):
        last = np.maximum(open_places - counts + turn, 0)
        keyed = hash_ids(hashes, rule.seed * SEEDS_APART + turn)
        choice = (keyed % (last + 1).astype(np.uint64)).astype(np.int64)
        is_taken = (drawn[:, :turn] == choice[:, None]).any(1)
        is_drawn = turn < counts
        drawn[is_drawn, turn] = np.where(is_taken, last, choice)[is_drawn]
    drawn.sort(1)
    is_place = np.arange(drawn.shape[1]) < counts[:, None]
    return np.repeat(np.arange(len(sizes)), counts), drawn[is_place] + rule.min_position
