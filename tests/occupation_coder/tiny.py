"""Tiny tries and networks, and texts as batches."""

from collections.abc import Sequence
from typing import Any

import torch

from lit_models.occupation_coder.encoders import CharacterEncoder
from lit_models.occupation_coder.linear import LinearOptions
from lit_models.occupation_coder.network import END, BlockDecoder, CodeTrie, OccupationNetwork

TABLE = [[4, 4, 5], [4, 5, END], [5, 4, 4], [5, 4, 5]]


def trie_of(max_codes: int, table: Sequence[Sequence[int]] = TABLE) -> CodeTrie:
    return CodeTrie(table, 6, max_codes)


def network_of(linear: LinearOptions | None = None) -> OccupationNetwork:
    """A network in float64 and eval mode, without weights of zero."""
    torch.manual_seed(0)
    encoder = CharacterEncoder(3, width=16, num_layers=2, num_heads=2, num_buckets=128)
    decoder = BlockDecoder(16, trie_of(3), width=16, num_layers=2, num_heads=2, feed_forward=32)
    network = OccupationNetwork(encoder, decoder, linear=linear).double().eval()
    torch.nn.init.normal_(decoder.node_output.weight)
    torch.nn.init.normal_(decoder.node_summary.weight)
    torch.nn.init.normal_(network.flat.nodes.weight if linear is None else network.flat.weight)
    return network


def padded(texts: list[str], size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Code points [B, size] and their mask."""
    ids = torch.tensor([[ord(c) for c in text] + [0] * (size - len(text)) for text in texts])
    return ids, ids > 0


def batch_of(codes: torch.Tensor, weight: torch.Tensor | None = None) -> dict[str, Any]:
    """What the losses read of a batch with these codes [B, K]."""
    num_with_codes = (codes >= 0).sum(1).bincount().tolist()
    weight = torch.ones(len(codes)) if weight is None else weight
    return {"code_ids": codes, "num_with_codes": num_with_codes, "weight": weight}
