"""The network of a ranker. Shapes: B queries, K candidates, P pairs, T positions."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lit_models.seo.encoders import Pooling, TextEncoder, pooled


class CrossEncoder(nn.Module):
    """A query and a document in one row, to one score.

    Args:
        encoder: of the rows.
        pooling: how a row becomes one vector.
        adds_prior: add the first stage's score times a learned weight. The network then begins
            with the first stage's order: its own part of the score is 0.
        has_offset: whether the loss can learn what is added to all scores alike. Where only
            differences count, its gradient would be nothing but rounding.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        pooling: Pooling,
        adds_prior: bool = False,
        has_offset: bool = False,
    ) -> None:
        super().__init__()
        self.encoder, self.pooling = encoder, pooling
        # Without it the bias of the encoder's last norm would only move all scores alike.
        self.dense = nn.Linear(encoder.width, encoder.width)
        self.score = nn.Linear(encoder.width, 1, bias=has_offset)
        self.prior_weight: nn.Parameter | None = None
        if adds_prior:
            for parameter in self.score.parameters():
                nn.init.zeros_(parameter)
            self.prior_weight = nn.Parameter(torch.ones(1))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        segment_ids: Tensor,
        parts: Sequence["Part"] | None = None,
    ) -> Tensor:
        """Return scores [P] of rows [P, T].

        Args:
            input_ids, attention_mask, segment_ids: of a RankingBatch.
            parts: of the rows, computed one after the other; none computes all at once.
        """
        rows = (input_ids, attention_mask, segment_ids)
        if parts is None:
            return self._scores(*rows)
        return torch.cat(
            [self._scores(*(t[first:end, :width] for t in rows)) for first, end, width in parts]
        )

    def candidates(self, pairs: Tensor, index: Tensor, prior: Tensor) -> Tensor:
        """Return scores [B, K], -inf where there is no candidate.

        Args:
            pairs: [P] scores of rows.
            index: [B, K] int64, row of each candidate; -1 = none.
            prior: [B, K] score of the first stage.
        """
        scores = pairs[index.clamp(min=0)]
        if self.prior_weight is not None:
            scores = scores + self.prior_weight * prior.to(scores)
        return scores.masked_fill(index < 0, -torch.inf)

    def _scores(self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask, segment_ids)
        vector = pooled(hidden, attention_mask, self.pooling)
        return self.score(torch.tanh(self.dense(vector))).squeeze(-1)


class Part(NamedTuple):
    """Rows from one to before another, and the tokens of the longest."""

    first: int
    end: int
    width: int


def even_parts(lengths: np.ndarray, number: int) -> list[Part]:
    """Return rows in parts of like sizes, one after the other.

    Args:
        lengths: [P] tokens of each row.
        number: of parts, at most P.
    """
    bounds = [len(lengths) * place // number for place in range(number + 1)]
    return [Part(a, b, int(lengths[a:b].max())) for a, b in pairwise(bounds)]


def places_of_pairs(index: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
    """Return the query of each row, and which of its candidates it is, [P] int64 each.

    Args:
        index: [B, K] int64, row of each candidate; -1 = none.
        num_pairs: P.
    """
    queries, width = index.shape
    # What is no candidate goes to one more row, so that nothing waits for the device.
    row = index.where(index >= 0, num_pairs).flatten()
    place = index.new_zeros(num_pairs + 1)
    place[row] = torch.arange(queries * width, device=index.device)
    return place[:-1] // width, place[:-1] % width
