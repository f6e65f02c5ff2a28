"""Low-rank adapters on linear layers; everything else stands still.

Source: Hu et al. 2021, "LoRA", section 4.1. Shapes: D inputs of a layer, E outputs, r rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class LoraOptions:
    """Which layers get an adapter, and of what size.

    Args:
        targets: names of linear layers, or ends of names, such as q_proj or feed_forward.*; `*`
            stands for any text. The head takes none: the loss works with its weight alone.
        rank: r.
        alpha: the adapter's output is multiplied by alpha / rank.
        dropout: of the adapter's input.
        base_dtype: of all that stands still; bfloat16 halves its memory.
        adapter: folder of an adapter in PEFT's layout to go on with; its layers, rank and alpha
            must be those given here.

    Raises:
        ValueError: one of them is outside its range.
    """

    targets: list[str]
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    adapter: str | None = None

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("lora.targets names no layer; give some, such as [q_proj, v_proj].")
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}; usual is 8 to 64.")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha must be above 0, got {self.alpha}; usual is 2 x rank.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be 0 to below 1, got {self.dropout}.")


class LoraLinear(nn.Module):
    """A linear layer that stands still, and a product of two small matrices beside it.

    Args:
        base: nn.Linear, or Conv1D of transformers, whose weight is [D, E]; its parameters are
            taken over under their names.
        rank: r.
        alpha: numerator of the scale.
        dropout: of the adapter's input.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.is_transposed = not isinstance(base, nn.Linear)
        self.in_features, self.out_features = layer_size(base)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        like = {"device": base.weight.device, "dtype": dtype}
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [..., D]. Returns [..., E] in the dtype of the base's output."""
        weight = self.weight.T if self.is_transposed else self.weight
        output = F.linear(x.to(weight.dtype), weight, self.bias)
        narrow = F.linear(self.dropout(x.to(self.lora_A.dtype)), self.lora_A)  # [..., r]
        return output + (F.linear(narrow, self.lora_B) * self.scale).to(output.dtype)

    def extra_repr(self) -> str:
        size = f"{self.in_features}, {self.out_features}"
        return f"{size}, rank={len(self.lora_A)}, scale={self.scale:g}"


def lora_recipe(
    network: nn.Module, options: LoraOptions, base: str | None = None
) -> dict[str, Any]:
    """Return plain values from which `add_lora` makes the same layers without any file.

    Args:
        network: before its layers are replaced; the weights do not matter.
        options: an adapter that they name is not read here, but by `adapters.adapted_recipe`.
        base: name or folder of the model that is adapted, if it has one.

    Raises:
        ValueError: a target fits no linear layer.
    """
    names = target_layers(network, options.targets)
    return {
        "targets": list(options.targets),
        "rank": options.rank,
        "alpha": options.alpha,
        "dropout": options.dropout,
        "base_dtype": options.base_dtype,
        "base": base,
        "layers": {name: [options.rank, options.alpha] for name in names},
    }


def add_lora(network: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Give layers their adapters, in place, and freeze everything else.

    Their values come of torch's global generator: A is random, B is zero, so that the network
    computes what it computed before.

    Args:
        network: with its base weights, or with those of a checkpoint to come; names of the base's
            parameters stay.
        recipe: of `lora_recipe`.
    """
    network.requires_grad_(False)
    if recipe["base_dtype"] == "bfloat16":
        for parameter in network.parameters():
            parameter.data = parameter.data.bfloat16()
    for name, (rank, alpha) in recipe["layers"].items():
        layer = LoraLinear(network.get_submodule(name), rank, alpha, recipe["dropout"])
        parent, _, last = name.rpartition(".")
        setattr(network.get_submodule(parent), last, layer)


def target_layers(network: nn.Module, targets: list[str]) -> list[str]:
    """Return the names of the linear layers that fit a target, in the network's order.

    Raises:
        ValueError: a target fits none.
    """
    names = list(linear_layers(network))
    chosen = set()
    for target in targets:
        found = {name for name in names if fnmatchcase(f".{name}", f"*.{target}")}
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f'lora.targets names "{target}", which fits no linear layer of the network; it '
                f"has {', '.join(ends)} (the head takes no adapter)."
            )
        chosen |= found
    return [name for name in names if name in chosen]


def linear_layers(network: nn.Module) -> dict[str, nn.Module]:
    """Return name -> layer of all linear layers but the head, adapted ones included."""
    head = head_of(network)
    return {
        name: module
        for name, module in network.named_modules()
        if module is not head and (isinstance(module, nn.Linear | LoraLinear) or is_conv1d(module))
    }


def head_of(network: nn.Module) -> nn.Module | None:
    """Return the layer that makes logits, of an own decoder or a model of transformers."""
    for module in network.modules():
        if hasattr(module, "get_output_embeddings"):
            return module.get_output_embeddings()
    return getattr(network, "head", None)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is the transposed linear layer of transformers' GPT-2."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def layer_size(layer: nn.Module) -> tuple[int, int]:
    """Return inputs D and outputs E of a linear layer."""
    rows, columns = layer.weight.shape
    is_transposed = is_conv1d(layer) or getattr(layer, "is_transposed", False)
    return (rows, columns) if is_transposed else (columns, rows)


def adapter_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return name -> tensor of all adapters in a module."""
    weights = module.state_dict()
    return {name: t for name, t in weights.items() if name.rpartition(".")[2] in (A, B)}


def merged_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of the plain network that computes the same: adapters added to their bases.

    All are in the dtype of the adapters: bfloat16 could not hold the sums of a base in bfloat16.

    Args:
        network: with its adapters; may be on the meta device, since only its layers are asked.
        weights: its state_dict, or one of the same names.
    """
    plain = {name: t for name, t in weights.items() if name.rpartition(".")[2] not in (A, B)}
    for name, layer in network.named_modules():
        if not isinstance(layer, LoraLinear):
            continue
        low, high = weights[f"{name}.{A}"], weights[f"{name}.{B}"]
        update = (high.double() @ low.double()) * layer.scale  # [E, D]
        base = plain[f"{name}.weight"].double()
        plain[f"{name}.weight"] = (base + (update.T if layer.is_transposed else update)).to(low)
    adapted = next((t.dtype for name, t in weights.items() if name.endswith(f".{A}")), None)
    if adapted is None:
        return plain
    return {n: t.to(adapted) if t.is_floating_point() else t for n, t in plain.items()}
