"""Adapters of a network's layers under the names of transformers' modules, and back.

The own decoder has three layers where transformers' GPT-2 has one, `c_attn`; adapters are
translated exactly in both directions. Shapes: r rank.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lit_models.causal_lm.layout_configs import layout_of
from lit_models.causal_lm.layouts import NAMES
from lit_models.causal_lm.lora import linear_layers
from lit_models.causal_lm.network import Decoder


class LayerAdapter(NamedTuple):
    """A [r, inputs], B [outputs, r]; the layer adds alpha / r B A x. With DoRA each output has a
    length, magnitude [outputs]."""

    a: Tensor
    b: Tensor
    alpha: float
    magnitude: Tensor | None = None


def module_names(network: nn.Module) -> dict[str, str]:
    """Return name of a linear layer -> that of transformers' module which does its work.

    Raises:
        ValueError: transformers has no model of the own decoder's shape.
    """
    names = list(linear_layers(network))
    if isinstance(network, Decoder):
        parts = NAMES[layout_of(network.config)]
        return {name: ".".join(parts.get(p, p) for p in name.split(".")) for name in names}
    models = (n for n, m in network.named_modules() if hasattr(m, "get_output_embeddings"))
    prefix = next(models, "")
    return {name: name.removeprefix(f"{prefix}.") for name in names}


def hugging_face_layers(
    network: nn.Module,
    layers: Mapping[str, LayerAdapter],
    lengths: Callable[[str], Tensor],
) -> dict[str, LayerAdapter]:
    """Return adapters of a network's layers under the names of transformers' modules.

    Args:
        network: own decoder or transformers' model.
        layers: name of a layer -> adapter.
        lengths: name of a layer without adapter -> what DoRA would begin with [outputs].
    """
    found: dict[str, LayerAdapter] = {}
    for module, parts in _parts(network).items():
        present = [layers[part] for part in parts if part in layers]
        if len(parts) > 1 and present:
            joined = _joined([layers.get(part) for part in parts])
            if present[0].magnitude is not None:
                own = [layers[p].magnitude if p in layers else lengths(p) for p in parts]
                joined = joined._replace(magnitude=torch.cat([m for m in own if m is not None]))
            found[module] = joined
        elif present:
            found[module] = present[0]
    return found


def network_layers(
    network: nn.Module, layers: Mapping[str, LayerAdapter], rank: int
) -> dict[str, LayerAdapter]:
    """Return adapters of transformers' modules under the names of a network's layers.

    Args:
        network: own decoder or transformers' model.
        layers: name of a module -> adapter; a name that is unknown stays as it is.
        rank: of most layers; a multiple of it tells that the parts of a module have each their own.
    """
    parts_of, found = _parts(network), {}
    for module, layer in layers.items():
        parts = parts_of.get(module, [module])
        if len(parts) == 1 or len(layer.b) % len(parts):
            found[parts[0]] = layer
            continue
        cut = zip(parts, _cut(layer, len(parts), rank), strict=True)
        found |= {part: own for part, own in cut if own is not None}
    return found


def _parts(network: nn.Module) -> dict[str, list[str]]:
    """Return name of transformers' module -> those of the layers that do its work, in order."""
    parts = defaultdict(list)
    for name, module in module_names(network).items():
        parts[module].append(name)
    return parts


def _joined(parts: list[LayerAdapter | None]) -> LayerAdapter:
    """Return the adapter of a module that does what those of its parts, of one size, do.

    Each part has its own rows of A and columns of B; all have as many, an absent one has zeros.
    """
    present = [layer for layer in parts if layer is not None]
    rank, size = max(len(layer.a) for layer in present), len(present[0].b)
    scale = present[0].alpha / len(present[0].a)
    a = present[0].a.new_zeros(len(parts) * rank, present[0].a.shape[1])
    b = present[0].b.new_zeros(len(parts) * size, len(parts) * rank)
    for index, layer in enumerate(parts):
        if layer is None:
            continue
        own, row = len(layer.a), index * rank
        a[row : row + own] = layer.a
        factor = layer.alpha / own / scale
        b[index * size : (index + 1) * size, row : row + own] = layer.b * factor
    return LayerAdapter(a, b, scale * len(a))


def _cut(layer: LayerAdapter, count: int, rank: int) -> list[LayerAdapter | None]:
    """Return the adapters of a module's parts: they share A, unless each has rows of its own."""
    blocks = layer.b.chunk(count)
    magnitudes = [None] * count if layer.magnitude is None else layer.magnitude.chunk(count)
    rows = [slice(i * rank, (i + 1) * rank) for i in range(count)]
    inside = sum(int(b[:, part].count_nonzero()) for b, part in zip(blocks, rows, strict=True))
    if len(layer.a) != count * rank or inside != layer.b.count_nonzero():
        return [
            LayerAdapter(layer.a, block.contiguous(), layer.alpha, own)
            for block, own in zip(blocks, magnitudes, strict=True)
        ]
    return [
        LayerAdapter(layer.a[part], block[:, part].contiguous(), layer.alpha / count, own)
        if layer.a[part].any() or block[:, part].any()
        else None
        for block, part, own in zip(blocks, rows, magnitudes, strict=True)
    ]
