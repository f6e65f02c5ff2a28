"""Decoding of T5's layout, one token of each row at a time.

transformers' decoder concatenates its cache and makes masks at each step, and has a copy of the
source for each hypothesis; here the same layers write into room that is there.

Shapes: B records, O hypotheses of each, R = B x O rows, S source positions, D hidden, H heads, K
head size, N positions that there is room for.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.blocks import DecoderCache

T5_TYPES = ("t5", "mt5", "umt5")  # ByT5 is t5
ROOM = 32  # positions at first; doubled when they are full


class T5Cache(DecoderCache):
    """Keys and values of the sources [B, H, S, K], once for each, and of the tokens so far
    [R, H, N, K], by layer.

    Args:
        decoder: the T5Stack that writes, in eval mode; its layers are called, so adapters count.
        memory: [B, S, D], of the encoder.
        mask: [B, S] bool.
        hypotheses: O.
    """

    def __init__(self, decoder: Any, memory: Tensor, mask: Tensor, hypotheses: int) -> None:
        super().__init__([], mask)
        self.decoder = decoder
        for block in decoder.block:
            attention = block.layer[1].EncDecAttention
            k_bhsk, v_bhsk = (
                _heads(part(memory), len(memory), attention).contiguous()
                for part in (attention.k, attention.v)
            )
            self.memory_kv.append((k_bhsk, v_bhsk))
            empty = k_bhsk.new_empty(len(memory) * hypotheses, k_bhsk.shape[1], 0, k_bhsk.shape[3])
            self.past_kv.append((empty, empty))
        bias = torch.zeros_like(mask, dtype=k_bhsk.dtype)
        bias = bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        self.mask = bias[:, None, None, :]  # [B, 1, 1, S], added to scores
        self.biases: list[Tensor] = []  # of each layer by distance, the farthest first [1, H, 1, N]

    def step(self, tokens: Tensor) -> Tensor:
        """Return the hidden states [R, D] behind the next tokens [R]; the cache grows."""
        first, end = self.position, self.position + 1
        if end > self.past_kv[0][0].shape[2]:
            self._make_room(max(ROOM, 2 * first))
        hidden = self.decoder.embed_tokens(tokens)
        layers = zip(self.decoder.block, self.past_kv, self.memory_kv, self.biases, strict=True)
        for block, (past_k, past_v), memory_kv, bias in layers:
            own, cross, feed_forward = block.layer
            attention, normed = own.SelfAttention, _normed(hidden, own)
            past_k[:, :, first] = attention.k(normed).view(past_k.shape[0], past_k.shape[1], -1)
            past_v[:, :, first] = attention.v(normed).view(past_v.shape[0], past_v.shape[1], -1)
            kv, near = (past_k[:, :, :end], past_v[:, :, :end]), bias[..., -end:]
            hidden = hidden + _read(attention, normed, kv, near)
            normed, attention = _normed(hidden, cross), cross.EncDecAttention
            hidden = hidden + _read(attention, normed, memory_kv, self.mask)
            hidden = hidden + feed_forward.DenseReluDense(_normed(hidden, feed_forward))
        self.position = end
        return self.decoder.final_layer_norm(hidden)

    def _make_room(self, size: int) -> None:
        """Have room for so many positions."""
        more = (0, 0, 0, size - self.position)
        self.past_kv = [(F.pad(key, more), F.pad(value, more)) for key, value in self.past_kv]
        self.biases, dtype = [], self.mask.dtype
        for block in self.decoder.block:
            attention = block.layer[0].SelfAttention
            if attention.has_relative_attention_bias:  # T5's first layer has it for all
                bias = attention.compute_bias(1, size, past_seen_tokens=size - 1).to(dtype)
            self.biases.append(bias)


def _heads(x: Tensor, batch: int, attention: Any) -> Tensor:
    """Return [batch, H, n, K] of [..., H x K]."""
    return x.view(batch, -1, attention.n_heads, attention.key_value_proj_dim).transpose(1, 2)


def _read(attention: Any, hidden: Tensor, kv: tuple[Tensor, Tensor], bias: Tensor) -> Tensor:
    """Return what rows [R, D] read of keys and values; hypotheses queue up over one memory."""
    query = _heads(attention.q(hidden), len(kv[0]), attention)
    shares = (query @ kv[0].transpose(2, 3) + bias).softmax(-1)  # T5 scales no product
    return attention.o((shares @ kv[1]).transpose(1, 2).reshape(len(hidden), -1))


def _normed(hidden: Tensor, layer: Any) -> Tensor:
    norm = layer.layer_norm
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
