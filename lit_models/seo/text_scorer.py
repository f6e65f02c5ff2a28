"""The network of the scorer. Batch: ScoredTextBatch. Shapes: B texts, C chunks, D hidden."""

import torch
from torch import Tensor, nn

from datamodules.core.batches import ScoredTextBatch
from lit_models.seo.encoders import Pooling, TextEncoder
from lit_models.seo.heads import Head
from lit_models.training.dropout import keyed_texts

PREFIX = "head_"  # of module names: a head may be called as a method of nn.Module is


class TextScorer(nn.Module):
    """A text, in one chunk or several, to the outputs of all heads.

    Args:
        encoder: of the chunks.
        pooling: how the tokens of a chunk become one vector.
        chunk_pooling: how the chunks of a text do.
        heads: by name.
        learns_weights: one log-variance per head is learnt.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        pooling: Pooling,
        chunk_pooling: Pooling,
        heads: dict[str, Head],
        learns_weights: bool,
    ) -> None:
        super().__init__()
        self.encoder, self.pooling, self.chunk_pooling = encoder, pooling, chunk_pooling
        self.heads = nn.ModuleDict({PREFIX + name: head for name, head in heads.items()})
        self.log_variances = nn.ParameterDict(
            {PREFIX + name: nn.Parameter(torch.zeros(1)) for name in heads if learns_weights}
        )

    def forward(self, batch: ScoredTextBatch) -> dict[str, Tensor]:
        """Return head -> outputs [B, P]."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        chunk_of = batch["chunk_of"]
        row = torch.arange(len(chunk_of), device=chunk_of.device)
        place = row - torch.searchsorted(chunk_of, chunk_of)  # among the chunks of the text
        with keyed_texts(self, chunk_of, place):
            chunks = self.encoder.vectors_of(ids, mask, how=self.pooling)
        vectors = pooled_chunks(chunks, chunk_of, len(batch["weight"]), self.chunk_pooling)
        return {name.removeprefix(PREFIX): head(vectors) for name, head in self.heads.items()}


def pooled_chunks(chunks: Tensor, chunk_of: Tensor, num_texts: int, how: Pooling) -> Tensor:
    """Return one vector per text [B, D].

    Args:
        chunks: [C, D].
        chunk_of: [C] int64, text of each, ascending; every text has one at least.
        num_texts: B.
        how: the mean or the maximum over chunks, or the first chunk's.
    """
    # [B, C, D] only where there are several: the usual text is one chunk.
    if len(chunks) == num_texts:
        return chunks
    is_of = chunk_of == torch.arange(num_texts, device=chunk_of.device)[:, None]  # [B, C]
    if how == "first":
        return chunks[is_of.byte().argmax(1)]
    if how == "mean":  # as a product, whose order of addition is fixed on a GPU too
        return (is_of.to(chunks) @ chunks) / is_of.sum(1, keepdim=True)
    return chunks.masked_fill(~is_of[..., None], -torch.inf).amax(1)
