"""Adapters in PEFT's file layout: adapter_config.json and adapter_model.safetensors.

Shapes: r rank.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lit_models.causal_lm.adapter_names import (
    LayerAdapter,
    hugging_face_layers,
    network_layers,
)
from lit_models.causal_lm.layout_configs import layout_of
from lit_models.causal_lm.lora import (
    MAGNITUDE,
    A,
    B,
    is_conv1d,
    layer_size,
    linear_layers,
    row_lengths,
)
from lit_models.causal_lm.network import Decoder

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


@dataclass(frozen=True)
class Adapter:
    """What a folder holds.

    Args:
        layers: name -> adapter; names of transformers' modules.
        rank: r of most layers.
        alpha: of most layers.
        dropout: of the training.
        base: name or path of the model that it was trained on, none where it is not said.
    """

    layers: dict[str, LayerAdapter]
    rank: int
    alpha: float
    dropout: float = 0.0
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
        network: own decoder or transformers' model, before its layers are replaced.
        recipe: what the user asked for.
        folder: of the adapter.

    Raises:
        FileNotFoundError: no adapter is there.
        ValueError: it is damaged, of another base, or not what the recipe says.
    """
    adapter = read_adapter(folder)
    layers = own_layers(network, adapter, folder, recipe["base"])
    asked, found = list(recipe["layers"]), list(layers)
    there = _sizes(adapter.rank, adapter.alpha, adapter.dora)
    here = _sizes(recipe["rank"], recipe["alpha"], recipe["dora"])
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


def adapter_of(
    network: nn.Module, recipe: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> Adapter:
    """Return the adapter of some weights, under the names of transformers' modules.

    Args:
        network: own decoder or transformers' model; may be on the meta device.
        recipe: of `lora_recipe`.
        weights: the network's state_dict.
    """
    layers = {
        name: LayerAdapter(
            weights[f"{name}.{A}"],
            weights[f"{name}.{B}"],
            alpha,
            weights.get(f"{name}.{MAGNITUDE}"),
        )
        for name, (_, alpha) in recipe["layers"].items()
    }

    def lengths(name: str) -> Tensor:
        return row_lengths(weights[f"{name}.weight"].float())

    sizes = (recipe["rank"], recipe["alpha"], recipe["dropout"])
    return Adapter(hugging_face_layers(network, layers, lengths), *sizes, recipe["base"])


def adapter_files(network: nn.Module, adapter: Adapter) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what adapter_config.json and adapter_model.safetensors hold."""
    ranks, alphas = {}, {}
    for name, (a, _, alpha, _) in adapter.layers.items():
        if len(a) != adapter.rank:
            ranks[name] = len(a)
        if alpha != adapter.alpha:
            alphas[name] = alpha
    is_own_gpt2 = isinstance(network, Decoder) and layout_of(network.config) == "gpt2"
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": sorted(adapter.layers),
        "fan_in_fan_out": is_own_gpt2 or any(is_conv1d(m) for m in network.modules()),
        "bias": "none",
        "use_dora": adapter.dora,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    weights = {}
    for name, (a, b, _, magnitude) in adapter.layers.items():
        weights[f"{PREFIX}{name}.{A}.weight"] = a.contiguous()
        weights[f"{PREFIX}{name}.{B}.weight"] = b.contiguous()
        if magnitude is not None:
            weights[f"{PREFIX}{name}.{MAGNITUDE}"] = magnitude.contiguous()
    return config, weights


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
    dropout, base = config.get("lora_dropout", 0.0), config.get("base_model_name_or_path")
    return Adapter(layers, config["r"], config["lora_alpha"], dropout, base)


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
    layers = network_layers(network, adapter.layers, adapter.rank)
    there = linear_layers(network)
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


def _sizes(rank: int, alpha: float, dora: bool) -> str:
    return f"rank {rank}, alpha {alpha:g}{', dora' if dora else ''}"


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
