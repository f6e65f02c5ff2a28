"""Exact match, chrF and BLEU of generated targets, from sums over samples.

Counts are summed over batches and ranks, so that a score equals that of all texts of the split at
once.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from lit_models.training.metrics import SumCount

CHARACTER_ORDER, CHRF_BETA = 6, 2
BLEU_ORDER = 4


class Counts(Metric):
    """Sums over samples of n counts, float64."""

    sums: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        zeros = torch.zeros(number, dtype=torch.float64)
        self.add_state("sums", zeros, dist_reduce_fx="sum")

    def update(self, counts: Sequence[Sequence[int]], weight: Tensor) -> None:
        """Add the counts of samples [B][n], weighted by [B]."""
        rows = torch.tensor(counts, dtype=torch.float64, device=weight.device)
        self.sums = self.sums + (rows * weight.double()[:, None]).sum(0)

    def compute(self) -> Tensor:
        """Return the sums [n]."""
        return self.sums


class ChrF(Counts):
    """Character n-gram F-score, 0 to 100, without whitespace.

    Source: Popović 2015; as sacrebleu computes it for a corpus with one reference per text.
    """

    def __init__(self) -> None:
        super().__init__(3 * CHARACTER_ORDER)

    @staticmethod
    def counts_of(text: str, target: str) -> list[int]:
        """Return, for each n, the number of n-grams of a text, of its target and in common."""
        found: list[int] = []
        both = ["".join(one.split()) for one in (text, target)]
        for n in range(1, CHARACTER_ORDER + 1):
            own, other = (Counter(s[i : i + n] for i in range(len(s) - n + 1)) for s in both)
            found += [own.total(), other.total(), (own & other).total()]
        return found

    def compute(self) -> Tensor:
        """Return the score, [] float64; NaN without samples."""
        written, asked, matched = self.sums.view(-1, 3).T
        if not matched.any():
            return asked.sum() * 0 / asked.sum()
        is_there = (written > 0) & (asked > 0)
        precision = (matched / written)[is_there].mean()
        recall = (matched / asked)[is_there].mean()
        factor = CHRF_BETA**2
        return 100 * (1 + factor) * precision * recall / (factor * precision + recall)


class Bleu(Counts):
    """BLEU, 0 to 100, as by sacrebleu with its tokenisation (13a) and smoothing."""

    def __init__(self) -> None:
        super().__init__(2 * BLEU_ORDER + 2)

    @cached_property
    def scorer(self) -> Any:
        """Scorer of sacrebleu."""
        from sacrebleu.metrics import BLEU  # imported only when scores are computed

        return BLEU(effective_order=True)

    def counts_of(self, text: str, target: str) -> list[int]:
        """Return the numbers of matching n-grams for each n, of all n-grams of the text for each n,
        of its words, and of its target's words."""
        done = self.scorer.sentence_score(text, [target])
        return [*done.counts, *done.totals, done.sys_len, done.ref_len]

    def compute(self) -> Tensor:
        """Return the score, [] float64; NaN without samples."""
        counts = self.sums.long().tolist()
        if not counts[-1]:
            return self.sums.new_full((), torch.nan)
        right, written = counts[:BLEU_ORDER], counts[BLEU_ORDER:-2]
        done = self.scorer.compute_bleu(right, written, *counts[-2:], smooth_method="exp")
        return self.sums.new_tensor(done.score)


class WrittenMetrics(nn.ModuleDict):
    """All scores of one split's targets: `exact_match` (0 to 1), `chrf` and `bleu` (0 to 100)."""

    def __init__(self) -> None:
        super().__init__({"exact_match": SumCount(), "chrf": ChrF(), "bleu": Bleu()})

    def add_batch(self, texts: Sequence[str], targets: Sequence[str], weight: Tensor) -> Tensor:
        """Add one batch, and return which texts equal their targets [B] bool. Args: generated texts
        [B], targets [B], weight [B]."""
        pairs = list(zip(texts, targets, strict=True))
        is_right = torch.tensor([text == target for text, target in pairs], device=weight.device)
        self["exact_match"].update(is_right * weight, weight)
        for name in ("chrf", "bleu"):
            metric: Any = self[name]
            metric.update([metric.counts_of(*pair) for pair in pairs], weight)
        return is_right
