"""Decoding of T5's layout, one token of each row at a time.

transformers' decoder concatenates its cache and makes masks at each step, and has a copy of the
source for each hypothesis; here the same weights write into room that is there.

Shapes: L layers, B records, O hypotheses of each, R = B x O rows, S source positions, D hidden, H
heads, K head size, N positions that there is room for.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T5_TYPES = ("t5", "mt5", "umt5")  # ByT5 is t5
ROOM = 80  # positions that are made at a time; targets of 64 tokens need no more
Product = Callable[[Tensor], Tensor]


class T5Cache:
    """Keys and values of the sources, once for each, and of the tokens so far.

    Args:
        decoder: the T5Stack that writes, in eval mode; its weights must not change meanwhile.
        memory: [B, S, D], of the encoder.
        mask: [B, S] bool.
        hypotheses: O.
    """

    def __init__(self, decoder: Any, memory: Tensor, mask: Tensor, hypotheses: int) -> None:
        self.decoder, self.position = decoder, 0
        attentions = [block.layer[1].EncDecAttention for block in decoder.block]
        self.heads = (attentions[0].n_heads, attentions[0].key_value_proj_dim)
        kvs = [part(memory).unflatten(2, self.heads) for a in attentions for part in (a.k, a.v)]
        kv = torch.stack([x.transpose(1, 2) for x in kvs]).unflatten(0, (-1, 2))
        self.memory_kv = kv  # [L, 2, B, H, S, K]
        size = (len(memory) * hypotheses, self.heads[0], 0, self.heads[1])
        self.past_kv = kv.new_empty(len(kv), 2, *size)  # [L, 2, R, H, N, K]
        self.is_gated = decoder.config.is_gated_act
        self.products = [_products(block, self.is_gated) for block in decoder.block]
        bias = kv.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(kv.dtype).min)
        self.memory_bias = bias[:, None, None, :]  # [B, 1, 1, S]
        self.biases: list[Tensor] = []  # of each layer by distance, the farthest first [1, H, 1, N]

    def step(self, tokens: Tensor) -> Tensor:
        """Return the hidden states [R, D] behind the next tokens [R]; the cache grows."""
        first, end = self.position, self.position + 1
        if end > self.past_kv.shape[4]:
            self._make_room(first + ROOM)
        hidden, past_kv = self.decoder.embed_tokens(tokens), self.past_kv[..., :end, :]
        size = (len(hidden), -1, *self.heads)
        parts = (self.decoder.block, self.products, self.biases, past_kv, self.memory_kv)
        for block, products, bias, past, memory in zip(*parts, strict=True):
            own, cross, feed_forward = block.layer
            to_qkv, to_own, to_query, to_cross, widen, narrow = products
            qkv = to_qkv(_normed(hidden, own)).view(size).transpose(0, 1)
            past[:, :, :, first] = qkv[1:]
            hidden = hidden + to_own(_read(qkv[0], past, bias[..., -end:]))
            query = to_query(_normed(hidden, cross)).view(size)[:, 0]
            hidden = hidden + to_cross(_read(query, memory, self.memory_bias))
            inner, *linear = widen(_normed(hidden, feed_forward)).chunk(1 + self.is_gated, 1)
            inner = feed_forward.DenseReluDense.act(inner)
            hidden = hidden + narrow(inner * linear[0] if linear else inner)
        self.position = end
        return self.decoder.final_layer_norm(hidden)

    def reorder(self, rows: Tensor) -> None:
        """Hypotheses continue from others of the same record [R]."""
        past_kv = self.past_kv[..., : self.position, :]
        past_kv.copy_(past_kv[:, :, rows])

    def keep_records(self, rows: Tensor, hypotheses: int = 1) -> None:
        """Goes on with some records only. Args: rows [B'] int64."""
        self.memory_bias = self.memory_bias[rows]
        _move(self.memory_kv, rows)
        self.memory_kv = self.memory_kv[:, :, : len(rows)]
        offset = torch.arange(hypotheses, device=rows.device)
        rows = (rows[:, None] * hypotheses + offset).flatten()
        _move(self.past_kv[..., : self.position, :], rows)
        self.past_kv = self.past_kv[:, :, : len(rows)]

    def _make_room(self, size: int) -> None:
        """Have room for so many positions."""
        past_kv = self.past_kv
        self.past_kv = past_kv.new_empty(*past_kv.shape[:4], size, self.heads[1])
        self.past_kv[..., : self.position, :] = past_kv
        self.biases, dtype = [], self.memory_bias.dtype
        for block in self.decoder.block:
            attention = block.layer[0].SelfAttention
            if attention.has_relative_attention_bias:  # T5's first layer has it for all
                bias = attention.compute_bias(1, size, past_seen_tokens=size - 1).to(dtype)
            self.biases.append(bias)


def _product(*layers: nn.Module) -> Product:
    """Return what linear layers make of rows [R, ...], side by side; plain ones are one product on
    a CPU, with weights that lie as it reads them."""
    weights = [layer.weight for layer in layers if type(layer) is nn.Linear]  # adapters are not
    is_plain = len(weights) == len(layers) and weights[0].device.type == "cpu"
    if is_plain and not torch.is_autocast_enabled("cpu"):
        weight = torch.cat(weights).T.contiguous()
        return lambda rows: rows @ weight
    return lambda rows: torch.cat([layer(rows) for layer in layers], 1)


def _products(block: Any, is_gated: bool) -> list[Product]:
    """Return those of a layer in their order."""
    own, cross = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
    dense = block.layer[2].DenseReluDense
    widened = [dense.wi_0, dense.wi_1] if is_gated else [dense.wi]
    groups = [[own.q, own.k, own.v], [own.o], [cross.q], [cross.o], widened, [dense.wo]]
    return [_product(*layers) for layers in groups]


def _read(query: Tensor, kv: Tensor, bias: Tensor) -> Tensor:
    """Return what queries [R, H, K] read of keys and values [2, B, H, n, K]: [R, H x K]; hypotheses
    queue up over one memory."""
    key, value = kv
    rows, *heads = query.shape
    query = query.view(len(key), -1, *heads).transpose(1, 2)  # [B, H, O, K]
    shares = (query @ key.mT).add_(bias).softmax(-1)  # T5 scales no product
    return (shares @ value).transpose(1, 2).reshape(rows, -1)


def _move(x: Tensor, rows: Tensor) -> None:
    """Bring some rows of [L, 2, R, ...] to its beginning; those in their place are not copied."""
    places = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
    x[:, :, places] = x[:, :, rows[places]]


def _normed(hidden: Tensor, layer: Any) -> Tensor:
    norm = layer.layer_norm
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
