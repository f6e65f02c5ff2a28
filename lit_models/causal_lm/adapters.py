"""Low-rank adapters, their files in PEFT's layout, and parameters that stand still.

Source: Hu et al. 2021, "LoRA", section 4.1; Liu et al. 2024, "DoRA", sections 4.1 and 4.3.
Shapes: D inputs of a layer, E outputs, r rank.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

A, B, MAGNITUDE = "lora_A", "lora_B", "lora_magnitude_vector"  # the last of DoRA alone
PARTS = (A, B, MAGNITUDE)
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# What PEFT can do beyond LoRA and DoRA: key -> the value that says it does not.
PLAIN_LORA = {
    "use_rslora": False,
    "lora_bias": False,
    "bias": "none",
    "modules_to_save": None,
    "trainable_token_indices": None,
    "layer_replication": None,
    "target_parameters": None,
}
SHOWN_NAMES = 4
OUTPUT = "get_output_embeddings"  # which every model of transformers has


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
        adapter: folder of an adapter in PEFT's layout to go on with; its layers, rank, alpha and
            dora must be those given here.
        dora: each output of a layer gets a length that learns by itself, and base and adapter give
            its direction alone (DoRA); the backward pass keeps these outputs, too.

    Raises:
        ValueError: one of them is outside its range.
    """

    targets: list[str]
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    adapter: str | None = None
    dora: bool = False

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("lora.targets names no layer; give some, such as [q_proj, v_proj].")
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}; usual is 8 to 64.")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha must be above 0, got {self.alpha}; usual is 2 x rank.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout must be 0 to below 1, got {self.dropout}.")


def check_precision(lora: Mapping[str, Any] | None, precision: str) -> None:
    """Refuse a precision that rounds what adapters must have in float32.

    Args:
        lora: options or recipe of the adapters, by name; none without any.
        precision: `trainer.precision`.

    Raises:
        ValueError: all weights get 16 bits, the lengths of DoRA too.
    """
    if lora and lora.get("dora") and precision.endswith("16-true"):
        raise ValueError(
            f"trainer.precision {precision} rounds all weights to 16 bits, and lora.dora needs its "
            "lengths in float32; take bf16-mixed: lora.base_dtype bfloat16 saves the same memory."
        )


class LoraLinear(nn.Module):
    """A linear layer that stands still, and a product of two small matrices beside it.

    DoRA takes the sum of both for the direction of each output, and multiplies it by a length
    that learns. Dropout hits the adapter alone, with DoRA too, where PEFT drops of the base's
    input as well.

    Args:
        base: nn.Linear, or Conv1D of transformers, whose weight is [D, E]; its parameters are
            taken over under their names.
        rank: r.
        alpha: numerator of the scale.
        dropout: of the adapter's input.
        dora: give each output a length.
    """

    def __init__(
        self, base: nn.Module, rank: int, alpha: float, dropout: float, dora: bool = False
    ) -> None:
        super().__init__()
        self.is_transposed = not isinstance(base, nn.Linear)
        self.in_features, self.out_features = layer_size(base)
        self.scale = alpha / rank
        self.dropout = nn.Dropout(dropout)
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        like = {"device": base.weight.device, "dtype": dtype}
        self.weight, self.bias = base.weight, base.bias
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, **like))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, **like))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)
        lengths = row_lengths(self.base_weight().to(dtype)) if dora else None
        self.lora_magnitude_vector = None if lengths is None else nn.Parameter(lengths)

    def base_weight(self) -> Tensor:
        """Return the base's weight [E, D] in the dtype in which it is kept."""
        return self.weight.T if self.is_transposed else self.weight

    def base_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the base makes of x [..., D]: [..., E] in the dtype of its output."""
        weight = self.base_weight()
        return F.linear(x.to(weight.dtype), weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        """Args: x [..., D]. Returns [..., E] in the dtype of the base's output."""
        output = self.base_product(x, self.bias if self.lora_magnitude_vector is None else None)
        narrow = F.linear(self.dropout(x.to(self.lora_A.dtype)), self.lora_A)  # [..., r]
        change = F.linear(narrow, self.lora_B) * self.scale
        if self.lora_magnitude_vector is None:
            return output + change.to(output.dtype)
        whole = (output + change) * (self.lora_magnitude_vector / self._lengths(x.device.type))
        return (whole if self.bias is None else whole + self.bias).to(output.dtype)

    @torch.no_grad()
    def _lengths(self, device_type: str) -> Tensor:
        """Return the lengths [E] of the directions, constants of the backward pass: section 4.3
        of DoRA leaves their gradient out, which would need all activations of a whole weight."""
        with torch.autocast(device_type, enabled=False):  # a length in bfloat16 moves every output
            weight = self.base_weight().to(self.lora_A.dtype)
            return row_lengths(torch.addmm(weight, self.lora_B, self.lora_A, alpha=self.scale))

    def extra_repr(self) -> str:
        size = f"{self.in_features}, {self.out_features}"
        dora = "" if self.lora_magnitude_vector is None else ", dora"
        return f"{size}, rank={len(self.lora_A)}, scale={self.scale:g}{dora}"


def row_lengths(weight: Tensor) -> Tensor:
    """Return the length of each row [E] of a weight [E, D]; a row of zeros has the smallest number
    there is, by which zeros can be divided."""
    return torch.linalg.vector_norm(weight, dim=1).clamp(min=torch.finfo(weight.dtype).tiny)


def lora_recipe(
    network: nn.Module, options: LoraOptions, base: str | None = None
) -> dict[str, Any]:
    """Return plain values from which `add_lora` makes the same layers without any file.

    Args:
        network: before its layers are replaced; the weights do not matter.
        options: an adapter that they name is not read here, but by `adapted_recipe`.
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
        "dora": options.dora,
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
        recipe: of `lora_recipe`, or of a version without DoRA.
    """
    network.requires_grad_(False)
    if recipe["base_dtype"] != "float32":
        for parameter in network.parameters():
            parameter.data = parameter.data.bfloat16()
    dora = recipe.get("dora", False)
    for name, (rank, alpha) in recipe["layers"].items():
        layer = LoraLinear(network.get_submodule(name), rank, alpha, recipe["dropout"], dora)
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
        if hasattr(module, OUTPUT):
            return module.get_output_embeddings()
    return getattr(network, "head", None)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is the transposed linear layer of transformers' GPT-2."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def layer_size(layer: nn.Module) -> tuple[int, int]:
    """Return inputs D and outputs E of a linear layer."""
    if isinstance(layer, LoraLinear):
        return layer.in_features, layer.out_features
    rows, columns = layer.weight.shape
    return (rows, columns) if is_conv1d(layer) else (columns, rows)


def is_of_adapter(name: str) -> bool:
    """Return whether a weight belongs to an adapter, by its name."""
    return name.rpartition(".")[2] in PARTS


def lora_layers(module: nn.Module) -> dict[str, LoraLinear]:
    """Return name -> layer of all adapted layers."""
    return {name: m for name, m in module.named_modules() if isinstance(m, LoraLinear)}


def base_of(layer: LoraLinear, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the base's weight [E, D] of a layer of this kind."""
    weight = weights[f"{name}.weight"]
    return weight.T if layer.is_transposed else weight


def with_adapters(module: nn.Module, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of another run as a module takes them: new adapters where it has none.

    New adapters of DoRA, those with B zero, get the lengths of their base: a module that was built
    without its weights has made them of others.

    Args:
        module: with adapters or without.
        given: of a network of the same function, with some of these adapters or none.
    """
    adapters = {name: t for name, t in module.state_dict().items() if is_of_adapter(name)}
    weights = {**adapters, **given}
    lengths = {}
    for name, layer in lora_layers(module).items():
        is_there = layer.lora_magnitude_vector is not None and f"{name}.weight" in weights
        if is_there and not weights[f"{name}.{B}"].any():
            base = base_of(layer, name, weights).to(layer.weight.dtype)  # as the layer rounds it
            lengths[f"{name}.{MAGNITUDE}"] = row_lengths(base.to(layer.lora_A.dtype))
    return {**weights, **lengths}


def merged_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of the plain network that computes the same: adapters added to their bases.

    All are in the dtype of the adapters: bfloat16 could not hold the sums of a base in bfloat16.

    Args:
        network: with its adapters; may be on the meta device, since only its layers are asked.
        weights: its state_dict, or one of the same names.
    """
    plain = {name: t for name, t in weights.items() if not is_of_adapter(name)}
    for name, layer in lora_layers(network).items():
        low, high = weights[f"{name}.{A}"], weights[f"{name}.{B}"]
        merged = base_of(layer, name, weights).double()
        merged = merged + (high.double() @ low.double()) * layer.scale  # [E, D]
        if f"{name}.{MAGNITUDE}" in weights:
            factor = weights[f"{name}.{MAGNITUDE}"].double() / row_lengths(merged)
            merged = merged * factor[:, None]
        plain[f"{name}.weight"] = (merged.T if layer.is_transposed else merged).to(low)
    adapted = next((t.dtype for name, t in weights.items() if name.endswith(f".{A}")), None)
    if adapted is None:
        return plain
    return {n: t.to(adapted) if t.is_floating_point() else t for n, t in plain.items()}


class LayerAdapter(NamedTuple):
    """A [r, D], B [E, r]; the layer adds alpha / r B A x. With DoRA each output has a length,
    magnitude [E]."""

    a: Tensor
    b: Tensor
    alpha: float
    magnitude: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """The content of a folder in PEFT's layout.

    Args:
        layers: name -> adapter; names of transformers' modules.
        rank: r of most layers.
        alpha: of most layers.
        base: name or path of the model that it was trained on, `None` where it is not said.
    """

    layers: dict[str, LayerAdapter]
    rank: int
    alpha: float
    base: str | None = None

    @property
    def dora(self) -> bool:
        """Whether the layers have lengths."""
        return any(layer.magnitude is not None for layer in self.layers.values())


def adapted_recipe(
    network: nn.Module, recipe: dict[str, Any], folder: str | Path
) -> dict[str, Any]:
    """Return a recipe of `lora_recipe` whose layers have the sizes of an adapter that is there.

    Args:
        network: before its layers are replaced.
        recipe: what the user asked for.
        folder: of the adapter.

    Raises:
        FileNotFoundError: no adapter is there.
        ValueError: it is damaged, of another base, or not what the recipe says.
    """
    adapter = read_adapter(folder)
    layers = own_layers(network, adapter, folder, recipe["base"])
    asked, found = list(recipe["layers"]), list(layers)
    there, here = (
        f"rank {rank}, alpha {alpha:g}{', dora' if dora else ''}"
        for rank, alpha, dora in (
            (adapter.rank, adapter.alpha, adapter.dora),
            (recipe["rank"], recipe["alpha"], recipe["dora"]),
        )
    )
    if there != here or set(asked) != set(found):
        ends = sorted({name.rpartition(".")[2] for name in found})
        raise ValueError(
            f"the adapter {folder} has {there} on {len(found)} layers ({', '.join(ends)}), but "
            f"lora asks for {here} on {len(asked)} ({', '.join(recipe['targets'])}); give lora the "
            "adapter's values, or leave lora.adapter out."
        )
    sizes = {name: [len(layers[name].a), layers[name].alpha] for name in asked}
    return {**recipe, "layers": sizes}


def load_adapter(network: nn.Module, recipe: Mapping[str, Any], folder: str | Path) -> None:
    """Copy an adapter's values into a network that `add_lora` has prepared by the same recipe.

    Raises:
        FileNotFoundError: no adapter is there.
        ValueError: it is damaged, or of another base.
    """
    layers = own_layers(network, read_adapter(folder), folder, recipe["base"])
    for name, (a, b, _, magnitude) in layers.items():
        layer = network.get_submodule(name)
        with torch.no_grad():
            layer.lora_A.copy_(a)
            layer.lora_B.copy_(b)
            if magnitude is not None:
                layer.lora_magnitude_vector.copy_(magnitude)


def adapter_files(
    network: nn.Module,
    recipe: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    names: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what adapter_config.json and adapter_model.safetensors hold.

    Args:
        network: may be on the meta device.
        recipe: of `lora_recipe`.
        weights: the network's state_dict.
        names: of layers -> of transformers' modules.
    """
    ranks, alphas, stored = {}, {}, {}
    for layer, (rank, alpha) in recipe["layers"].items():
        name = names[layer]
        if rank != recipe["rank"]:
            ranks[name] = rank
        if alpha != recipe["alpha"]:
            alphas[name] = alpha
        stored[f"{PREFIX}{name}.{A}.weight"] = weights[f"{layer}.{A}"].contiguous()
        stored[f"{PREFIX}{name}.{B}.weight"] = weights[f"{layer}.{B}"].contiguous()
        if f"{layer}.{MAGNITUDE}" in weights:
            stored[f"{PREFIX}{name}.{MAGNITUDE}"] = weights[f"{layer}.{MAGNITUDE}"].contiguous()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": recipe["base"],
        "r": recipe["rank"],
        "lora_alpha": recipe["alpha"],
        "lora_dropout": recipe["dropout"],
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(names[layer] for layer in recipe["layers"]),
        "fan_in_fan_out": any(layer.is_transposed for layer in lora_layers(network).values()),
        "bias": "none",
        "use_dora": recipe.get("dora", False),
        "inference_mode": True,
        "init_lora_weights": True,
    }
    return config, stored


def read_adapter(folder: str | Path) -> Adapter:
    """Return the adapter in a folder that PEFT or `unisono export --adapter` wrote.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, or holds more than LoRA or DoRA.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    config = _read_config(folder)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise FileNotFoundError(
            f"{folder} lacks {ADAPTER_WEIGHTS}; pickled adapters are not read, save it as "
            "safetensors."
        )
    try:
        weights = load_file(folder / ADAPTER_WEIGHTS)
    except SafetensorError as error:
        raise ValueError(f"{folder / ADAPTER_WEIGHTS} is damaged: {error}.") from error
    names = {name.removeprefix(PREFIX).rpartition(f".{A}.weight")[0] for name in weights} - {""}
    ends = [f"{A}.weight", f"{B}.weight", *([MAGNITUDE] if config.get("use_dora") else [])]
    expected = {f"{PREFIX}{name}.{end}" for name in names for end in ends}
    if set(weights) != expected or not names:
        strange = sorted(set(weights) ^ expected)[:2] or ["nothing"]
        raise ValueError(
            f"{folder / ADAPTER_WEIGHTS} is no LoRA of linear layers as {ADAPTER_CONFIG} says: it "
            f"holds or lacks {', '.join(strange)}."
        )
    alphas = config.get("alpha_pattern") or {}
    layers = {
        name: LayerAdapter(
            weights[f"{PREFIX}{name}.{A}.weight"],
            weights[f"{PREFIX}{name}.{B}.weight"],
            _by_pattern(alphas, name, config["lora_alpha"]),
            weights.get(f"{PREFIX}{name}.{MAGNITUDE}"),
        )
        for name in sorted(names)
    }
    base = config.get("base_model_name_or_path")
    return Adapter(layers, config["r"], config["lora_alpha"], base)


def own_layers(
    network: nn.Module, adapter: Adapter, folder: str | Path, base: str | None
) -> dict[str, LayerAdapter]:
    """Return an adapter under the names of a network's layers.

    Raises:
        ValueError: it is of another base: its name, its layers or their shapes differ.
    """
    if base and adapter.base and Path(base).name != Path(adapter.base).name:
        raise ValueError(
            f"the adapter {folder} is of the base {adapter.base}, but the model is {base}; load "
            f"that base, or, if it is the same, say so in {ADAPTER_CONFIG} "
            "(base_model_name_or_path)."
        )
    there = linear_layers(network)
    prefix = next((n for n, m in network.named_modules() if hasattr(m, OUTPUT)), "")
    layers = {f"{prefix}.{n}" if prefix else n: layer for n, layer in adapter.layers.items()}
    for name, (a, b, _, _) in layers.items():
        size = layer_size(there[name]) if name in there else None
        if size != (a.shape[1], b.shape[0]) or a.shape[0] != b.shape[1]:
            what = f"layers of {size[0]} to {size[1]} features" if size else "no such layer"
            raise ValueError(
                f"the adapter {folder} is of another base: it adapts {name} from {a.shape[1]} to "
                f"{b.shape[0]} features, where this network has {what}"
                f"{f'; it was trained on {adapter.base}' if adapter.base else ''}. Load its base."
            )
    return layers


def _by_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that fits the end of a name, as PEFT does."""
    fitting = (v for key, v in pattern.items() if re.match(rf"(.*\.)?({key})$", name))
    return next(fitting, default)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no {ADAPTER_CONFIG}; name the folder of an adapter that PEFT or "
            "`unisono export --adapter` wrote."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}).") from error
    if config.get("peft_type") != "LORA" or not {"r", "lora_alpha"} <= config.keys():
        raise ValueError(f"{path} is of kind {config.get('peft_type')}; only LORA is read.")
    more = [key for key, plain in PLAIN_LORA.items() if config.get(key, plain) not in (plain, [])]
    if more:
        raise ValueError(
            f"{path} uses {', '.join(more)}, which is beyond LoRA and DoRA; merge it with PEFT "
            "(merge_and_unload) and fine-tune the merged model."
        )
    return config


def freeze(network: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop the gradients of parameters whose name fits a pattern, and return their names.

    It must happen before the strategy wraps the network: DDP never synchronises a parameter that
    was frozen then, so nothing is unfrozen later.

    Args:
        network: changed in place.
        patterns: of names as `layers.0.attention.q_proj.weight`; `*` stands for any text, dots
            included, such as in `layers.0.*`.

    Raises:
        ValueError: a pattern fits no name, or nothing is left to train.
    """
    parameters = dict(network.named_parameters(remove_duplicate=False))  # tied ones by each name
    frozen = []
    for pattern in patterns:
        found = [name for name in parameters if fnmatchcase(name, pattern)]
        if not found:
            near = get_close_matches(pattern, parameters, SHOWN_NAMES, cutoff=0.0)
            raise ValueError(
                f'freeze names "{pattern}", which fits no parameter; near it are '
                f"{', '.join(near)}. `*` stands for any text, such as in layers.0.*."
            )
        frozen += found
    for name in frozen:
        parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ValueError(
            f"freeze {list(patterns)} leaves nothing to train; name fewer parameters, or use "
            "`unisono validate`."
        )
    return sorted(set(frozen))
