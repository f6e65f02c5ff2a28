"""Several layers in one lens: values and affine maps of each of them.

Everything that is of a layer has a first dimension L where there are several, and none for one.
`layer` [B] holds the index of each row's layer among those of the lens; `None` where it has one.
Shapes: L layers, B activations, D features, t words.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.core.batches import SubjectFacts


def of_layer(table: Tensor, layer: Tensor | None) -> Tensor:
    """Return the table [...], or that of each row's layer [B, ...] of tables [L, ...]."""
    return table if layer is None else table[layer]


def of_rows(values: Sequence[Tensor], layer: Tensor | None) -> Tensor:
    """Return [B, ...]: of each row the values [B, ...] that are of its layer."""
    if layer is None:
        return values[0]
    return torch.stack([*values])[layer, torch.arange(len(layer), device=layer.device)]


def stack(values: Sequence[Tensor]) -> Tensor:
    """Return the values of layers in one tensor; of one layer its own."""
    return values[0] if len(values) == 1 else torch.stack([*values])


def rows_of(index: int, number: int, num_layers: int, device: Any) -> Tensor | None:
    """Return the `layer` of so many rows of one layer."""
    return torch.full((number,), index, device=device) if num_layers > 1 else None


class LayerMaps(nn.Module):
    """An affine map for each layer, the identity at first; its constant is also what a network
    knows the layer by."""

    def __init__(self, num_layers: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width).repeat(num_layers, 1, 1))  # [L, D, D]
        self.bias = nn.Parameter(torch.zeros(num_layers, width))

    def forward(self, values: Tensor, layer: Tensor) -> Tensor:
        """Return [B, D] of values [B, D]."""
        every = torch.einsum("bd,led->lbe", values, self.weight) + self.bias[:, None]
        return of_rows(every.unbind(), layer)


def layer_facts(subject: SubjectFacts, layers: Sequence[int]) -> dict[str, Any]:
    """Return what a lens keeps of its subject: `layer` is a list of several."""
    return {**asdict(subject), "layer": layers[0] if len(layers) == 1 else [*layers]}


def index_of(layers: Sequence[int], layer: int | None) -> int:
    """Return the index of a layer among those of a lens; the only one needs no name."""
    if layer is None and len(layers) == 1:
        return 0
    if layer not in layers:
        raise ValueError(
            f"layer {layer} is none of this lens's, which explains {', '.join(map(str, layers))}; "
            "name one of them with layer."
        )
    return layers.index(layer)
