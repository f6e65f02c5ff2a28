"""Network blocks shared by several families.

Shapes: B batch, P positions, D hidden, H heads, K head size; T target positions, O hypotheses of a
record.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SelfAttention(nn.Module):
    """Multi-head self-attention with rotary positions, without biases."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(
                f"width {width} must be a multiple of 2 x num_heads ({num_heads}): "
                "change the width or the number of heads."
            )
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor, rotary: Tensor) -> Tensor:
        """Args: hidden [B, P, D]; mask [B, P] bool; rotary [2, P, D / 2H] cosines and sines."""
        batch, positions, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, positions, 3, self.num_heads, width // self.num_heads)
        q_bhpk, k_bhpk, v_bhpk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_bhpk, k_bhpk = rotate(q_bhpk, *rotary), rotate(k_bhpk, *rotary)
        mixed = F.scaled_dot_product_attention(q_bhpk, k_bhpk, v_bhpk, mask[:, None, None, :])
        return self.output(mixed.transpose(1, 2).reshape(batch, positions, width))


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward block."""

    def __init__(self, width: int, num_heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, feed_forward)
        self.contract = nn.Linear(feed_forward, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor, rotary: Tensor) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), mask, rotary)
        hidden = hidden + self.dropout(attended)
        inner = F.gelu(self.expand(self.feed_forward_norm(hidden)))
        return hidden + self.dropout(self.contract(inner))


class DecoderLayer(nn.Module):
    """Pre-norm block of causal self-attention, cross-attention to the memory, and feed-forward."""

    forward_methods: ClassVar[tuple[str, ...]] = ("project",)  # see `ExactModule.blocks`

    def __init__(
        self, width: int, memory_width: int, num_heads: int, feed_forward: int, dropout: float
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.self_norm = nn.LayerNorm(width)
        self.self_qkv = nn.Linear(width, 3 * width, bias=False)
        self.self_output = nn.Linear(width, width, bias=False)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_query = nn.Linear(width, width, bias=False)
        self.cross_kv = nn.Linear(memory_width, 2 * width, bias=False)
        self.cross_output = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, feed_forward)
        self.contract = nn.Linear(feed_forward, width)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        memory_kv: tuple[Tensor, Tensor],
        mask: Tensor,
        past: tuple[Tensor, Tensor] | None = None,
        rotary: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return hidden states of the new positions [B x O, T, D], a record's O hypotheses side by
        side, and keys and values of all positions so far; with a `past`, T is 1. Hypotheses share
        the memory's keys and values [B, H, P, D / H] and mask [B, 1, 1, P]. `rotary`
        [2, T, D / 2H] is for the new positions, `None` without rotary embedding.
        """
        mixed, kv = self.self_attention(self.self_norm(hidden), past, rotary)
        hidden = hidden + self.dropout(mixed)
        read = self.cross_attention(self.cross_norm(hidden), memory_kv, mask)
        hidden = hidden + self.dropout(read)
        inner = F.gelu(self.expand(self.feed_forward_norm(hidden)))
        return hidden + self.dropout(self.contract(inner)), kv

    def self_attention(
        self, hidden: Tensor, past: tuple[Tensor, Tensor] | None, rotary: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return what new positions read from those up to them [B x O, T, D], and keys and values
        of all positions; arguments as in `forward`."""
        rows, num_new, width = hidden.shape
        qkv = self.self_qkv(hidden).view(rows, num_new, 3, self.num_heads, -1)
        q_bhtk, k_bhtk, v_bhtk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if rotary is not None:
            q_bhtk, k_bhtk = rotate(q_bhtk, *rotary), rotate(k_bhtk, *rotary)
        if past is not None:
            k_bhtk = torch.cat([past[0], k_bhtk], dim=2)
            v_bhtk = torch.cat([past[1], v_bhtk], dim=2)
        mixed = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=past is None)
        mixed = mixed.transpose(1, 2).reshape(rows, num_new, width)
        return self.self_output(mixed), (k_bhtk, v_bhtk)

    def cross_attention(
        self, hidden: Tensor, memory_kv: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """Return what new positions [B x O, T, D] read from the memory; see `forward`."""
        # Queries do not see each other: a record's hypotheses are one long query of its memory.
        query = self.cross_query(hidden)
        query = query.view(len(mask), -1, self.num_heads, hidden.shape[2] // self.num_heads)
        read = F.scaled_dot_product_attention(query.transpose(1, 2), *memory_kv, attn_mask=mask)
        return self.cross_output(read.transpose(1, 2).reshape(hidden.shape))

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a memory [B, P, D], computed once per text."""
        kv = self.cross_kv(memory).view(*memory.shape[:2], 2, self.num_heads, -1)
        k_bhpk, v_bhpk = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return k_bhpk, v_bhpk


@dataclass
class DecoderCache:
    """Cache of decoding: per layer, keys and values of the memory and of the positions so far."""

    memory_kv: list[tuple[Tensor, Tensor]]  # [B, H, P, D / H] each
    mask: Tensor  # [B, 1, 1, P]
    summary: Tensor | None = None  # [B, D], position 0 of the memory, if the decoder reads it
    past_kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # [B x O, H, t, D / H] each
    position: int = 0

    def through(
        self, layers: Iterable[nn.Module], hidden: Tensor, rotary: Tensor | None = None
    ) -> Tensor:
        """Return the layers' output for the next position [B x O, 1, D], and keep its keys and
        values; arguments as in `DecoderLayer.forward`."""
        pasts, self.past_kv = self.past_kv or repeat(None), []
        for layer, kv, past in zip(layers, self.memory_kv, pasts, strict=False):
            hidden, whole = layer(hidden, kv, self.mask, past, rotary)
            self.past_kv.append(whole)
        self.position += 1
        return hidden

    def reorder(self, rows: Tensor) -> None:
        """Let hypotheses continue from others of the same record, by their rows [B x O]."""
        self.past_kv = [(key[rows], value[rows]) for key, value in self.past_kv]

    def keep_records(self, rows: Tensor, hypotheses: int = 1) -> None:
        """Keep some records only. Args: rows [B'] int64."""
        self.memory_kv = [(key[rows], value[rows]) for key, value in self.memory_kv]
        self.mask = self.mask[rows]
        self.summary = None if self.summary is None else self.summary[rows]
        offset = torch.arange(hypotheses, device=rows.device)
        self.reorder((rows[:, None] * hypotheses + offset).flatten())


def positions_up_to(lengths: Tensor, size: int) -> Tensor:
    """Return a mask [B, size] bool, True below each length."""
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]


def rotary_table(positions: int, head_size: int, like: Tensor) -> Tensor:
    """Return cosines and sines of the rotary embedding [2, positions, head_size / 2].

    Source: Su et al. 2021, section 3.2.2.
    """
    steps = torch.arange(0, head_size, 2, device=like.device, dtype=torch.float32) / head_size
    angles = torch.arange(positions, device=like.device)[:, None] * 1000.0**-steps
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Return x [B, H, P, K] with the pairs (i, i + K / 2) of each head rotated by their angles.

    Args:
        x: queries or keys.
        cosine: cosines of the angles, [B or 1, 1, P, K / 2] or [P, K / 2].
        sine: sines, as `cosine`.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def layer_depths(root: nn.Module, encoder: Any) -> dict[str, int]:
    """Return name of each encoder parameter in `root` -> number of layers below the heads.

    The highest layer has 1; embeddings are one below the lowest layer.

    Args:
        encoder: part of `root`, with `blocks()` from the lowest up, and its last norm, if it has
            one, as `norm`.
    """
    blocks = encoder.blocks()
    depth_of = {id(p): len(blocks) + 1 for p in encoder.parameters()}
    depth_of |= {id(p): len(blocks) - i for i, b in enumerate(blocks) for p in b.parameters()}
    if hasattr(encoder, "norm"):
        depth_of |= {id(p): 1 for p in encoder.norm.parameters()}
    return {n: depth_of[id(p)] for n, p in root.named_parameters() if id(p) in depth_of}


def layer_rates(root: nn.Module, encoder: Any, layer_decay: float) -> dict[str, float]:
    """Return name of each encoder parameter in `root` -> factor of its learning rate: `layer_decay`
    to the power of its depth, see `layer_depths`.

    Raises:
        ValueError: layer_decay outside (0, 1].
    """
    if not 0 < layer_decay <= 1:
        raise ValueError(f"layer_decay must be above 0 and at most 1, got {layer_decay}.")
    return {name: layer_decay**depth for name, depth in layer_depths(root, encoder).items()}
