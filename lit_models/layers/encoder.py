"""Layers of bidirectional encoders, used by the occupation coder and by the encoders of `seo`.

Shapes: B batch, P positions, D hidden, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.layers.linear import Linear
from lit_models.layers.rotary import rotate


class SelfAttention(nn.Module):
    """Multi-head self-attention with rotary positions; no biases, so no key bias either."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        if width % (2 * num_heads):
            raise ValueError(
                f"width {width} must be a multiple of 2 x num_heads ({num_heads}): "
                "change the width or the number of heads."
            )
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width, bias=False)
        self.output = Linear(width, width, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor, rotary: Tensor) -> Tensor:
        """Args: hidden [B, P, D]; mask [B, P] bool; rotary [2, P, D / 2H] cosines and sines."""
        batch, positions, width = hidden.shape
        qkv = self.qkv(hidden).view(batch, positions, 3, self.num_heads, width // self.num_heads)
        q_bhpk, k_bhpk, v_bhpk = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q_bhpk, k_bhpk = rotate(q_bhpk, *rotary), rotate(k_bhpk, *rotary)
        mixed = F.scaled_dot_product_attention(
            q_bhpk, k_bhpk, v_bhpk, attn_mask=mask[:, None, None, :]
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, positions, width))


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward block."""

    def __init__(self, width: int, num_heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = SelfAttention(width, num_heads)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.expand = Linear(width, feed_forward)
        self.contract = Linear(feed_forward, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor, mask: Tensor, rotary: Tensor) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), mask, rotary)
        hidden = hidden + self.dropout(attended)
        inner = F.gelu(self.expand(self.feed_forward_norm(hidden)))
        return hidden + self.dropout(self.contract(inner))


def positions_up_to(lengths: Tensor, size: int) -> Tensor:
    """Mask [B, size] bool, True below each length."""
    return torch.arange(size, device=lengths.device)[None, :] < lengths[:, None]


def rotary_table(positions: int, head_size: int, like: Tensor) -> Tensor:
    """Cosines and sines of the rotary embedding [2, positions, head_size / 2]."""
    steps = torch.arange(0, head_size, 2, device=like.device, dtype=torch.float32) / head_size
    angles = torch.arange(positions, device=like.device)[:, None] * 1000.0**-steps
    return torch.stack([angles.cos(), angles.sin()]).to(like.dtype)
