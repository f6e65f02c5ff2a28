"""Do two recipes make the same function of the same weights?

Weights fit many networks that compute something else: the number of heads, an epsilon or the scale
of an adapter is in no shape.
"""

from typing import Any

from lit_models.causal_lm.decoder_config import DecoderConfig

Recipe = dict[str, Any]

# What a config.json tells beside the function.
_NO_FUNCTION = {
    *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"),
}


def differences(trained: Recipe, recipe: Recipe, is_start: bool = False) -> list[str]:
    """Return "network.num_heads 2 there and 4 here" for each option that changes the function.

    Rates of dropout may differ, and so may max_positions of rotary positions.

    Args:
        trained: of the checkpoint.
        recipe: of this run.
        is_start: a training begins with the weights: adapters may be added, the precision of
            what stands still may be another, and a head may leave the embedding.
    """
    there, here = _network_facts(trained["network"]), _network_facts(recipe["network"])
    if is_start and there.get("network.tied") and there.keys() == here.keys():
        there["network.tied"] = here["network.tied"]
    if trained["lora"] or not is_start:
        lora = recipe["lora"] or {}
        layers = lora.get("layers", {})
        if is_start and trained["lora"]:
            layers = {n: size for n, size in layers.items() if n in trained["lora"]["layers"]}
        there |= _lora_facts(trained["lora"] or {}, (trained["lora"] or {}).get("layers", {}))
        here |= _lora_facts(lora, layers)
        if is_start:
            there["lora.base_dtype"] = here["lora.base_dtype"]
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return [f"{name} {there.get(name)} there and {here.get(name)} here" for name in names]


def _network_facts(network: Recipe) -> dict[str, Any]:
    facts = {"kind": network["kind"], **network["config"]}
    if network["kind"] == "own":
        config = DecoderConfig(**network["config"])
        facts |= {"num_kv_heads": config.kv_heads, "feed_forward": config.inner_size}
        facts["rope_scaling"] = config.rope_scaling  # of a checkpoint it is a dict
        facts.pop("max_positions" if config.positions == "rotary" else "rope_theta")
    return {f"network.{name}": value for name, value in facts.items() if _matters(name)}


def _matters(name: str) -> bool:
    is_rate = "dropout" in name or name.endswith("pdrop")
    return not is_rate and not name.startswith("_") and name not in _NO_FUNCTION


def _lora_facts(lora: Recipe, layers: dict[str, list[float]]) -> dict[str, Any]:
    return {
        "lora.layers": sorted(layers),
        "lora.rank": _one_or_all([layers[name][0] for name in sorted(layers)]),
        "lora.alpha": _one_or_all([layers[name][1] for name in sorted(layers)]),
        "lora.base_dtype": lora.get("base_dtype"),
        "lora.dora": lora.get("dora", False),
    }


def _one_or_all(values: list[float]) -> Any:
    return values[0] if len(set(values)) == 1 else values
