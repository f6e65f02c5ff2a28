"""Text encoders of `seo`: tokens in, one vector per row out.

Shapes: R rows, T positions, D hidden, V vocabulary.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.blocks import EncoderLayer, rotary_table
from lit_models.causal_lm.pretrained import model_of, repeated_layers
from lit_models.training.metrics import in_float32

Pooling = Literal["mean", "first", "max"]


class TextEncoder(nn.Module):
    """Base of the encoders."""

    width: int  # D
    pooling: Pooling = "mean"  # over tokens, or the maximum, or the first one's; the module sets it
    keeps_tokens: bool = False  # hidden states [R, T, D] are returned instead

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Return one vector per row [R, D].

        Args:
            input_ids: [R, T] int64, padded at the right.
            attention_mask: [R, T] bool, true at tokens, at least one in each row.
            segment_ids: [R, T] int64, 0 = query or the only text, 1 = document; none is all 0.
        """
        raise NotImplementedError

    def blocks(self) -> list[nn.Module]:
        """Return the layers from the lowest to the highest; none by default."""
        return []

    def pooled(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        """Return one vector per row [R, D] of hidden states [R, T, D]."""
        if self.keeps_tokens:
            return hidden
        if self.pooling == "first":
            return hidden[:, 0]
        mask = attention_mask[..., None]
        if self.pooling == "max":
            return hidden.masked_fill(~mask, -torch.inf).amax(1)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


class TransformerEncoder(TextEncoder):
    """A transformer from scratch, with rotary positions.

    Args:
        width: D.
        num_layers: of the transformer; 0 leaves a bag of embeddings.
        feed_forward: inner width of the feed-forward blocks.
        dropout: probability after embeddings and blocks; never on attention weights.
    """

    def __init__(
        self,
        vocab_size: int,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        feed_forward: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width, self.head_size = width, width // num_heads
        self.tokens = nn.Embedding(vocab_size, width)
        self.segments = nn.Embedding(2, width)
        self.layers = nn.ModuleList(
            EncoderLayer(width, num_heads, feed_forward, dropout) for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.tokens.weight, std=0.1)
        nn.init.normal_(self.segments.weight, std=0.1)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        if segment_ids is None:
            segment_ids = torch.zeros_like(input_ids)
        hidden = self.dropout(self.tokens(input_ids) + self.segments(segment_ids))
        rotary = rotary_table(hidden.shape[1], self.head_size, hidden)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask, rotary)
        return self.pooled(self.norm(hidden), attention_mask)

    def blocks(self) -> list[nn.Module]:
        return list(self.layers)


class PretrainedEncoder(TextEncoder):
    """A model of transformers' AutoModel, such as BERT, without its pooler and its dropout, by its
    config.json; the weights of its folder come in float32, None draws them.

    Raises:
        ValueError: weights are missing or of the wrong shape, or a file is damaged.
    """

    auto_class = "AutoModel"

    def __init__(self, content: dict[str, Any], folder: str | Path | None = None) -> None:
        super().__init__()
        model = model_of(content, folder, auto_class=self.auto_class, may_lack="pooler.")
        if getattr(model, "pooler", None) is not None:
            model.pooler = None  # its parameters would never get a gradient
        self.model = model.train()  # it comes in evaluation mode, and Lightning keeps modes
        self.width = model.config.hidden_size

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        given: dict[str, Tensor] = {}
        if segment_ids is not None and getattr(self.model.config, "type_vocab_size", 0) > 1:
            given["token_type_ids"] = segment_ids
        output = self.model(input_ids=input_ids, attention_mask=attention_mask.long(), **given)
        return self.pooled(output.last_hidden_state, attention_mask)

    @property
    def norm(self) -> nn.Module:
        """The norms behind the last layer, such as ModernBERT's `final_norm`; often none."""
        modules = list(self.model.modules())
        if not self.blocks():  # of a bag of embeddings
            return nn.ModuleList()
        *_, last = self.blocks()[-1].modules()
        behind = modules[modules.index(last) + 1 :]
        sizes = [[p.dim() for p in module.parameters(recurse=False)] for module in behind]
        # A table of relative positions, which layers read, stands there too in MPNet.
        return nn.ModuleList(m for m, dims in zip(behind, sizes, strict=True) if set(dims) == {1})

    def blocks(self) -> list[nn.Module]:
        return repeated_layers(self.model)


UNSEEN = -30.0  # log-weight of tokens that no text has, such as marks: they count nothing


class BagEncoder(TextEncoder):
    """One vector and one weight per token, without a transformer.

    A token that occurs n times in a row counts 1 + ln n times in all. Weights begin as inverse
    document frequencies of the training texts, vectors at random. It needs few texts.
    """

    def __init__(self, vocab_size: int, width: int = 512) -> None:
        super().__init__()
        self.width = width
        self.vectors = nn.Embedding(vocab_size, width)
        self.log_weights = nn.Embedding(vocab_size, 1)
        nn.init.normal_(self.vectors.weight, std=0.1)
        nn.init.zeros_(self.log_weights.weight)

    def start_from(self, num_texts_with: Tensor, num_texts: int) -> None:
        """Set the weights. Args: training texts that hold each token [V], and all of them."""
        frequency = (1 + num_texts_with.double()) / (1 + num_texts)
        log_weights = (1 - frequency.log()).log().masked_fill(num_texts_with == 0, UNSEEN)
        with torch.no_grad():
            self.log_weights.weight.copy_(log_weights[:, None])

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        table = self.vectors.weight
        same = (input_ids[:, :, None] == input_ids[:, None, :]) & attention_mask[:, None, :]
        times = same.sum(-1).clamp(min=1).to(table)  # copies of a token share what all count
        weights = self.log_weights(input_ids).squeeze(-1).exp() * (1 + times.log()) / times
        if self.pooling != "mean" or self.keeps_tokens:
            return self.pooled(self.vectors(input_ids) * weights[..., None], attention_mask)
        weights = weights * (attention_mask / attention_mask.sum(1, keepdim=True).clamp(min=1))
        # On a GPU torch has no gradient of such weights in half precision.
        options = {"per_sample_weights": in_float32(weights)}
        return F.embedding_bag(input_ids, in_float32(table), mode="sum", **options).to(table)
