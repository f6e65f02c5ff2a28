"""Values and affine maps per layer, for lenses of several layers.

Values per layer have a first dimension L if there are several layers, and none for a single layer.
`layer` [B] is the index of each row's layer among the lens's; `None` for a single layer.
Shapes: L layers, B activations, D features, t words.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.core.batches import SubjectFacts


def of_layer(table: Tensor, layer: Tensor | None) -> Tensor:
    """Return the entries [B, ...] of each row's layer of a table [L, ...]; for a single layer, the
    table [...]."""
    return table if layer is None else table[layer]


def of_rows(values: Sequence[Tensor], layer: Tensor | None) -> Tensor:
    """Return for each row the value of its layer [B, ...]. Args: values [B, ...] per layer."""
    if layer is None:
        return values[0]
    return torch.stack([*values])[layer, torch.arange(len(layer), device=layer.device)]


def stack(values: Sequence[Tensor]) -> Tensor:
    """Return the layers' values stacked; for a single layer, its value."""
    return values[0] if len(values) == 1 else torch.stack([*values])


def rows_of(index: int, number: int, num_layers: int, device: Any) -> Tensor | None:
    """Return `layer` for `number` rows of one layer."""
    return torch.full((number,), index, device=device) if num_layers > 1 else None


class LayerMaps(nn.Module):
    """Affine map per layer, initially the identity; its bias lets a network identify the layer."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(num_layers, 1, 1))  # [L, D, D]
        self.bias = nn.Parameter(torch.zeros(num_layers, width))

    def forward(self, values: Tensor, layer: Tensor) -> Tensor:
        """Return the mapped values [B, D]."""
        every = torch.einsum("bd,led->lbe", values, self.weight) + self.bias[:, None]
        return of_rows(every.unbind(), layer)


def layer_facts(subject: SubjectFacts, layers: Sequence[int]) -> dict[str, Any]:
    """Return a lens's facts of its subject; `layer` is a list if there are several."""
    return {**asdict(subject), "layer": layers[0] if len(layers) == 1 else [*layers]}


def index_of(layers: Sequence[int], layer: int | None) -> int:
    """Return the index of a layer among the lens's; `None` stands for a single layer."""
    if layer is None and len(layers) == 1:
        return 0
    if layer not in layers:
        raise ValueError(
            f"layer {layer} is none of this lens's, which explains {', '.join(map(str, layers))}; "
            "name one of them with layer."
        )
    return layers.index(layer)
