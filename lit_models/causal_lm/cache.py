"""Keys and values of the positions that a network has read, so that it reads each once.

A reader takes prompts, then one token per row and call, and says what may follow: `DecoderReader`
for the own network, `PretrainedReader` for one of transformers.

Shapes: R rows, S positions of the longest prompt, P room, G key and value heads, K head size,
V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Places:
    """Where the new tokens of a call go; all layers share it.

    Args:
        room: positions of the longest row, with all that will be added to it.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.end = 0  # positions that the longest row has, the new ones too
        self.new: Any = None  # [R] int64, position of each row's new token; none for prompts
        self.mask: Tensor | None = None  # [R, 1, 1, end] bool, what the new positions see

    def advance(self, new: Tensor, end: int) -> None:
        """Set the places of the next tokens, [R] int64, and the longest row's length then."""
        self.new, self.end = new, end
        seen = torch.arange(end, device=new.device) <= new[:, None]
        self.mask = seen[:, None, None, :]


class LayerCache:
    """Keys and values of one layer, [R, G, P, K] each, allocated once.

    Args:
        places: of all layers.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.keys: Any = None
        self.values: Any = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of new positions and return those that they may see.

        Args:
            keys: [R, G, T, K], of whole prompts or of one position per row.
            values: as keys.
        """
        if self.keys is None:
            rows, heads, length, size = keys.shape
            self.keys = keys.new_zeros(rows, heads, self.places.room, size)
            self.values = values.new_zeros(rows, heads, self.places.room, size)
            self.keys[:, :, :length], self.values[:, :, :length] = keys, values
            return keys, values
        rows_of = torch.arange(len(keys), device=keys.device)
        new, end = self.places.new, self.places.end
        self.keys[rows_of, :, new], self.values[rows_of, :, new] = keys[:, :, 0], values[:, :, 0]
        return self.keys[:, :, :end], self.values[:, :, :end]


class KeyValueCache:
    """The caches of all layers. Prompts stand at the left, and each row goes on at its own end:
    what padding left behind a prompt is written over before a later position sees it.

    Args:
        num_layers: of the network.
        room: positions of the longest row, with all that will be added to it.
    """

    def __init__(self, num_layers: int, room: int) -> None:
        self.places = Places(room)
        self.layers = [LayerCache(self.places) for _ in range(num_layers)]

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these, [r] int64."""
        for layer in self.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]


class GrowingLayerCache:
    """Keys and values of one layer, which grow by concatenation: gradients pass through them."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def extended(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep keys and values [R, G, T, K] of new positions and return all so far."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat([self.keys, keys], dim=2)
            values = torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


class GrowingCache:
    """The caches of all layers for rows of equal length, of which later positions are learnt
    through earlier ones. After the first call one position follows at a time.

    Args:
        num_layers: of the network.
    """

    def __init__(self, num_layers: int) -> None:
        self.places = Places(0)
        self.layers = [GrowingLayerCache() for _ in range(num_layers)]

    def advance(self, num_positions: int, device: torch.device) -> Tensor:
        """Make room for the next positions of each row; return their positions [1, T] int64.

        Args:
            num_positions: T, 1 after the first call.
            device: of the rows.
        """
        start = self.places.end
        self.places.end = start + num_positions
        if start:  # causal attention of torch begins at the first key, not at the last
            self.places.mask = torch.ones(1, 1, 1, start + 1, dtype=torch.bool, device=device)
        return torch.arange(start, self.places.end, device=device)[None]


class Reader(Protocol):
    """Reads prompts, then token by token; returns logits [R, V] of what follows each row."""

    def prompts(self, input_ids: Tensor, lengths: Tensor, room: int) -> Tensor:
        """Begin anew.

        Args:
            input_ids: [R, S] int64, padded at the right.
            lengths: [R] int64, from 1.
            room: positions that the longest row will have at most.
        """

    def token(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, [R] int64."""

    def keep(self, rows: Tensor) -> None:
        """Forget all rows but these, [r] int64."""


class DecoderReader:
    """Reads with the own network.

    Args:
        network: a `Decoder`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network: Any = network

    def prompts(self, input_ids: Tensor, lengths: Tensor, room: int) -> Tensor:
        """See `Reader`."""
        self.lengths, self.longest, self.room = lengths, input_ids.shape[1], room
        self.cache = KeyValueCache(len(self.network.layers), room)
        positions = torch.arange(self.longest, device=input_ids.device).expand_as(input_ids)
        hidden = self._read(input_ids, positions)  # [R, S, D]
        rows = torch.arange(len(hidden), device=hidden.device)
        return self.network.head(hidden[rows, lengths - 1])

    def token(self, tokens: Tensor) -> Tensor:
        """See `Reader`."""
        # Rows that are finished go on until they are dropped, at the last place if need be.
        places = self.lengths.clamp(max=self.room - 1)
        self.longest = min(self.longest + 1, self.room)
        self.lengths = self.lengths + 1
        self.cache.places.advance(places, self.longest)
        return self.network.head(self._read(tokens[:, None], places[:, None])[:, 0])

    def keep(self, rows: Tensor) -> None:
        """See `Reader`."""
        self.lengths = self.lengths[rows]
        self.cache.keep(rows)

    def _read(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        documents = torch.zeros_like(input_ids)
        return self.network(input_ids, position_ids, documents, True, self.cache)


class PretrainedReader:
    """Reads with a causal model of transformers, whose cache has one place per call: prompts end
    together, padded at the left.

    Args:
        model: such as a LlamaForCausalLM.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model

    def prompts(self, input_ids: Tensor, lengths: Tensor, room: int) -> Tensor:
        """See `Reader`."""
        from transformers import DynamicCache

        self.lengths, self.room = lengths, room
        self.cache = DynamicCache(config=self.model.config)
        width = input_ids.shape[1]
        places = torch.arange(width, device=input_ids.device) - (width - lengths)[:, None]
        self.mask = (places >= 0).long()
        position_ids = places.clamp(min=0)
        return self._read(input_ids.gather(1, position_ids), position_ids)

    def token(self, tokens: Tensor) -> Tensor:
        """See `Reader`."""
        position_ids = self.lengths.clamp(max=self.room - 1)[:, None]
        self.lengths = self.lengths + 1
        self.mask = torch.cat([self.mask, torch.ones_like(position_ids)], dim=1)
        return self._read(tokens[:, None], position_ids)

    def keep(self, rows: Tensor) -> None:
        """See `Reader`."""
        self.lengths, self.mask = self.lengths[rows], self.mask[rows]
        self.cache.batch_select_indices(rows)

    def _read(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        output = self.model(
            input_ids=input_ids,
            attention_mask=self.mask,
            position_ids=position_ids,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]
