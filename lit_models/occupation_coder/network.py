"""Network of the coder: text encoder, autoregressive decoder over the code book, flat head.

Shapes: B batch, P memory positions, D hidden, H heads, C codes, L symbols of a block, K blocks,
T target positions (at most K x L), V symbols, N trie nodes, U used codes of a record, O orders or
hypotheses per record.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lit_models.blocks import DecoderCache, DecoderLayer
from lit_models.occupation_coder.encoders import Encoder
from lit_models.occupation_coder.linear import LinearHead, LinearOptions
from lit_models.training.metrics import in_float32

PAD, BEGIN, END, EMPTY = 0, 1, 2, 3  # CodeBook.symbols begins with these four
NONE = -100


class CodeTrie(nn.Module):
    """Trie of a code book as non-persistent buffers, so that it follows the network's device.

    `table` [C, L]: symbols of each code, distinct rows; `next_node` [N, V]: child of each node for
    each symbol, -1 where illegal, 0 is the root; `leaf_code` [N]: code that ends in each node, else
    -1; `num_leaves` [N]: codes below each node; `path` [C, L + 1]: nodes from the root to each
    code. Nodes are numbered breadth first, in symbol order; the empty block is not in the tree.
    `max_codes` is the maximum number of codes per record.
    """

    table: Tensor
    next_node: Tensor
    leaf_code: Tensor
    num_leaves: Tensor
    path: Tensor

    def __init__(self, table: Any, vocab_size: int, max_codes: int) -> None:
        super().__init__()
        table = np.array(table)
        path = np.zeros((len(table), table.shape[1] + 1), np.int64)
        for depth in range(1, path.shape[1]):
            nodes = np.unique(table[:, :depth], axis=0, return_inverse=True)[1]
            path[:, depth] = path.max() + 1 + nodes.reshape(-1)
        next_node = np.full((path.max() + 1, vocab_size), -1)
        next_node[path[:, :-1], table] = path[:, 1:]
        leaf_code = np.full(len(next_node), -1)
        leaf_code[path[:, -1]] = np.arange(len(table))
        arrays = {"table": table, "next_node": next_node, "leaf_code": leaf_code, "path": path}
        for name, values in {**arrays, "num_leaves": np.bincount(path.ravel())}.items():
            self.register_buffer(name, torch.as_tensor(values).long(), persistent=False)
        self.max_codes = max_codes
        self.num_codes, self.block_size = self.table.shape
        self.num_nodes, self.vocab_size = self.next_node.shape

    def legal(self, node: Tensor, used: Tensor, depth: Tensor | int, block: Tensor | int) -> Tensor:
        """Mask of the symbols that may come next [..., V] bool.

        As the codes of one record are distinct, a branch whose codes are all used is closed. Every
        block but the first may be empty. `node`: trie node reached inside the block [...]; `used`:
        codes of the finished blocks [..., U], padded with NONE; `depth`: number of symbols written
        in the block; `block`: index of the block.
        """
        child = self.next_node[node]  # [..., V]
        depth = torch.as_tensor(depth, device=node.device).expand(node.shape)
        taken = self.path[used.clamp(min=0)]  # [..., U, L + 1]
        index = (depth + 1)[..., None, None].expand(*used.shape, 1)
        taken = taken.gather(-1, index).squeeze(-1).masked_fill(used < 0, -2)  # [..., U]
        num_taken = (child[..., :, None] == taken[..., None, :]).sum(-1)
        legal = (child >= 0) & (self.num_leaves[child.clamp(min=0)] > num_taken)
        may_end = (depth == 0) & (torch.as_tensor(block, device=node.device) > 0)
        legal[..., EMPTY] = may_end.expand(node.shape)
        return legal

    def targets(self, code_ids: Tensor) -> Tensor:
        """Target symbols of each record [B, T] int64, NONE at positions without a loss.

        A record with n codes in code_ids [B, K] has n blocks and, if n < max_codes, one `<empty>`.
        T grows with K: drop columns of code_ids that hold no code.
        """
        code_ids = code_ids[:, : self.max_codes]
        batch, _ = code_ids.shape
        is_code = code_ids >= 0
        blocks = self.table[code_ids.clamp(min=0)]  # [B, K, L]
        blocks = blocks.masked_fill(~is_code[..., None], NONE).flatten(1)
        num_codes = is_code.sum(1, keepdim=True)
        size = min(code_ids.shape[1] * self.block_size + 1, self.max_codes * self.block_size)
        targets = blocks.new_full((batch, self.max_codes * self.block_size + 1), NONE)
        targets[:, : blocks.shape[1]] = blocks
        end = num_codes * self.block_size
        has_end = num_codes < self.max_codes
        return targets.scatter(1, end, torch.where(has_end, EMPTY, NONE))[:, :size]

    def legal_targets(self, code_ids: Tensor, num_positions: int) -> Tensor:
        """Result of `legal` at every position of the codes' targets [B, T, V] bool."""
        batch, num_codes = code_ids.shape
        position = torch.arange(num_positions, device=code_ids.device)
        block, depth = position // self.block_size, position % self.block_size
        # the block after the last code is `<empty>`, which is written at the root
        padded = torch.cat([code_ids, code_ids.new_full((batch, 1), NONE)], dim=1)
        current = padded[:, block.clamp(max=num_codes)]  # [B, T]
        node = self.path[current.clamp(min=0), depth[None]].masked_fill(current < 0, 0)
        before = torch.arange(num_codes, device=code_ids.device)[None, :] < block[:, None]
        used = code_ids[:, None, :].masked_fill(~before[None], NONE)  # [B, T, U]
        return self.legal(node, used, depth, block)


class Memory(NamedTuple):
    """Encoded texts: hidden [B, P, D] and mask [B, P] bool."""

    hidden: Tensor
    mask: Tensor

    def select(self, rows: Tensor) -> Memory:
        """The memory of some records."""
        return Memory(self.hidden[rows], self.mask[rows])


class BlockDecoder(nn.Module):
    """Autoregressive transformer over blocks of code symbols.

    Each position gets embeddings of the previous symbol, its place in the block, the block's index,
    and the trie node that the block has reached. The output layer has weights per trie node, too,
    since "1" as third digit means something else in every branch.

    Args:
        memory_width: D of the encoder.
        trie: the code book.
        width: hidden size.
        num_layers: transformer layers.
        num_heads: attention heads per layer.
        feed_forward: inner width of the feed-forward blocks.
        dropout: probability after embeddings and blocks; never on attention weights.
    """

    def __init__(
        self,
        memory_width: int,
        trie: CodeTrie,
        width: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        feed_forward: int = 512,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(
                f"width {width} must be a multiple of num_heads, got {num_heads} heads: "
                "change the width or the number of heads."
            )
        self.trie = trie
        self.symbols = nn.Embedding(trie.vocab_size, width)
        self.places = nn.Embedding(trie.block_size, width)
        self.block_numbers = nn.Embedding(trie.max_codes, width)
        self.nodes = nn.Embedding(trie.num_nodes, width)
        self.layers = nn.ModuleList(
            DecoderLayer(width, memory_width, num_heads, feed_forward, dropout)
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, trie.vocab_size)
        self.node_output = nn.Embedding(trie.num_nodes, width)
        self.node_summary = nn.Embedding(trie.num_nodes, memory_width)
        self.dropout = nn.Dropout(dropout)
        for embedding in (self.symbols, self.places, self.block_numbers, self.nodes):
            nn.init.normal_(embedding.weight, std=0.1)
        nn.init.zeros_(self.node_output.weight)
        nn.init.zeros_(self.node_summary.weight)

    def forward(self, targets: Tensor, memory: Memory) -> Tensor:
        """Logits of every target position given the previous ones [B x O, T, V], in float32 or
        wider. Args: targets [B x O, T], NONE at positions without a loss."""
        known = targets.clamp(min=PAD)
        before = torch.cat([known.new_full((len(known), 1), BEGIN), known[:, :-1]], dim=1)
        position = torch.arange(targets.shape[1], device=targets.device)
        nodes, size = torch.zeros_like(known), self.trie.block_size
        for depth in range(1, size):  # node before each position; illegal symbols lead to the root
            last = slice(depth - 1, known.shape[1] - 1, size)  # in all blocks
            child = self.trie.next_node[nodes[:, last], known[:, last]]
            nodes[:, depth::size] = child.clamp(min=0)
        hidden = self._embed(before, nodes, position)
        mask = memory.mask[:, None, None, :]
        for layer in self.layers:
            hidden, _ = layer(hidden, layer.project(memory.hidden), mask)
        return self._logits(hidden, nodes, memory.hidden[:, 0])

    def start(self, memory: Memory) -> DecoderCache:
        """Cache before the first symbol."""
        memory_kv = [layer.project(memory.hidden) for layer in self.layers]
        return DecoderCache(memory_kv, memory.mask[:, None, None, :], summary=memory.hidden[:, 0])

    def step(self, symbols: Tensor, nodes: Tensor, cache: DecoderCache) -> Tensor:
        """Logits of the next position [B x O, V], in float32 or wider; appends to the cache.

        Args: previous symbols [B x O], BEGIN at first; trie nodes that the blocks have reached."""
        position = torch.tensor([cache.position], device=symbols.device)
        hidden = self._embed(symbols[:, None], nodes[:, None], position)
        hidden = cache.through(self.layers, hidden)
        return self._logits(hidden, nodes[:, None], cache.summary)[:, 0]

    def blocks(self) -> list[nn.Module]:
        """The layers from the lowest to the highest."""
        return list(self.layers)

    def flat_head(self, memory_width: int, dropout: float) -> nn.Module:
        """Flat head over the encoder's memory."""
        return FlatHead(memory_width, self.trie, dropout)

    def _embed(self, before: Tensor, nodes: Tensor, position: Tensor) -> Tensor:
        place, block = position % self.trie.block_size, position // self.trie.block_size
        hidden = self.symbols(before) + self.nodes(nodes)
        return self.dropout(hidden + self.places(place) + self.block_numbers(block))

    def _logits(self, hidden: Tensor, nodes: Tensor, summary: Tensor) -> Tensor:
        hidden = self.norm(hidden)
        child = self.trie.next_node[nodes]  # [B x O, T, V]
        known = child.clamp(min=0)
        by_node = torch.einsum("rtd,rtvd->rtv", hidden, self.node_output(known))
        weights = self.node_summary(known).unflatten(0, (len(summary), -1))  # [B, O, T, V, D]
        by_summary = torch.einsum("bd,botvd->botv", summary, weights).flatten(0, 1)
        by_node = (by_node + by_summary).masked_fill(child < 0, 0.0)
        return in_float32(self.output(hidden) + by_node)


class FlatHead(nn.Module):
    """One logit per code from the memory; a code's weights are the sum over its trie nodes.

    A rare code thus shares the weights of its branch. The summary at position 0 enters linearly,
    the mean of the memory through a hidden layer.
    """

    def __init__(self, memory_width: int, trie: CodeTrie, dropout: float = 0.0) -> None:
        super().__init__()
        self.trie = trie
        self.pool = nn.Linear(memory_width, memory_width)
        self.dropout = nn.Dropout(dropout)
        self.nodes = nn.Embedding(trie.num_nodes, 2 * memory_width)
        self.bias = nn.Parameter(torch.full((trie.num_codes,), -6.0))
        nn.init.zeros_(self.nodes.weight)

    def forward(self, memory: Memory) -> Tensor:
        """Logits [B, C], in float32 or wider."""
        mask = memory.mask[..., None].to(memory.hidden.dtype)
        mean = (memory.hidden * mask).sum(1) / mask.sum(1)
        features = torch.cat([memory.hidden[:, 0], F.gelu(self.pool(mean))], dim=-1)
        path = self.trie.path[:, 1:]
        weights = F.embedding_bag(path, self.nodes.weight, mode="sum")  # [C, 2 D]
        return in_float32(F.linear(self.dropout(features), weights)) + self.bias


class OccupationNetwork(nn.Module):
    """Encoder, decoder and flat head; with `linear`, the flat head is a linear model of the text's
    n-grams and does not read the memory."""

    def __init__(
        self,
        encoder: Encoder,
        decoder: BlockDecoder,
        flat_dropout: float = 0.0,
        linear: LinearOptions | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.trie = decoder.trie
        self.flat: nn.Module = (
            decoder.flat_head(encoder.width, flat_dropout)
            if linear is None
            else LinearHead(decoder.trie.num_codes, linear)
        )

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, language_id: Tensor
    ) -> tuple[Memory, Tensor]:
        """Memory of the texts and flat logits [B, C]. Args: as in `Encoder.forward`."""
        memory = Memory(*self.encoder(input_ids, attention_mask, language_id))
        if isinstance(self.flat, LinearHead):
            return memory, in_float32(self.flat(input_ids, attention_mask))
        return memory, self.flat(memory)

    def blocks(self) -> list[nn.Module]:
        """Encoder layers, then decoder layers."""
        return self.encoder.blocks() + self.decoder.blocks()
