"""A compact decoder that covers GPT-2 and Llama, written once.

Shapes: R rows, T positions, D hidden, H heads, G key and value heads, K head size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lit_models.blocks import rotate
from lit_models.causal_lm.attention import Documents, attend, documents_of
from lit_models.causal_lm.cache import GrowingCache, KeyValueCache
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.rotary import frequencies, rotations
from lit_models.training.sharding import Split

INITIAL_STD = 0.02


class Attention(nn.Module):
    """Grouped-query attention with rotary positions or none."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        width, narrow = config.hidden_size, config.kv_heads * self.head_size
        self.q_proj = nn.Linear(width, width, bias=config.bias)
        self.k_proj = nn.Linear(width, narrow, bias=False)
        self.v_proj = nn.Linear(width, narrow, bias=config.bias)
        self.o_proj = nn.Linear(width, width, bias=config.bias)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, documents: Documents
    ) -> Tensor:
        q = self._heads(self.q_proj(hidden))  # [R, H, T, K]
        k, v = self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))  # [R, G, T, K]
        if rotation is not None:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        attended = attend(q, k, v, documents)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        # As many as are here: devices may share them, see `Decoder.tensor_plan`.
        return x.unflatten(-1, (-1, self.head_size)).transpose(1, 2)


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
    """Attention and feed-forward, each after a norm and beside a residual path.

    Attributes:
        recomputes: in training keep no activations, and compute them again in the backward pass.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.recomputes = False
        self.attention_norm, self.attention = _norm(config), Attention(config)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.feed_forward_norm, self.feed_forward = _norm(config), FeedForward(config)
        self.feed_forward_dropout = nn.Dropout(config.dropout)

    def forward(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, documents: Documents
    ) -> Tensor:
        if self.recomputes and self.training:  # inside the block, so that fsdp gathers it once
            return checkpoint(self._computed, hidden, rotation, documents, use_reentrant=False)
        return self._computed(hidden, rotation, documents)

    def _computed(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor] | None, documents: Documents
    ) -> Tensor:
        attended = self.attention(self.attention_norm(hidden), rotation, documents)
        hidden = hidden + self.attention_dropout(attended)
        transformed = self.feed_forward(self.feed_forward_norm(hidden))
        return hidden + self.feed_forward_dropout(transformed)


class Decoder(nn.Module):
    """Tokens to hidden states, and to logits by `head`.

    Attributes:
        is_compiled: whether the blocks are.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.vocab_size is not None
        self.config = config
        self.is_compiled = False
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

    def blocks(self) -> list[nn.Module]:
        """Return the repeated layers from the lowest to the highest."""
        return list(self.layers)

    def tensor_plan(self) -> dict[str, Split]:
        """Return how devices share the layers: heads of attention, channels of feed-forward."""
        units = {
            "heads": ("num_heads", self.config.num_heads),
            "groups": ("num_kv_heads", self.config.kv_heads),
            "inner": ("feed_forward", self.config.inner_size),
        }
        return {
            "layers.*.attention": Split("input"),
            "layers.*.attention.q_proj": Split("columns", *units["heads"]),
            "layers.*.attention.[kv]_proj": Split("columns", *units["groups"]),
            "layers.*.attention.o_proj": Split("rows", *units["heads"]),
            "layers.*.feed_forward": Split("input"),
            "layers.*.feed_forward.[ug]*_proj": Split("columns", *units["inner"]),
            "layers.*.feed_forward.down_proj": Split("rows", *units["inner"]),
        }

    def recompute_blocks(self) -> None:
        """Keep only the blocks' inputs in training: less memory, a third more work, equal results.

        A block computes the rest again in the backward pass, with the same dropout.
        """
        for layer in self.layers:
            layer.recomputes = True

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile each block in place, which leaves names and parameters as they are.

        Documents are then told apart by a mask on a CPU too: code that is made for the documents
        of one batch would not fit the next.
        """
        self.is_compiled = True
        for layer in self.layers:
            layer.compile(backend=backend)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor,
        document_ids: Tensor,
        has_single_documents: bool = False,
        cache: KeyValueCache | GrowingCache | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [R, T, D] from which `head` makes logits.

        Args:
            input_ids: [R, T] int64; none where `inputs_embeds` are given.
            position_ids: [R, T] int64, from 0 in every document.
            document_ids: [R, T] int64, ascending in a row, -1 = padding.
            has_single_documents: no row holds two documents, see `documents_of`.
            cache: of generation, where every row is one document; `position_ids` go on from it.
            inputs_embeds: [R, T, D], rows of `embedding` or anything else in their place.
        """
        documents = documents_of(document_ids, has_single_documents, self.is_compiled)
        hidden = self.embedding(input_ids) if inputs_embeds is None else inputs_embeds  # [R, T, D]
        rotation = None
        if self.positions is None:
            rotation = rotations(position_ids, self._frequencies(hidden.device), hidden.dtype)
        else:
            hidden = hidden + self.positions(position_ids)
        hidden = self.dropout(hidden)
        for index, layer in enumerate(self.layers):
            if cache is not None:
                documents = Documents(None, cache.places.mask, cache.layers[index])
            hidden = layer(hidden, rotation, documents)
        return self.norm(hidden)

    def _frequencies(self, device: torch.device) -> Tensor:
        config = self.config
        return frequencies(config.head_size, config.rope_theta, config.rope_scaling, device)

    def tie_head(self) -> None:
        """Make the head share the embedding's weights where the config says so."""
        if self.config.tied:
            self.head.weight = self.embedding.weight

    def _initialise(self) -> None:
        self.tie_head()
        for name, parameter in self.named_parameters():
            if name.endswith(".bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() > 1:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                depth = 2 * self.config.num_layers if is_residual else 1
                nn.init.normal_(parameter, std=INITIAL_STD / depth**0.5)


def _norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
