"""Which documents of a query are learnt from together."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupOptions:
    """The candidates of a query in a training step, drawn anew in every epoch.

    One relevant document is always among them, if there is any. The other places go to judged
    documents, and those left, of which there are at least `mined`, to mined ones.

    Args:
        size: candidates at most.
        mined: places for unjudged documents out of the best of the candidates' source.
        after_rank: best documents of the source that are never mined, since an unjudged document
            so far up may well be relevant.
        unjudged_as_negative: give mined documents grade 0. Unjudged is not irrelevant: without
            this they count in no loss but a teacher's.
        triples: learn from the collection's triples instead, one to a group.

    Raises:
        ValueError: sizes that do not go together, or an option without an effect.
    """

    size: int = 8
    mined: int = 0
    after_rank: int = 0
    unjudged_as_negative: bool = False
    triples: bool = False

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"groups.size must be at least 2, got {self.size}.")
        if not 0 <= self.mined < self.size:
            raise ValueError(
                f"groups.mined must be 0 to {self.size - 1} (groups.size less one judged document),"
                f" got {self.mined}."
            )
        if not self.mined and (self.after_rank or self.unjudged_as_negative):
            name = "after_rank" if self.after_rank else "unjudged_as_negative"
            raise ValueError(
                f"groups.{name} concerns mined documents, and groups.mined is 0; raise that, or "
                f"leave {name} out."
            )
        if self.after_rank < 0:
            raise ValueError(f"groups.after_rank must be 0 or more, got {self.after_rank}.")
        if self.triples and (self.size, self.mined) != (GroupOptions.size, 0):
            raise ValueError(
                "groups.triples gives groups of one relevant and one other document; leave size, "
                "mined and the rest of groups out."
            )

    def num_judged(self, num_judged: int) -> int:
        """Return how many judged documents a group has, of so many."""
        return min(num_judged, self.size - self.mined)

    def num_mined(self, num_judged: int, num_listed: int) -> int:
        """Return how many mined documents a group has.

        Args:
            num_judged: judged documents of the query.
            num_listed: documents that may be mined for it.
        """
        places = self.size - self.num_judged(num_judged) if self.mined else 0
        return min(num_listed, places)

    def minable(self, listed: np.ndarray, judged: np.ndarray) -> np.ndarray:
        """Return the documents that may be mined: no judged one is.

        Args:
            listed: [L] documents of the source, best first.
            judged: [J] all judged documents of the query.
        """
        if not self.mined:
            return listed[:0]
        far = listed[self.after_rank :]
        return far[~np.isin(far, judged)]

    def drawn(self, grades: np.ndarray, num_minable: int, rng: np.random.Generator) -> np.ndarray:
        """Return the places of a group among its judged documents, then the minable ones.

        Args:
            grades: [J] of the judged documents.
            num_minable: documents that may be mined.
            rng: keyed by seed, epoch and sample.
        """
        order = rng.permutation(len(grades))
        relevant = np.flatnonzero(grades[order] > 0)[:1]
        order = np.concatenate([order[relevant], np.delete(order, relevant)])
        judged = order[: self.num_judged(len(grades))]
        mined = rng.permutation(num_minable)[: self.num_mined(len(grades), num_minable)]
        return np.concatenate([judged, len(grades) + mined])
