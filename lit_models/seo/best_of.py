"""Several snippets for each page, of which a ranker chooses the one that fits the query best.

Shapes: B pages, K candidates, N tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from lit_models.causal_lm.generation import Completions, GenerationOptions
from lit_models.seo.ranker import LitRanker


@dataclass(frozen=True)
class BestOf:
    """What is written besides the usual, and who chooses.

    A page without a query keeps the usual snippet: there is nothing to rank by.

    Args:
        ranker: folder of a LitRanker that `unisono export` wrote; one without `prior`.
        num_candidates: K; the first is written as `generation` says, the others are drawn.
        temperature: of the draws.

    Raises:
        ValueError: fewer than two candidates, or a temperature that draws nothing.
    """

    ranker: str
    num_candidates: int = 4
    temperature: float = 0.8

    def __post_init__(self) -> None:
        if self.num_candidates < 2:
            raise ValueError(
                f"best_of.num_candidates must be at least 2, got {self.num_candidates}; leave "
                "best_of out to write one."
            )
        if not self.temperature > 0:
            raise ValueError(f"best_of.temperature must be above 0, got {self.temperature}.")

    def options(self, usual: GenerationOptions) -> list[GenerationOptions]:
        """Return how each candidate is written; every draw has numbers of its own."""
        drawn = [
            replace(usual, temperature=self.temperature, seed=usual.seed + number)
            for number in range(1, self.num_candidates)
        ]
        return [usual, *drawn]

    def loaded_ranker(self) -> LitRanker:
        """Return the ranker, on the CPU.

        Raises:
            FileNotFoundError: there is no such folder.
            ValueError: it holds another module, or a ranker that needs a first stage's scores.
        """
        ranker = LitRanker.from_exported(self.ranker)
        if ranker.adds_prior:
            raise ValueError(
                f"best_of.ranker {self.ranker} adds a first stage's scores, which snippets do not "
                "have; train one with model.prior=false."
            )
        return ranker


def best(
    candidates: Sequence[Completions],
    texts_of: Callable[[Completions], list[str]],
    queries: Sequence[str],
    ranker: LitRanker,
) -> Completions:
    """Return the best candidate of each page; of equal scores, the first.

    Args:
        candidates: K completions of the same pages.
        texts_of: what gives their texts [B].
        queries: [B], "" where there is none.
        ranker: that scores texts for a query.
    """
    texts = [texts_of(candidate) for candidate in candidates]  # [K][B]
    chosen = [
        int(ranker.rank(query, [of_page[row] for of_page in texts]).argmax()) if query else 0
        for row, query in enumerate(queries)
    ]
    rows = range(len(queries))
    fields = zip(*candidates, strict=True)
    return Completions(
        *(
            torch.stack([values[k][row] for k, row in zip(chosen, rows, strict=True)])
            for values in fields
        )
    )
