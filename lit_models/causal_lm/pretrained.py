"""Pretrained networks from folders in the Hugging Face layout; recipes of networks.

A recipe describes a network without its weights, in plain values that a checkpoint keeps:
{"kind": "own", "config": fields of DecoderConfig} or {"kind": "transformers", "config": content of
config.json}. A checkpoint can therefore be loaded without the folder.

transformers is imported inside functions, as its import takes seconds.
Shapes: R rows, T positions, S positions so far, D hidden, V vocabulary.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from lit_models.causal_lm.network import (
    Decoder,
    DecoderConfig,
    Documents,
    KeyValueCache,
    attend,
    documents_of,
    recomputation,
    splits_of,
)
from lit_models.training.metrics import evaluating
from lit_models.training.sharding import TensorSplit

CONFIG, GENERATION = "config.json", "generation_config.json"
PICKLED = (".bin", ".pt", ".pth")
LARGE_LOGIT, HEAD_TOLERANCE = 1000.0, 0.02
PACKED = "unisono_packed"  # name under which transformers knows `attend`
# Model types that use `attend`, except in layers with sliding windows.
PACKED_TYPES = ("gpt2", "llama", "mistral", "qwen2", "qwen3")

Content = dict[str, Any]  # of a config.json
Recipe = dict[str, Any]


class PretrainedDecoder(nn.Module):
    """Causal language model of transformers with the interface of `Decoder`.

    `attend` separates the documents of a row for `PACKED_TYPES`; for other models, transformers
    does so wherever positions restart at 0. Older versions and some models do not, which
    `check_isolation` detects.

    Args:
        model: of a ...ForCausalLM class.
        content: of its config.json; exported unchanged.

    Raises:
        ValueError: the model takes no position_ids, or has no base_model for its hidden states.
    """

    def __init__(self, model: Any, content: Content) -> None:
        super().__init__()
        base = model.base_model
        if base is model or "position_ids" not in signature(base.forward).parameters:
            raise ValueError(
                f"{type(model).__name__} has no base_model that takes position_ids, so documents "
                "of one row cannot be told apart; take a model with rotary or learned positions, "
                "such as Llama, Qwen or GPT-2."
            )
        self.model = model.train()  # from_pretrained returns eval mode, which Lightning would keep
        self.content, self.is_compiled = content, False
        self.is_packed = model.config.model_type in PACKED_TYPES
        if self.is_packed:
            _register_attention()
            model.set_attn_implementation(PACKED)
        if model.config.get_text_config() is not model.config:  # multimodal: train only the text
            model.requires_grad_(False)
            for part in (model.get_decoder(), self.head):
                part.requires_grad_(True)
        # The padding token is often also the end-of-text token, which must be trained; padding
        # itself has no loss.
        self.embedding.padding_idx = None

    @property
    def recipe(self) -> Recipe:
        return {"kind": "transformers", "config": self.content}

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def blocks(self) -> list[nn.Module]:
        """See `repeated_layers`."""
        return repeated_layers(self.model)

    def tensor_plan(self) -> dict[str, TensorSplit]:
        """As in `Decoder.tensor_plan`; empty if layers do not have Llama's names."""
        config = self.model.config
        if not self.is_packed or config.model_type == "gpt2":
            return {}
        units = config.num_attention_heads, config.num_key_value_heads, config.intermediate_size
        return splits_of("model.model.layers.*.self_attn", "model.model.layers.*.mlp", *units)

    def recompute_blocks(self, keeps_products: bool = False) -> None:
        """See `Decoder.recompute_blocks`."""
        self.model.activation_checkpointing_enable(recomputation(keeps_products))

    def new_cache(self, room: int = 0) -> Any:
        """Return an empty cache for `forward`; layers without a sliding window reserve room for new
        positions, see `KeyValueCache`."""
        from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

        class Layer(DynamicLayer):
            def update(self, *new: Tensor, **options: Any) -> Any:
                if not self.is_initialized:
                    self.read, self.is_initialized = KeyValueCache(1, room), True
                self.keys, self.values = self.read.extended(0, *new[:2])
                return self.keys, self.values

            def batch_select_indices(self, indices: Tensor) -> None:
                self.read.batch_select_indices(indices)

        cache = DynamicCache(config=self.model.config)
        return Cache([Layer() if type(x) is DynamicLayer else x for x in cache.layers])

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        has_single_documents: bool = False,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        mask: Tensor | None = None,
        bounds: tuple[Tensor, int] | None = None,
    ) -> Tensor:
        """Return the hidden states [R, T, D], which `head` maps to logits. Args: as in
        `Decoder.forward`; `position_ids` must be 0 at padding."""
        more: dict[str, Any] = {} if cache is None else {"cache": cache}
        if self.is_packed and document_ids is not None:
            config, more["documents"] = self.model.config, Documents()
            if not has_single_documents:
                size = getattr(config, "head_dim", None)
                size = size or config.hidden_size // config.num_attention_heads
                how = (self.embedding.weight, size, self.is_compiled, bounds)
                more["documents"] = documents_of(document_ids, *how)
            needs_mask = ("sliding_window", "attention_dropout", "attn_pdrop")
            if not any(getattr(config, name, None) for name in needs_mask):
                # Without a 4-d mask, transformers would synchronize with the device to detect
                # packed rows, and build a mask [R, 1, T, T] that no layer here uses.
                mask = document_ids.new_ones(1, 1, 1, 1)
        output = self.model.base_model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=None if has_single_documents and cache is None else position_ids,
            attention_mask=None if mask is None else mask.long(),
            use_cache=cache is not None,
            **more,
        )
        return output.last_hidden_state


def repeated_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a transformers model from lowest to highest; RuntimeError if they are
    not in one ModuleList."""
    config = model.config.get_text_config()
    count, is_plain = config.num_hidden_layers, config is model.config
    for module in (model.base_model if is_plain else model.get_decoder()).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    raise RuntimeError(
        f"{type(model).__name__} has no list of {count} layers, so its blocks are not known; take "
        "another, such as BERT or Llama, or train it without fsdp, compilation, recomputed blocks."
    )


def _register_attention() -> None:
    """Register `attend` through transformers' public attention interface."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def packed(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        documents = options.pop("documents", None)
        if documents is None or options.get("sliding_window") or options.get("dropout"):
            return sdpa_attention_forward(module, q, k, v, mask, **options)
        return attend(q, k, v, documents, options.get("scaling")).transpose(1, 2), None

    AttentionInterface.register(PACKED, packed)
    AttentionMaskInterface.register(PACKED, sdpa_mask)


Network = Decoder | PretrainedDecoder


def read_recipe(folder: str | Path) -> Recipe:
    """Return the recipe of a model's folder; reads only its config.json.

    Raises:
        FileNotFoundError: the folder or its config.json does not exist.
        ValueError: config.json is damaged, transformers has no causal language model of its type,
            or the weights are quantised.
    """
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    content = read_config(folder)
    kind = content["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f'{folder} has model_type "{kind}", of which transformers {__version__} has no causal '
            "language model, and code from model folders is not run; give another model, or "
            "install a version that has it."
        )
    return recipe_of(folder, content)


def recipe_of(
    folder: str | Path, content: Content, auto_class: str = "AutoModelForCausalLM"
) -> Recipe:
    """Return the recipe of a folder with this config.json, and what an export hands on from it;
    ValueError if weights are quantised, or transformers refuses it. Args: as in `model_of`."""
    if content.get("quantization_config"):
        raise ValueError(
            f"{folder} holds quantised weights, which are not trained here; give the folder that "
            "they were made from."
        )
    with refusals_of(folder), torch.device("meta"), torch.random.fork_rng([]):
        model_of(content, auto_class=auto_class)
    names = ("generation_config", "tokenizer_config")
    paths = [Path(folder) / f"{name}.json" for name in names]
    found = [json.loads(path.read_text("utf-8")) if path.is_file() else {} for path in paths]
    found[1] = {name: value for name, value in found[1].items() if name == "model_max_length"}
    return {"kind": "transformers", "config": content, **dict(zip(names, found, strict=True))}


@contextmanager
def refusals_of(source: str | Path) -> Iterator[None]:
    """Turn any error of transformers about a config.json, such as a RuntimeError for heads that do
    not divide the width, into a ValueError that names the folder."""
    try:
        yield
    except Exception as error:
        from transformers import __version__

        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ValueError(
            f"transformers {__version__} refuses config.json of {source}: {reason}; "
            "copy or download it again."
        ) from error


def check_recipe(recipe: Recipe, context_length: int, vocab_size: int) -> None:
    """Raise ValueError if context_length exceeds the learned positions, or the tokenizer's
    vocabulary the embedding."""
    limit = most_positions(recipe)
    if limit is not None and context_length > limit:
        raise ValueError(
            f"context_length {context_length} is longer than the network's {limit} learned "
            f"positions; lower data.context_length to {limit} or less, raise max_positions for a "
            "network from scratch, or take one with rotary positions."
        )
    config = text_config(recipe)
    size = config.vocab_size or vocab_size  # `None`: an own network takes the tokenizer's size
    if vocab_size > size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens and the network embeds {size}; take the "
            "model's own tokenizer, or a network from scratch with vocab_size left out."
        )


def text_config(recipe: Recipe) -> Any:
    """Return a recipe's DecoderConfig, or transformers' configuration of its text model."""
    if recipe["kind"] == "own":
        return DecoderConfig(**recipe["config"])
    return model_config(recipe["config"]).get_text_config()


def most_positions(recipe: Recipe) -> int | None:
    """Return the number of learned positions; `None` for rotary positions, which have no limit."""
    config = text_config(recipe)
    if recipe["kind"] == "own":
        is_rotary, limit = config.positions == "rotary", config.max_positions
    else:
        rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None)
        is_rotary, limit = bool(rope), getattr(config, "max_position_embeddings", None)
    return None if is_rotary else limit


def network_from_config(recipe: Recipe) -> Network:
    """Return the network of a recipe with random weights, in float32."""
    config = recipe["config"]
    if recipe["kind"] == "own":
        return Decoder(DecoderConfig(**config))
    return PretrainedDecoder(model_of(config), config)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Move each parameter, but no buffer, to `meta` when it is registered. Restores the random
    state, as parts of transformers' models draw random numbers."""

    def moved(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        is_whole = parameter is not None and not parameter.is_meta
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad) if is_whole else None

    with torch.random.fork_rng([]), register_module_parameter_registration_hook(moved):
        yield


def load_network(
    folder: str | Path, dtype: torch.dtype | None = torch.float32
) -> PretrainedDecoder:
    """Return the network of a model's folder with its weights, on the CPU, in training mode.

    Dropout is 0, whatever config.json says; `exact_dropout` and LoRA have their own dropout.

    Args:
        dtype: of the weights; `None` memory-maps them in the files' dtype, or converts them to
            float32 if the files have several dtypes.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: a file is damaged or does not fit the others, or the model is not supported.
    """
    content = read_recipe(folder)["config"]
    weight_files(folder)  # raises if there are only pickles
    network = PretrainedDecoder(model_of(content, folder, dtype), content)
    is_tied = network.head.weight is network.embedding.weight
    if network.model.config.get_text_config().tie_word_embeddings and not is_tied:
        raise ValueError(
            f"{folder} says tie_word_embeddings, but its lm_head.weight differs from the "
            "embedding; set tie_word_embeddings to false in its config.json."
        )
    check_head(network, str(folder))
    return network


def model_of(
    content: Content,
    folder: str | Path | None = None,
    dtype: torch.dtype | None = torch.float32,
    auto_class: str = "AutoModelForCausalLM",
    may_lack: str | None = None,
) -> Any:
    """Return a transformers model with the weights of its folder, without dropout.

    Args:
        folder: with safetensors; `None` draws random weights, in float32.
        dtype: of the weights, as in `load_network`.
        auto_class: transformers class that chooses the model's class.
        may_lack: prefix of weights that may be missing, as the caller does not use them.

    Raises:
        ValueError: weights are missing or of the wrong shape, or a file is damaged.
    """
    import transformers
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    auto, config = getattr(transformers, auto_class), model_config(content)
    if folder is None:
        return auto.from_config(config, dtype=torch.float32, trust_remote_code=False)
    transformers.utils.logging.disable_progress_bar()  # bars of several ranks would overlap
    kinds: set[torch.dtype] = set()  # dtypes of the files, whatever config.json says
    try:
        for path in weight_files(folder) if dtype is None else ():
            kinds |= {tensor.dtype for tensor in load_file(path).values()}  # mapped, not read
        model, report = auto.from_pretrained(
            str(folder),
            config=config,
            dtype=kinds.pop() if len(kinds) == 1 else dtype or torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with a shorter message
        )
    except SafetensorError as error:
        raise ValueError(
            f"the weights of {folder} are damaged ({error}); copy or download them again."
        ) from error
    missing = sorted(report["missing_keys"])
    faults = [f"lacks {n}" for n in missing if may_lack is None or not n.startswith(may_lack)]
    faults += [f"has another shape of {names}" for names in sorted(report["mismatched_keys"])]
    if may_lack is None:  # else the files may also hold heads that the caller does not use
        faults += [f"has the unknown {name}" for name in sorted(report["unexpected_keys"])]
    if faults:
        raise ValueError(
            f"{folder} does not hold the {type(model).__name__} of its config.json: it "
            f"{', '.join(faults[:3])} ({len(faults)} faults in all); both must be of one model, "
            "download or copy it again."
        )
    return model


@torch.no_grad()
def check_head(network: PretrainedDecoder, source: str) -> None:
    """Raise ValueError if a model's logits are not the product of its head and hidden states.

    The test scales the head's output up, so that a cap on the logits shows.
    """

    def enlarged(logits: Tensor) -> Tensor:
        return logits * (LARGE_LOGIT / logits.abs().max())

    tokens = torch.arange(3, device=network.head.weight.device)[None]
    hook = network.head.register_forward_hook(lambda head, inputs, output: enlarged(output))
    with refusals_of(source), hook, evaluating(network):
        logits = network.model(input_ids=tokens, use_cache=False).logits
        hidden = network(tokens, tokens, torch.zeros_like(tokens))
    difference = (enlarged(hidden @ network.head.weight.T) - logits).abs().max()
    if not difference <= HEAD_TOLERANCE * LARGE_LOGIT:
        raise ValueError(
            f"{source} is a {type(network.model).__name__}, whose logits are not the product of "
            "its head and its hidden states (they are capped, scaled or shifted by a bias): its "
            "loss would be wrong here. Take a model of another class, such as Llama or Qwen."
        )


def model_config(content: Content) -> Any:
    """Return transformers' configuration with all dropout, layer drop and jitter set to 0."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    config = CONFIG_MAPPING[content["model_type"]].from_dict(dict(content))
    inner = [part for part in vars(config).values() if isinstance(part, PretrainedConfig)]
    for part in (config, *inner):
        for name, value in part.to_dict().items():
            if ("drop" in name or "jitter" in name) and type(value) in (float, int):
                setattr(part, name, type(value)(0))
    return config


def read_config(folder: str | Path) -> Content:
    """Return the content of a folder's config.json; raises as `read_recipe`."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f'"{folder}" is no folder; models are read from local ones. Download it first, such '
            f"as with: hf download {folder} --local-dir models/{folder.name}"
        )
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: {folder} is no model in the Hugging Face layout; give a folder "
            "that save_pretrained or hf download made."
        )
    content, fault = None, "no model_type"
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        fault = str(error)
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise ValueError(
            f"{path} is damaged or not of a model of transformers ({fault}); give a folder that "
            "save_pretrained or hf download made."
        )
    return content


def weight_files(folder: str | Path) -> list[Path]:
    """Return a folder's safetensors files; FileNotFoundError without any, as pickles, which can run
    any code, are not read."""
    files = sorted(Path(folder).glob("model*.safetensors"))
    if not files:
        pickled = sorted(f.name for f in Path(folder).iterdir() if f.suffix in PICKLED)
        raise FileNotFoundError(
            f"{folder} holds no model.safetensors"
            f"{f', but {pickled[0]}, a pickle, which can run any code' if pickled else ''}; take a "
            "revision with safetensors, or convert it where you trust it (from_pretrained, then "
            "save_pretrained, of transformers)."
        )
    return files
