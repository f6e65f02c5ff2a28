"""Which activations are taken: some positions of every document, drawn by the document itself."""

from dataclasses import dataclass

import numpy as np

from datamodules.plan import rng_for


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

    Draws are keyed by the document's text, so that neither order nor neighbours change them.

    Args:
        sizes: [D] positions of each document.
        hashes: [D] uint64 of their texts.
        rule: how they are drawn.
    """
    counts = np.clip(sizes - rule.min_position, 0, rule.per_document)
    drawn = []
    for size, key, count in zip(sizes.tolist(), hashes.tolist(), counts.tolist(), strict=True):
        if count:
            choice = rng_for(rule.seed, 0, key).permutation(size - rule.min_position)[:count]
            drawn.append(np.sort(choice) + rule.min_position)
    positions = np.concatenate(drawn) if drawn else np.empty(0, np.int64)
    return np.repeat(np.arange(len(sizes)), counts), positions.astype(np.int64)
