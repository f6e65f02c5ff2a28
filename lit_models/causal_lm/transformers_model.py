"""A causal language model of transformers with the interface of `Decoder`.

transformers is imported inside functions: it takes seconds.
Shapes: R rows, T positions, D hidden.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Content = dict[str, Any]


class PretrainedDecoder(nn.Module):
    """Tokens to hidden states, and to logits by `head`.

    Documents of a row are told apart by transformers itself, from positions that begin again, as
    long as it gets neither mask nor cache. Older versions and some models do not:
    `check_isolation` finds out.

    Args:
        model: of a ...ForCausalLM class.
        content: of its config.json, as it is exported.

    Raises:
        ValueError: the model takes no positions, or does not say where its hidden states are.
    """

    def __init__(self, model: Any, content: Content) -> None:
        super().__init__()
        if model.base_model is model:
            raise ValueError(
                f"{type(model).__name__} does not say which part of it makes the hidden states "
                "(base_model), so they are out of reach; take another class, such as Llama or Qwen."
            )
        if "position_ids" not in signature(model.base_model.forward).parameters:
            raise ValueError(
                f"{type(model).__name__} takes no position_ids, so documents of one row cannot be "
                "told apart; take a model with rotary or learned positions, such as Llama or GPT-2."
            )
        self.model = model.train()  # it comes in evaluation mode, and Lightning keeps modes
        self.content, self.is_compiled = content, False
        # A token of padding is often a text's end as well, which must learn; padding itself is in
        # no loss.
        self.embedding.padding_idx = None

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        return self.model.get_output_embeddings()

    def blocks(self) -> list[nn.Module]:
        """Return the repeated layers from the lowest to the highest.

        Raises:
            RuntimeError: the model does not keep its layers in one list.
        """
        count = self.model.config.get_text_config().num_hidden_layers
        for module in self.model.base_model.modules():
            if isinstance(module, nn.ModuleList) and len(module) == count:
                return list(module)
        raise RuntimeError(
            f"{type(self.model).__name__} has no list of {count} layers, so its blocks are not "
            "known; train it without fsdp, compilation and recomputed blocks."
        )

    def recompute_blocks(self) -> None:
        """As `Decoder.recompute_blocks`."""
        name = "activation_checkpointing_enable"
        if hasattr(self.model, name):
            getattr(self.model, name)({"use_reentrant": False})
        else:  # before transformers 5.20
            self.model.gradient_checkpointing_enable({"use_reentrant": False})

    def compile_blocks(self, backend: str | Callable[..., Any] = "inductor") -> None:
        """Compile each block in place, which leaves names and parameters as they are."""
        self.is_compiled = True
        for block in self.blocks():
            block.compile(backend=backend)

    def forward(
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        document_ids: Tensor | None,
        has_single_documents: bool = False,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [R, T, D] from which `head` makes logits.

        Args:
            input_ids: [R, T] int64; none where `inputs_embeds` are given.
            position_ids: [R, T] int64, from 0 in every document, 0 at padding.
            document_ids: [R, T] int64, ascending in a row, -1 = padding.
            has_single_documents: no row holds two documents, so that no mask is needed.
            cache: a DynamicCache of transformers, where rows are single documents.
            inputs_embeds: [R, T, D], rows of `embedding` or anything else in their place.
        """
        positions = None if has_single_documents else position_ids
        output = self.model.base_model(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            position_ids=positions,
            attention_mask=None,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state


def check_is_causal(content: Content, source: str) -> None:
    """Refuse a model that transformers has not as a causal language model.

    Raises:
        ValueError: it has none of this type, its config.json is wrong, or its weights are
            quantised.
    """
    from transformers import __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = content["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(
            f'{source} has model_type "{kind}", of which transformers {__version__} has no causal '
            "language model, and code from model folders is not run; give another model, or "
            "install a version that has it."
        )
    if content.get("quantization_config"):
        raise ValueError(
            f"{source} holds quantised weights, which are not trained here; give the folder that "
            "they were made from."
        )
    try:
        model_config(content)
    except Exception as error:  # of many kinds, such as a TypeError for a size in words
        reason = " ".join(str(error).split())
        raise ValueError(
            f"transformers {__version__} refuses config.json of {source}: {reason[:300]}; "
            "copy or download it again."
        ) from error


def built_model(content: Content) -> Any:
    """Return a model with random weights, without dropout."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        model_config(content), dtype=torch.float32, trust_remote_code=False
    )


def loaded_model(
    folder: str | Path,
    content: Content,
    dtype: torch.dtype | None,
    auto_class: str = "AutoModelForCausalLM",
    may_lack: str | None = None,
) -> Any:
    """Return a model with the weights of its folder, without dropout.

    Args:
        folder: with safetensors.
        content: of its config.json.
        dtype: of the weights; none keeps that of the files.
        auto_class: name of the class of transformers that chooses the model's.
        may_lack: beginning of the names of weights that the caller does not use.

    Raises:
        ValueError: weights are missing or of the wrong shape, or a file is damaged.
    """
    import transformers
    from safetensors import SafetensorError

    with _without_bars():
        try:
            model, report = getattr(transformers, auto_class).from_pretrained(
                str(folder),
                config=model_config(content),
                dtype=dtype or "auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, in fewer words
            )
        except SafetensorError as error:
            raise ValueError(
                f"the weights of {folder} are damaged ({error}); copy or download them again."
            ) from error
    _check_whole(model, report, str(folder), may_lack)
    return model


def _check_whole(model: Any, report: Content, folder: str, may_lack: str | None) -> None:
    missing = sorted(report["missing_keys"])
    faults = [f"lacks {n}" for n in missing if may_lack is None or not n.startswith(may_lack)]
    faults += [f"has another shape of {names}" for names in sorted(report["mismatched_keys"])]
    if faults:
        raise ValueError(
            f"{folder} does not hold the {type(model).__name__} of its config.json: it "
            f"{', '.join(faults[:3])} ({len(faults)} faults in all); both must be of one model, "
            "download or copy it again."
        )


def vocab_size_of(content: Content) -> int:
    """Return the rows of the embedding."""
    return model_config(content).get_text_config().vocab_size


def position_limit(content: Content) -> int | None:
    """Return the longest context that a model can compute; none where positions have no table."""
    config = model_config(content).get_text_config()
    if getattr(config, "rope_parameters", None) or getattr(config, "rope_theta", None):
        return None
    return getattr(config, "max_position_embeddings", None)


def trained_positions(content: Content) -> int | None:
    """Return the longest context that a model was made for; none where its config names none."""
    return getattr(model_config(content).get_text_config(), "max_position_embeddings", None)


def model_config(content: Content) -> Any:
    """Return transformers' configuration, with every dropout at 0."""
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[content["model_type"]].from_dict(dict(content))
    for name in _dropouts(config.to_dict()):
        setattr(config, name, 0.0)
    return config


def _dropouts(content: Content) -> list[str]:
    return [
        name
        for name, value in content.items()
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float | int)
    ]


@contextmanager
def _without_bars() -> Iterator[None]:
    """Progress bars of every rank would lie over each other."""
    from transformers.utils import logging

    were_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_shown:
            logging.enable_progress_bar()
