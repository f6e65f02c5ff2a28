"""The subject, a frozen language model: its activations, copies of it, and activation patching.

Shapes: R or B rows, T tokens, D features, P positions that are compared, V vocabulary.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from datamodules.core.batches import ActivationBatch, SubjectFacts
from datamodules.core.store import array_digest, digest_of, file_digest
from lit_models.causal_lm.adapters import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.network import Decoder, DecoderConfig
from lit_models.causal_lm.pretrained import (
    Network,
    Recipe,
    load_network,
    most_positions,
    network_from_config,
    read_config,
    read_recipe,
    text_config,
    weight_files,
)
from lit_models.training.metrics import float32_on

TRAINED_ON = "trained_on"  # recipe key: digests of the training parts of all runs so far


def read(
    network: Network,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None = None,
    cache: Any = None,
    start: int = 0,
) -> Tensor:
    """Return the hidden states [R, T, D] of rows with one document each.

    Args:
        input_ids: [R, T] int64, padded on the right; `None` with `inputs_embeds`.
        inputs_embeds: [R, T, D].
        cache: of the `start` previous positions; the new ones are appended, gradients pass through
            it, and T is 1 after the first call.
        start: number of previous positions.
    """
    inputs = input_ids if inputs_embeds is None else inputs_embeds
    assert inputs is not None
    rows, length = inputs.shape[:2]
    places = torch.arange(start, start + length, device=inputs.device).expand(rows, length)
    documents = torch.zeros_like(places) if cache is None else None
    return network(input_ids, places, documents, True, cache, inputs_embeds)


@contextmanager
def output_edited(block: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Apply `edit` to the output [R, T, D] of a block."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        is_many = isinstance(output, tuple)  # in some models of transformers
        return (edit(output[0]), *output[1:]) if is_many else edit(output)

    with block.register_forward_hook(hook):
        yield


def outputs_of(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """Run a network and return the outputs [R, T, D] of some of its blocks."""
    outputs: list[Any] = []
    with ExitStack() as hooks:
        for block in blocks:
            hook = block.register_forward_hook(lambda *call: outputs.append(call[-1]))
            hooks.enter_context(hook)
        run()
    return [one[0] if isinstance(one, tuple) else one for one in outputs]


@dataclass(frozen=True)
class SubjectOptions:
    """The model to explain, and the layer.

    Args:
        path: folder of the model in the Hugging Face layout, as `unisono export` writes it.
        layer: index of the block whose output is the activation, from 0.
        network: shape of a subject with random weights, instead of a folder.
        random_weights: use the folder's shape and tokenizer, but random weights, as a control.
    """

    path: str | None = None
    layer: int = 2
    network: DecoderConfig | None = None
    random_weights: bool = False

    def __post_init__(self) -> None:
        if (self.path is None) == (self.network is None):
            raise ValueError(
                "a lens needs one subject: name a model's folder with subject.path, or the shape "
                "of one with random weights with subject.network."
            )


class Subject(nn.Module):
    """Frozen network and the ascending indices of the blocks to explain; ValueError if a block does
    not exist."""

    def __init__(self, network: Network, *layers: int) -> None:
        super().__init__()
        for layer in layers:
            check_layer(layer, len(network.blocks()))
        self.network, self.layers = network.requires_grad_(False).eval(), layers
        # A network of only the lowest blocks, which are shared, not copied.
        shared: list[Any] = [*network.parameters(), *network.blocks()]
        self.lower = copy.deepcopy(network, {id(part): part for part in shared})
        keep_layers(self.lower, layers[-1] + 1)

    @property
    def layer_blocks(self) -> list[nn.Module]:
        return [self.network.blocks()[layer] for layer in self.layers]

    def train(self, mode: bool = True) -> "Subject":
        return super().train(False)

    def of_layers(self, input_ids: Tensor) -> list[Tensor]:
        """Return the activations [B, T, D] of each layer for `input_ids` [B, T] int64, without
        computing the blocks above. ValueError if T exceeds the subject's positions."""
        length, limit = input_ids.shape[1], most_positions(self.network.recipe)
        if limit is not None and length > limit:
            raise ValueError(f"a text has {length} tokens, the subject {limit} positions; cut it.")
        return outputs_of(self.layer_blocks, lambda: read(self.lower, input_ids))


def check_layer(layer: int, num_layers: int) -> None:
    if not 0 <= layer < num_layers:
        raise ValueError(
            f"layer {layer} is none of the subject's {num_layers} blocks; give subject.layer "
            f"or model.layers from 0 to {num_layers - 1}."
        )


def subject_recipe(options: SubjectOptions, vocab_size: int) -> Recipe:
    """Return the recipe of the subject's network; `vocab_size` is used if there is no folder.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the folder holds no supported model.
    """
    if options.path is not None:
        recipe = read_recipe(options.path)
        if getattr(text_config(recipe), "hidden_size_per_layer_input", 0):
            raise ValueError(
                f"each block of the model in {options.path} also reads the words (inputs per "
                "layer, as in Gemma 3n), but a lens gives it vectors in their place; take another "
                "model."
            )
        return recipe
    assert options.network is not None
    size = options.network.vocab_size or vocab_size
    return replace(options.network, vocab_size=size).recipe


def load_subject(options: SubjectOptions, recipe: Recipe) -> Network:
    """Return the subject's network with its weights, on the CPU.

    Raises:
        FileNotFoundError: a file of the model is missing.
        ValueError: a file is damaged.
    """
    if options.path is not None and not options.random_weights:
        return load_network(options.path)
    return _random_network(recipe)


def _random_network(recipe: Recipe) -> Network:
    # With the same seed, another device or precision would draw other numbers.
    with torch.random.fork_rng(), float32_on("cpu"):
        torch.manual_seed(0)
        return network_from_config(recipe)


def subject_facts(options: SubjectOptions, recipe: Recipe) -> SubjectFacts:
    """Return the facts by which a store and a lens identify the subject."""
    facts: dict[str, Any] = {"recipe": recipe}
    if options.path is None or options.random_weights:
        network = _random_network(recipe)
        weights = sorted(network.state_dict().items())
        named = ((f"{n} {tuple(w.shape)} {w.dtype}", w.numpy()) for n, w in weights)
        facts["weights"] = [array_digest(*chain.from_iterable(named))]
    else:
        facts["weights"] = [file_digest(path) for path in weight_files(options.path)]
        with torch.device("meta"):
            network = network_from_config(recipe)
    size, layers = network.embedding.weight.shape[1], len(network.blocks())
    check_layer(options.layer, layers)
    return SubjectFacts(digest_of(facts), options.layer, "block_output", size, layers)


def tokenizer_folder(options: SubjectOptions) -> str | None:
    """Return the folder of the subject's tokenizer; `None` if the data have their own. Raises as
    `read_config`."""
    if options.path is None:
        return None
    read_config(options.path)  # reports a wrong folder before its tokenizer is missed
    return str(Path(options.path).expanduser())


@dataclass(frozen=True)
class BaseOptions:
    """What to train of a copy of the subject; by default all but the embeddings of words.

    Args:
        is_frozen: freeze the copy; only the lens's vectors and maps around it learn.
        lora: train only adapters.
        unfreeze_at: first optimizer step that trains the copy. Set at most one of the three.
    """

    is_frozen: bool = False
    lora: LoraOptions | None = None
    unfreeze_at: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.lora, dict):  # from a checkpoint
            object.__setattr__(self, "lora", LoraOptions(**self.lora))
        if self.is_frozen + (self.lora is not None) + (self.unfreeze_at > 0) > 1:
            raise ValueError(
                "is_frozen, lora and unfreeze_at exclude each other, since each says what of a "
                "network is trained; give only one of them."
            )
        if self.lora is not None and self.lora.base_dtype != "float32":
            raise ValueError(
                "adapters of a lens use the subject's weights in the subject's dtype: leave "
                "lora.base_dtype out."
            )


def copy_of(network: Network, options: BaseOptions, num_layers: int | None = None) -> Network:
    """Return a copy of a network with its lowest `num_layers` blocks, or all; it shares the
    network's embedding and head."""
    words = [*network.embedding.parameters(), *network.head.parameters()]
    shared = {id(weight): weight for weight in words}
    network_copy = copy.deepcopy(network, dict(shared))  # deepcopy shares the values in its memo
    if num_layers is not None:
        keep_layers(network_copy, num_layers)
    for parameter in network_copy.parameters():
        parameter.requires_grad_(id(parameter) not in shared and not options.is_frozen)
    if options.lora is not None:
        add_lora(network_copy, lora_recipe(network_copy, options.lora))
    return network_copy.train()


def embedded(network: Network, words: Tensor) -> Tensor:
    """Return the embeddings [..., D] of words given as one-hot or soft vectors [..., V]."""
    table = network.embedding.weight
    return (words.to(table.dtype) @ table) * getattr(network.embedding, "embed_scale", 1.0)


def keep_layers(network: Network, num_layers: int) -> None:
    """Remove all but a network's lowest blocks, in place."""
    if isinstance(network, Decoder):
        network.layers = network.layers[:num_layers]
        return
    blocks = network.blocks()
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is blocks[0]:
            del module[num_layers:]
    network.model.config.get_text_config().num_hidden_layers = num_layers


def freeze_unused(module: nn.Module, run: Callable[[], Tensor]) -> None:
    """Freeze the parameters of a module that do not affect the result of `run`.

    DDP would wait for the gradients of such parameters, for instance of a final norm above the
    layer that is read.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        gradients = torch.autograd.grad(run().sum(), trainable, allow_unused=True)
    for parameter, gradient in zip(trainable, gradients, strict=True):
        parameter.requires_grad_(gradient is not None)


FOLLOWING = 8  # positions after the replaced one that are compared, too


class PatchedSubject:
    """The subject's logits for the documents of a batch, with and without replaced activations."""

    def __init__(self, subject: Subject, batch: ActivationBatch) -> None:
        self.subject, self.ids = subject, batch["input_ids"]
        self.rows = torch.arange(len(self.ids), device=self.ids.device)
        self.position, last = batch["position"], batch["lengths"] - 2
        self.layer = batch.get("layer")
        steps = torch.arange(1 + FOLLOWING, device=self.ids.device)
        places = self.position[:, None] + steps  # [B, P]
        # [B, P] bool, positions that have a next token in the document.
        self.counts = places <= last[:, None]
        self.places = torch.minimum(places, last[:, None])
        # [B, P, V], the logits at the position and at the `FOLLOWING` next ones.
        self.true = self._logits(read(subject.network, self.ids))

    def effect(self, replacement: Tensor) -> tuple[Tensor, Tensor]:
        """Return the effect of replacing the true activations by others [B, D], [B] float64 each:
        KL(true || changed) of the next token at the position, and the increase of the actual next
        token's nats."""
        changed = self.changed(replacement)
        own, other = (logits[:, 0].double().log_softmax(-1) for logits in (self.true, changed))
        word = self.ids[self.rows, self.position + 1][:, None]
        nats = (own.exp() * (own - other)).sum(-1)
        return nats, (own - other).gather(1, word)[:, 0]

    def changed(self, replacement: Tensor) -> Tensor:
        """Return the logits [B, P, V] with the true activations replaced by others [B, D], each at
        its layer; gradients pass through."""

        def patch(output: Tensor, index: int) -> Tensor:
            place, new = (self.rows, self.position), replacement.to(output.dtype)
            if self.layer is not None:
                new = torch.where((self.layer == index)[:, None], new, output[place])
            return output.index_put(place, new)

        with ExitStack() as edits:
            for index, block in enumerate(self.subject.layer_blocks):
                edits.enter_context(output_edited(block, partial(patch, index=index)))
            return self._logits(read(self.subject.network, self.ids))

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.subject.network.head(hidden[self.rows[:, None], self.places])


def training_digest(hashes: np.ndarray) -> str:
    """Return a hex digest of a training part's set of documents. Args: hashes of documents [D]."""
    return array_digest(np.unique(hashes))[:32]
