"""Adapters of a network's layers under the names of transformers' modules, and back.

The own decoder has three layers where transformers' GPT-2 has one, `c_attn`; adapters are
translated exactly in both directions. Shapes: r rank.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

FUSED, PARTS = "c_attn", ("q_proj", "k_proj", "v_proj")
LLAMA = {"attention": "self_attn", "feed_forward": "mlp"}
GPT2 = {"attention.o_proj": "attn.c_proj", "feed_forward.up_proj": "mlp.c_fc"}
GPT2 |= {"feed_forward.down_proj": "mlp.c_proj"}


class LayerAdapter(NamedTuple):
    """A [r, inputs], B [outputs, r]; the layer adds alpha / r B A x."""

    a: Tensor
    b: Tensor
    alpha: float


def hugging_face_layers(
    network: nn.Module, layers: Mapping[str, LayerAdapter]
) -> dict[str, LayerAdapter]:
    """Return adapters of a network's layers under the names of transformers' modules."""
    layout = own_layout(network)
    if layout is None:
        prefix = _transformers_prefix(network)
        return {name.removeprefix(prefix): layer for name, layer in layers.items()}
    if layout == "llama":
        return {_llama_theirs(name): layer for name, layer in layers.items()}
    found: dict[str, LayerAdapter] = {}
    fused: dict[str, dict[str, LayerAdapter]] = {}
    for name, layer in layers.items():
        block, part = re.fullmatch(r"layers\.(\d+)\.(.*)", name).groups()  # type: ignore[union-attr]
        if part in GPT2:
            found[f"transformer.h.{block}.{GPT2[part]}"] = layer
        else:
            home = f"transformer.h.{block}.attn.{FUSED}"
            fused.setdefault(home, {})[part.rpartition(".")[2]] = layer
    return found | {name: _joined(parts) for name, parts in fused.items()}


def network_layers(
    network: nn.Module, layers: Mapping[str, LayerAdapter], rank: int
) -> dict[str, LayerAdapter]:
    """Return adapters of transformers' modules under the names of a network's layers.

    Args:
        network: own decoder or transformers' model.
        layers: name of a module -> adapter; a name that is unknown stays as it is.
        rank: of most layers; three times that tells that q, k and v have each their own.
    """
    layout = own_layout(network)
    if layout is None:
        prefix = _transformers_prefix(network)
        return {f"{prefix}{name}": layer for name, layer in layers.items()}
    if layout == "llama":
        return {_llama_own(name): layer for name, layer in layers.items()}
    return {
        own: part
        for name, layer in layers.items()
        for own, part in _gpt2_own(name, layer, rank).items()
    }


def own_layout(network: nn.Module) -> str | None:
    """Return whose names an own decoder maps to, gpt2 or llama; none for others' models."""
    positions = getattr(getattr(network, "config", None), "positions", None)
    return {"learned": "gpt2", "rotary": "llama"}.get(positions or "")


def _joined(parts: dict[str, LayerAdapter]) -> LayerAdapter:
    """Return the adapter of `c_attn` [q; k; v] that does what those of its thirds do.

    Each third has its own rows of A and columns of B; all have as many, an absent one has zeros.
    """
    rank = max(len(layer.a) for layer in parts.values())
    first = next(iter(parts.values()))
    size = len(first.b)
    scale = first.alpha / len(first.a)
    a = first.a.new_zeros(3 * rank, first.a.shape[1])
    b = first.b.new_zeros(3 * size, 3 * rank)
    for index, name in enumerate(PARTS):
        if name not in parts:
            continue
        layer = parts[name]
        own, at = len(layer.a), index * rank
        a[at : at + own] = layer.a
        b[index * size : (index + 1) * size, at : at + own] = layer.b * (layer.alpha / own / scale)
    return LayerAdapter(a, b, scale * 3 * rank)


def _gpt2_own(name: str, layer: LayerAdapter, rank: int) -> dict[str, LayerAdapter]:
    """Return the own adapters of a GPT-2 module: three of `c_attn`, one of any other."""
    match = re.fullmatch(r"transformer\.h\.(\d+)\.(.*)", name)
    if match is None:
        return {name: layer}
    block, part = match.groups()
    own = {theirs: ours for ours, theirs in GPT2.items()}
    if part in own:
        return {f"layers.{block}.{own[part]}": layer}
    if part != f"attn.{FUSED}" or len(layer.b) % 3:
        return {name: layer}
    thirds = zip(PARTS, _thirds(layer, rank), strict=True)
    return {f"layers.{block}.attention.{n}": third for n, third in thirds if third is not None}


def _thirds(layer: LayerAdapter, rank: int) -> list[LayerAdapter | None]:
    """Return the adapters of q, k and v: they share A, unless each has rows of its own."""
    blocks = layer.b.chunk(3)
    parts = [slice(i * rank, (i + 1) * rank) for i in range(3)]
    inside = sum(block[:, part].count_nonzero() for block, part in zip(blocks, parts, strict=True))
    if len(layer.a) != 3 * rank or inside != layer.b.count_nonzero():
        return [LayerAdapter(layer.a, block.contiguous(), layer.alpha) for block in blocks]
    return [
        LayerAdapter(layer.a[part], block[:, part].contiguous(), layer.alpha / 3)
        if layer.a[part].any() or block[:, part].any()
        else None
        for block, part in zip(blocks, parts, strict=True)
    ]


def _llama_theirs(name: str) -> str:
    for ours, theirs in LLAMA.items():
        name = name.replace(f".{ours}.", f".{theirs}.")
    return f"model.{name}"


def _llama_own(name: str) -> str:
    for ours, theirs in LLAMA.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name.removeprefix("model.")


def _transformers_prefix(network: nn.Module) -> str:
    for name, module in network.named_modules():
        if hasattr(module, "get_output_embeddings"):
            return f"{name}." if name else ""
    return ""
