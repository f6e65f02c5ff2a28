"""A text as the weighted sum of its distinct tokens: a linear model of words, learnt.

Shapes: R rows, T positions, D hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.seo.encoders import Pooling, TextEncoder

VECTOR_STD = 0.1
UNSEEN = -30.0  # log-weight of tokens that no text has, such as marks: they count nothing


class BagEncoder(TextEncoder):
    """One vector and one weight per token, without a transformer; for pooling `mean`.

    A token that occurs n times in a row counts 1 + ln n times in all. Weights begin as inverse
    document frequencies of the training texts, vectors at random. It needs few texts and no
    order of words, and learns in a minute on one core.

    Args:
        vocab_size: V.
        width: D.
    """

    def __init__(self, vocab_size: int, width: int = 512) -> None:
        super().__init__()
        self.width = width
        self.vectors = nn.Embedding(vocab_size, width)
        self.log_weights = nn.Embedding(vocab_size, 1)
        nn.init.normal_(self.vectors.weight, std=VECTOR_STD)
        nn.init.zeros_(self.log_weights.weight)

    def start_from(self, num_texts_with: Tensor, num_texts: int) -> None:
        """Set the weights before training.

        Args:
            num_texts_with: [V], training texts that hold each token.
            num_texts: of the training.
        """
        frequency = (1 + num_texts_with.double()) / (1 + num_texts)
        log_weights = (1 - frequency.log()).log().masked_fill(num_texts_with == 0, UNSEEN)
        with torch.no_grad():
            self.log_weights.weight.copy_(log_weights[:, None])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        weights = self._weights(input_ids, attention_mask)
        return self.vectors(input_ids) * weights[..., None]

    def vectors_of(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        segment_ids: Tensor | None = None,
        how: Pooling = "mean",
    ) -> Tensor:
        """Return one vector per row [R, D], as the base class does; means are summed at once."""
        if how != "mean":
            return super().vectors_of(input_ids, attention_mask, segment_ids, how)
        share = attention_mask / attention_mask.sum(1, keepdim=True).clamp(min=1)
        weights = self._weights(input_ids, attention_mask) * share
        table = self.vectors.weight
        return F.embedding_bag(input_ids, table, mode="sum", per_sample_weights=weights.to(table))

    def blocks(self) -> list[nn.Module]:
        return []

    def _weights(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return what each token counts [R, T]; copies of one share what they count together."""
        same = (input_ids[:, :, None] == input_ids[:, None, :]) & attention_mask[:, None, :]
        times = same.sum(-1).clamp(min=1).to(self.vectors.weight)
        return self.log_weights(input_ids).squeeze(-1).exp() * (1 + times.log()) / times
