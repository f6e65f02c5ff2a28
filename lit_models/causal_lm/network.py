"""A compact decoder that covers GPT-2 and Llama, written once.

Shapes: R rows, T positions, D hidden, H heads, G key and value heads, K head size, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.causal_lm.attention import Documents, attend, documents_of
from lit_models.causal_lm.cache import KeyValueCache

INITIAL_STD = 0.02


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder.

    Args:
        vocab_size: rows of the embedding; none takes the tokenizer's.
        max_positions: longest document that it is made for.
        hidden_size: D.
        num_layers: blocks.
        num_heads: H.
        num_kv_heads: G, a divisor of H; none is H.
        feed_forward: inner width of the feed-forward part; none is 4 D, or 8/3 D for swiglu.
        norm: RMSNorm or LayerNorm.
        norm_eps: its epsilon.
        positions: rotary, or a learned table of max_positions rows.
        rope_theta: base of the rotary frequencies.
        activation: swiglu, or gelu in its tanh form.
        bias: of linear layers; keys have none, since it changes nothing.
        tied: the head shares the embedding's weights.
        dropout: after embedding, attention and feed-forward.
    """

    vocab_size: int | None = None
    max_positions: int = 1024
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    feed_forward: int | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    positions: Literal["rotary", "learned"] = "rotary"
    rope_theta: float = 10_000.0
    activation: Literal["swiglu", "gelu"] = "swiglu"
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0

    @property
    def kv_heads(self) -> int:
        """G."""
        return self.num_kv_heads or self.num_heads

    @property
    def inner_size(self) -> int:
        """Inner width of the feed-forward part."""
        if self.feed_forward is not None:
            return self.feed_forward
        if self.activation == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // 3 // 8) * 8


class Attention(nn.Module):
    """Grouped-query attention with rotary positions or none."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.kv_heads
        self.head_size = config.hidden_size // config.num_heads
        width, narrow = config.hidden_size, self.num_kv_heads * self.head_size
        self.q_proj = nn.Linear(width, width, bias=config.bias)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=config.bias)
        self.o_proj = nn.Linear(width, width, bias=config.bias)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, documents: Documents
    ) -> Tensor:
        q = self._heads(self.q_proj(hidden), self.num_heads)  # [R, H, T, K]
        k = self._heads(self.k_proj(hidden), self.num_kv_heads)  # [R, G, T, K]
        v = self._heads(self.v_proj(hidden), self.num_kv_heads)
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        attended = attend(q, k, v, documents)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor, num_heads: int) -> Tensor:
        return x.unflatten(-1, (num_heads, self.head_size)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU, or two layers with GELU between them."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.inner_size
        self.up_proj = nn.Linear(width, inner, bias=config.bias)
        self.down_proj = nn.Linear(inner, width, bias=config.bias)
        self.gate_proj = (
            nn.Linear(width, inner, bias=config.bias) if config.activation == "swiglu" else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        if self.gate_proj is None:
            return self.down_proj(F.gelu(self.up_proj(hidden), approximate="tanh"))
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and beside a residual path."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = _norm(config), Attention(config)
        self.feed_forward_norm, self.feed_forward = _norm(config), FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, documents: Documents
    ) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), rotation, documents)
        hidden = hidden + self.dropout(attended)
        return hidden + self.dropout(self.feed_forward(self.feed_forward_norm(hidden)))


class Decoder(nn.Module):
    """Tokens to hidden states, and to logits by `head`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = (
            nn.Embedding(config.max_positions, config.hidden_size)
            if config.positions == "learned"
            else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the hidden states [R, T, D] from which `head` makes logits.

        Args:
            input_ids: [R, T] int64.
            position_ids: [R, T] int64, from 0 in every document.
            document_ids: [R, T] int64, ascending in a row, -1 = padding.
            cache: of generation, where every row is one document; `position_ids` go on from it.
        """
        documents = documents_of(document_ids) if cache is None else Documents()
        hidden = self.embedding(input_ids)  # [R, T, D]
        rotation = None
        if self.positions is None:
            rotation = rotations(self.config, position_ids, hidden.dtype)
        else:
            hidden = hidden + self.positions(position_ids)
        hidden = self.dropout(hidden)
        for index, layer in enumerate(self.layers):
            if cache is not None:
                documents = Documents(None, cache.places.mask, cache.layers[index])
            hidden = layer(hidden, rotation, documents)
        return self.norm(hidden)

    def _initialise(self) -> None:
        if self.config.tied:
            self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.num_layers if is_residual else 1
                nn.init.normal_(parameter, std=INITIAL_STD / depth**0.5)


def rotations(
    config: DecoderConfig, position_ids: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [R, 1, T, K / 2] of the angle of each position and frequency.

    Source: Su et al. 2021, section 3.2.2.
    """
    size = config.hidden_size // config.num_heads
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device=position_ids.device) / size
    angles = position_ids.unsqueeze(-1) * config.rope_theta**-exponents
    angles = angles.unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x [R, H, T, K] with the pairs (i, i + K / 2) of each head turned by their angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
