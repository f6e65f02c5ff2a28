"""The code book as tensors: which symbols may follow which, for training targets and for decoding.

Shapes: C codes, L symbols of a block, V symbols, N trie nodes, U used codes of a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.tokenizers.codes import CodeBook

PAD, BEGIN, END, EMPTY = 0, 1, 2, 3  # CodeBook.symbols begins with these four
NONE = -100


class CodeTrie(nn.Module):
    """Buffers over a code book, on the network's device and in no checkpoint.

    Args:
        table: symbols of each code [C, L].
        next_node: child of each node under each symbol [N, V], -1 where illegal; 0 is the root.
        leaf_code: code that ends in each node [N], -1 elsewhere.
        num_leaves: codes below each node [N].
        max_codes: most codes of one record.
    """

    table: Tensor
    next_node: Tensor
    leaf_code: Tensor
    num_leaves: Tensor
    path: Tensor

    def __init__(
        self, table: Any, next_node: Any, leaf_code: Any, num_leaves: Any, max_codes: int
    ) -> None:
        super().__init__()
        buffers = {
            "table": table,
            "next_node": next_node,
            "leaf_code": leaf_code,
            "num_leaves": num_leaves,
        }
        for name, values in buffers.items():
            tensor = torch.as_tensor(values).long().clone()
            self.register_buffer(name, tensor, persistent=False)
        self.register_buffer("path", _paths(self.table, self.next_node), persistent=False)
        self.max_codes = max_codes
        self.num_codes, self.block_size = self.table.shape
        self.num_nodes, self.vocab_size = self.next_node.shape

    @classmethod
    def from_code_book(cls, book: CodeBook) -> CodeTrie:
        """Trie of a code book."""
        trie = book.trie()
        return cls(book.table, trie.next_node, trie.leaf_code, trie.num_leaves, book.max_codes)

    @classmethod
    def from_table(
        cls, table: Sequence[Sequence[int]], vocab_size: int, max_codes: int
    ) -> CodeTrie:
        """Trie over rows of symbols [C, L], all distinct."""
        next_node, leaf_code, num_leaves = [[-1] * vocab_size], [-1], [0]
        for code, symbols in enumerate(table):
            node = 0
            num_leaves[0] += 1
            for symbol in symbols:
                if next_node[node][symbol] < 0:
                    next_node[node][symbol] = len(next_node)
                    next_node.append([-1] * vocab_size)
                    leaf_code.append(-1)
                    num_leaves.append(0)
                node = next_node[node][symbol]
                num_leaves[node] += 1
            leaf_code[node] = code
        return cls(table, next_node, leaf_code, num_leaves, max_codes)

    def legal(self, node: Tensor, used: Tensor, depth: Tensor | int, block: Tensor | int) -> Tensor:
        """Symbols that may come next [..., V] bool.

        A branch whose codes are all used is closed: the codes of one record are distinct. A block
        after the first may be empty; the first may not.

        Args:
            node: trie node reached inside the block [...].
            used: codes of the finished blocks [..., U], NONE where there is none.
            depth: symbols of the block so far, broadcastable to node.
            block: number of the block, broadcastable to node.
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
        """Symbols to be written for each record [B, T] int64, NONE where nothing is supervised.

        A record with n codes has n blocks and, if there is room for one more, one `<empty>`.

        Args:
            code_ids: codes in the order of the blocks [B, K], NONE on the right; a column
                without any code makes T longer than it need be.
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
        """`legal` at every position of the targets of these codes [B, T, V] bool."""
        batch, num_codes = code_ids.shape
        position = torch.arange(num_positions, device=code_ids.device)
        block, depth = position // self.block_size, position % self.block_size
        # the block after the last code is the empty one: its node is the root
        padded = torch.cat([code_ids, code_ids.new_full((batch, 1), NONE)], dim=1)
        current = padded[:, block.clamp(max=num_codes)]  # [B, T]
        node = self.path[current.clamp(min=0), depth[None]].masked_fill(current < 0, 0)
        before = torch.arange(num_codes, device=code_ids.device)[None, :] < block[:, None]
        used = code_ids[:, None, :].masked_fill(~before[None], NONE)  # [B, T, U]
        return self.legal(node, used, depth, block)


def _paths(table: Tensor, next_node: Tensor) -> Tensor:
    """Nodes from the root to each code [C, L + 1]."""
    nodes = [torch.zeros(len(table), dtype=torch.long)]
    for symbol in table.unbind(1):
        nodes.append(next_node[nodes[-1], symbol])
    return torch.stack(nodes, dim=1)
