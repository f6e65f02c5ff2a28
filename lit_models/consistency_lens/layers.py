"""Several layers in one lens: what is of each of them, and the affine maps in and out.

Everything that is of a layer has a first dimension L where there are several, and none for one.
`layer` [B] holds the index of each row's layer among those of the lens; `None` where it has one.
Shapes: L layers, B activations, D features, t words.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from datamodules.core.batches import ActivationBatch, SubjectFacts

if TYPE_CHECKING:
    from datamodules.activations.store import ActivationStatistics
    from lit_models.consistency_lens.lens import Explanation, Lens


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


class Baselines(nn.Module):
    """Guesses of a layer's activation from the statistics of the training part of the data at
    hand."""

    mean: Tensor
    unit_mean: Tensor
    token_means: Tensor
    token_row: Tensor
    position_means: Tensor
    components: Tensor
    tuned: Tensor

    def __init__(self, statistics: "ActivationStatistics", vocab_size: int) -> None:
        super().__init__()
        row = torch.full((vocab_size,), len(statistics.token_ids))
        row[torch.from_numpy(statistics.token_ids)] = torch.arange(len(statistics.token_ids))
        self.register_buffer("token_row", row, persistent=False)
        self.register_buffer("tuned", None, persistent=False)  # of `tuned_map`, for a test
        for name in ("mean", "unit_mean", "token_means", "position_means", "components"):
            table = torch.from_numpy(getattr(statistics, name)).float()
            self.register_buffer(name, table, persistent=False)

    def of_token(self, token: Tensor, mean: Tensor) -> Tensor:
        """Return [B, D], the mean activation at tokens [B]; `mean` [D] or [B, D] where unseen."""
        return _known(self.token_means, self.token_row[token], mean)

    def of_position(self, position: Tensor, mean: Tensor) -> Tensor:
        """Return [B, D], the mean activation at positions [B]; `mean` as `of_token`."""
        return _known(self.position_means, position, mean)

    def projected(self, activation: Tensor, number: int) -> Tensor:
        """Return activations [B, D] projected on the first principal components."""
        components = self.components[:number]
        return self.mean + (activation - self.mean) @ components.T @ components


def _known(table: Tensor, row: Tensor, mean: Tensor) -> Tensor:
    """Return the rows [B] of a table [n, D]; the mean for those behind its end."""
    found = table[row.clamp(max=len(table) - 1)]
    return found.where((row < len(table))[:, None], mean.to(table))


class LayerRows:
    """Rows of a batch, each with what is of its layer."""

    lens: "Lens"
    baselines: Sequence[Baselines]  # of each layer
    batch: ActivationBatch

    @property
    def layer(self) -> Tensor | None:
        return self.batch.get("layer")

    @property
    def mean(self) -> Tensor:
        """[D] or [B, D], of the training part."""
        return of_layer(self.lens.mean, self.layer)

    @property
    def variance(self) -> Tensor:
        """[] or [B]."""
        return of_layer(self.lens.variance, self.layer)

    def explain(self, activation: Tensor, key: Tensor | None = None) -> "Explanation":
        return self.lens.verbalizer.explain(activation, key, layer=self.layer)

    def read(self, words: Tensor) -> Tensor:
        """Return what the reconstructor makes of words [B, t, D]."""
        return self.lens.reconstructor(words, self.layer)

    def guess(self, of: Callable[[Baselines], Tensor]) -> Tensor:
        """Return what the baselines of each row's own layer say."""
        return of_rows([of(one) for one in self.baselines], self.layer)
