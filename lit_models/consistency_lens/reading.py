"""Reading embeddings with a decoder: whole rows, or piece by piece with a cache that is learnt
through.

Shapes: R rows, T positions, D features.
"""

from typing import Any

import torch
from torch import Tensor

from lit_models.causal_lm.cache import GrowingCache
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.pretrained import Network


def read(network: Network, input_ids: Tensor | None, inputs_embeds: Tensor | None = None) -> Tensor:
    """Return the hidden states [R, T, D] of rows that are one document each.

    Args:
        network: a decoder.
        input_ids: [R, T] int64, padded at the right; or none, and
        inputs_embeds: [R, T, D].
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    assert given is not None
    rows, length = given.shape[:2]
    positions = torch.arange(length, device=given.device).expand(rows, length)
    documents = torch.zeros_like(positions)
    return network(input_ids, positions, documents, True, inputs_embeds=inputs_embeds)


class Continuation:
    """Reads rows that grow by a position at a time, each position once; gradients pass through.

    Args:
        network: a decoder.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.cache: Any = None

    def read(self, inputs_embeds: Tensor) -> Tensor:
        """Return the hidden states [R, T, D] of the next positions; T is 1 after the first call."""
        rows, length = inputs_embeds.shape[:2]
        if isinstance(self.network, Decoder):
            self.cache = self.cache or GrowingCache(len(self.network.blocks()))
            positions = self.cache.advance(length, inputs_embeds.device).expand(rows, length)
            documents = torch.zeros_like(positions)
            return self.network(None, positions, documents, True, self.cache, inputs_embeds)
        if self.cache is None:
            from transformers import DynamicCache

            self.cache = DynamicCache(config=self.network.model.config)
        return self.network(None, None, None, True, self.cache, inputs_embeds)
