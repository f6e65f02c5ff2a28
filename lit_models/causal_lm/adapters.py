"""Low-rank adapters (LoRA); freezing of parameters by name.

Source: Hu et al. 2021, "LoRA", section 4.1.
Shapes: D inputs of a layer, E outputs, r rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import filter as fitting_names
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from datamodules.core.plan import check_range

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class LoraOptions:
    """Layers and size of adapters.

    Args:
        targets: names of linear layers, or ends of names, such as q_proj or feed_forward.*; `*`
            matches any text. The head takes no adapter, as the loss uses only its weight.
        rank: r.
        alpha: the adapter's output is multiplied by alpha / rank.
        dropout: of the adapter's input.
        base_dtype: of the frozen weights; bfloat16 halves their memory.
    """

    targets: list[str]
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    base_dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("lora.targets names no layer; give some, such as [q_proj, v_proj].")
        check_range("lora", 1, rank=self.rank)
        check_range("lora", 1e-6, alpha=self.alpha)
        check_range("lora", 0, 0.99, dropout=self.dropout)


class LoraLinear(nn.Module):
    """Frozen linear layer plus the product of two low-rank matrices.

    `base` is nn.Linear, or transformers' Conv1D, whose weight is [D, E]; its parameters keep their
    names. The other arguments are as in `LoraOptions`.
    """

    def __init__(self, base: nn.Module, rank: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.is_transposed = is_conv1d(base)
        rows, columns = base.weight.shape
        width, out = (rows, columns) if self.is_transposed else (columns, rows)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        # With a base on `meta`, the adapters are created on the default device.
        like = {"device": None if base.weight.is_meta else base.weight.device, "dtype": dtype}
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Parameter(torch.empty(rank, width, **like))
        self.lora_B = nn.Parameter(torch.zeros(out, rank, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., E] in the dtype of the base's output. Args: x [..., D]."""
        weight = self.weight.T if self.is_transposed else self.weight
        output = F.linear(x.to(weight.dtype), weight, self.bias)
        narrow = F.linear(self.dropout(x.to(self.lora_A.dtype)), self.lora_A)  # [..., r]
        return output + (F.linear(narrow, self.lora_B) * self.scale).to(output.dtype)


def lora_recipe(
    network: nn.Module, options: LoraOptions, base: str | None = None
) -> dict[str, Any]:
    """Return plain values from which `add_lora` creates the same layers without any file; `base` is
    the folder of the adapted model, if any. ValueError if a target matches no layer."""
    return {**asdict(options), "base": base, "layers": target_layers(network, options.targets)}


def add_lora(network: nn.Module, recipe: Mapping[str, Any]) -> None:
    """Add the adapters of a `lora_recipe` in place, and freeze everything else.

    The base's parameters keep their names. A is drawn from PyTorch's global generator, B is zero,
    so that the network's output does not change.
    """
    network.requires_grad_(False)
    if recipe["base_dtype"] != "float32":
        for parameter in network.parameters():
            parameter.data = parameter.data.bfloat16()
    sizes = recipe["rank"], recipe["alpha"], recipe["dropout"]
    for name in recipe["layers"]:
        parent, _, last = name.rpartition(".")
        layer = LoraLinear(network.get_submodule(name), *sizes)
        setattr(network.get_submodule(parent), last, layer)


def target_layers(network: nn.Module, targets: list[str]) -> list[str]:
    """Return the names of the trainable linear layers, without the head, that match a target, in
    the network's order; ValueError if a target matches none."""
    head = getattr(network, "head", None)
    for module in network.modules():
        if hasattr(module, "get_output_embeddings"):  # a model of transformers
            head = module.get_output_embeddings()
            break
    others = [(name, module) for name, module in network.named_modules() if module is not head]
    linear = [(n, part) for n, part in others if isinstance(part, nn.Linear) or is_conv1d(part)]
    names = [name for name, part in linear if part.weight.requires_grad]
    chosen = set()
    for target in targets:
        fitting = {name for name in names if fnmatchcase(f".{name}", f"*.{target}")}
        if not fitting:
            ends = sorted({name.rpartition(".")[2] for name in names})
            raise ValueError(
                f'lora.targets names "{target}", which fits no linear layer of the network; it '
                f"has {', '.join(ends)} (the head takes no adapter)."
            )
        chosen |= fitting
    return [name for name in names if name in chosen]


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is a Conv1D, the transposed linear layer of transformers' GPT-2."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def is_of_adapter(name: str) -> bool:
    """Return whether this is the name of an adapter's weight."""
    return name.rpartition(".")[2] in (A, B)


def with_adapters(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return another run's weights, plus the module's own for adapters that these lack."""
    adapters = {name: t for name, t in module.state_dict().items() if is_of_adapter(name)}
    return {**adapters, **weights}


def merged_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the equivalent network without adapters, which are added to the bases.

    All weights get the adapters' dtype, as a bfloat16 base would round the sums. The network may be
    on the meta device; `weights` has the names of its state_dict.
    """
    plain = {name: t for name, t in weights.items() if not is_of_adapter(name)}
    adapted = None
    for name, layer in network.named_modules():
        if isinstance(layer, LoraLinear):
            low, high = weights[f"{name}.{A}"], weights[f"{name}.{B}"]
            change = (high.double() @ low.double()) * layer.scale  # [E, D]
            base = plain[f"{name}.weight"].double()
            merged = base + (change.T if layer.is_transposed else change)
            plain[f"{name}.weight"], adapted = merged.to(low), low.dtype
    if adapted is None:
        return plain
    return {n: t.to(adapted) if t.is_floating_point() else t for n, t in plain.items()}


def freeze(network: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match patterns such as `layers.0.*`; `*` is any text.

    Call it before the strategy wraps the network. Nothing can be unfrozen later, as DDP never
    synchronises a parameter that is frozen when it wraps.

    Raises:
        ValueError: a pattern matches no name.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))  # all names of tied ones
    for pattern in patterns:
        names = fitting_names(parameters, pattern)
        if not names:
            raise ValueError(
                f'freeze names "{pattern}", which fits no parameter; names are such as '
                f"{', '.join(list(parameters)[:4])}, and `*` stands for any text."
            )
        for name in names:
            parameters[name].requires_grad_(False)
