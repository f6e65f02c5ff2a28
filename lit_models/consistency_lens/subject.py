"""The subject: a frozen language model, the place in it that a lens explains, and copies of it.

Shapes: R or B rows, T tokens, D features, P places that are looked at, V vocabulary.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from datamodules.core.batches import ActivationBatch, SubjectFacts
from datamodules.core.store import digest_of, file_digest
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
    weight_files,
)
from lit_models.training.metrics import float32_on

TRAINED_ON = "trained_on"  # digests of training parts, of all runs that the weights went through


def read(
    network: Network,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None = None,
    cache: Any = None,
    start: int = 0,
) -> Tensor:
    """Return the hidden states [R, T, D] of rows that are one document each.

    Args:
        input_ids: [R, T] int64, padded at the right; or `None`, and
        inputs_embeds: [R, T, D].
        cache: of the `start` positions before, which grows by these; gradients pass through it. T
            is 1 after the first call.
        start: see cache.
    """
    given = input_ids if inputs_embeds is None else inputs_embeds
    assert given is not None
    rows, length = given.shape[:2]
    places = torch.arange(start, start + length, device=given.device).expand(rows, length)
    documents = torch.zeros_like(places) if cache is None else None
    return network(input_ids, places, documents, True, cache, inputs_embeds)


@contextmanager
def output_edited(block: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Pass the output [R, T, D] of a block through `edit`."""

    def hook(module: nn.Module, given: Any, output: Any) -> Any:
        is_many = isinstance(output, tuple)  # of some models of transformers
        return (edit(output[0]), *output[1:]) if is_many else edit(output)

    with block.register_forward_hook(hook):
        yield


def outputs_of(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[Tensor]:
    """Return the output [R, T, D] of each of some blocks while their network runs."""
    found: list[Any] = []
    with ExitStack() as hooks:
        for block in blocks:
            hook = block.register_forward_hook(lambda *call: found.append(call[-1]))
            hooks.enter_context(hook)
        run()
    return [one[0] if isinstance(one, tuple) else one for one in found]


@dataclass(frozen=True)
class SubjectOptions:
    """The explained model, and the place in it.

    Args:
        path: folder of the model in the Hugging Face layout, as `unisono export` writes it.
        layer: index of the block whose output is the activation, from 0.
        network: shape of a subject with random weights, instead of a folder.
        random_weights: take the folder's shape and tokenizer, and no weights: a control.
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
    """A frozen network, and the indices of some of its blocks, ascending; a ValueError where it has
    no such block."""

    def __init__(self, network: Network, *layers: int) -> None:
        super().__init__()
        for layer in layers:
            check_layer(layer, len(network.blocks()))
        self.network, self.layers = network.requires_grad_(False).eval(), layers
        # A network of the lowest blocks alone: the very same blocks and parameters, not copies.
        shared: list[Any] = [*network.parameters(), *network.blocks()]
        self.lower = copy.deepcopy(network, {id(part): part for part in shared})
        keep_layers(self.lower, layers[-1] + 1)

    @property
    def layer_blocks(self) -> list[nn.Module]:
        return [self.network.blocks()[layer] for layer in self.layers]

    def train(self, mode: bool = True) -> "Subject":
        return super().train(False)

    def of_layers(self, input_ids: Tensor) -> list[Tensor]:
        """Return the activations [B, T, D] of each layer at every token of `input_ids` [B, T]
        int64; the blocks above the last one are not computed. ValueError: beyond its positions."""
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
    """Return the recipe of the subject's network; `vocab_size` is for one without a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds nothing that can be computed.
    """
    if options.path is not None:
        return read_recipe(options.path)
    assert options.network is not None
    size = options.network.vocab_size or vocab_size
    return replace(options.network, vocab_size=size).recipe


def load_subject(options: SubjectOptions, recipe: Recipe) -> Network:
    """Return the subject's network of a `subject_recipe` with its weights, on the CPU.

    Raises:
        FileNotFoundError: a file of the model is missing.
        ValueError: one is damaged.
    """
    if options.path is not None and not options.random_weights:
        return load_network(options.path)
    return _random_network(recipe)


def _random_network(recipe: Recipe) -> Network:
    # Another device or precision draws other numbers of the same seed.
    with torch.random.fork_rng(), float32_on("cpu"):
        torch.manual_seed(0)
        return network_from_config(recipe)


def subject_facts(options: SubjectOptions, recipe: Recipe) -> SubjectFacts:
    """Return what a store and a lens keep of the subject, to know it again."""
    facts: dict[str, Any] = {"recipe": recipe}
    if options.path is None or options.random_weights:
        network = _random_network(recipe)
        digest = hashlib.sha256()
        for name, weight in sorted(network.state_dict().items()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(weight.contiguous().numpy().tobytes())
        facts["weights"] = [digest.hexdigest()]
    else:
        facts["weights"] = [file_digest(path) for path in weight_files(options.path)]
        with torch.device("meta"):
            network = network_from_config(recipe)
    size, layers = network.embedding.weight.shape[1], len(network.blocks())
    check_layer(options.layer, layers)
    return SubjectFacts(digest_of(facts), options.layer, "block_output", size, layers)


def tokenizer_folder(options: SubjectOptions) -> str | None:
    """Return the folder of the subject's tokenizer; `None` where the data bring one. Errors as of
    `read_config`."""
    if options.path is None:
        return None
    read_config(options.path)  # before anybody misses a tokenizer there
    return str(Path(options.path).expanduser())


@dataclass(frozen=True)
class BaseOptions:
    """The part that learns of a network that begins as the subject; by default all but the words.

    Args:
        is_frozen: nothing of it learns, only what stands around it.
        lora: adapters alone learn.
        unfreeze_at: optimizer step from which on it learns. Only one of the three may be given.
    """

    is_frozen: bool = False
    lora: LoraOptions | None = None
    unfreeze_at: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.lora, dict):  # of a checkpoint's plain values
            object.__setattr__(self, "lora", LoraOptions(**self.lora))
        if self.is_frozen + (self.lora is not None) + (self.unfreeze_at > 0) > 1:
            raise ValueError(
                "is_frozen, lora and unfreeze_at each say what of a network learns; give one of "
                "them alone."
            )
        if self.lora is not None and self.lora.base_dtype != "float32":
            raise ValueError(
                "an adapter of a lens is on the weights that the subject has: leave "
                "lora.base_dtype out."
            )


def copy_of(network: Network, options: BaseOptions, num_layers: int | None = None) -> Network:
    """Return a copy of a network with its lowest `num_layers` blocks, or all, whose embedding and
    head are the network's own."""
    words = [*network.embedding.parameters(), *network.head.parameters()]
    shared = {id(weight): weight for weight in words}
    made = copy.deepcopy(network, dict(shared))  # what the memo holds is not copied
    if num_layers is not None:
        keep_layers(made, num_layers)
    for parameter in made.parameters():
        parameter.requires_grad_(id(parameter) not in shared and not options.is_frozen)
    if options.lora is not None:
        add_lora(made, lora_recipe(made, options.lora))
    return made.train()


def embedded(network: Network, words: Tensor) -> Tensor:
    """Return the embeddings [..., D] of words given as shares of each token [..., V]."""
    table = network.embedding.weight
    return (words.to(table.dtype) @ table) * getattr(network.embedding, "embed_scale", 1.0)


def keep_layers(network: Network, num_layers: int) -> None:
    """Cut a network behind its lowest blocks, in place."""
    if isinstance(network, Decoder):
        network.layers = network.layers[:num_layers]
        return
    blocks = network.blocks()
    for module in network.modules():
        if isinstance(module, nn.ModuleList) and len(module) and module[0] is blocks[0]:
            del module[num_layers:]
    network.model.config.get_text_config().num_hidden_layers = num_layers


def freeze_unused(module: nn.Module, run: Callable[[], Tensor]) -> None:
    """Freeze every parameter of a module that does not reach the result of `run`.

    Under ddp a parameter without a gradient would be waited for: a final norm behind the layer
    that is read, for instance.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        found = torch.autograd.grad(run().sum(), trainable, allow_unused=True)
    for parameter, gradient in zip(trainable, found, strict=True):
        parameter.requires_grad_(gradient is not None)


FOLLOWING = 8  # positions behind the replaced one that are looked at


class PatchedSubject:
    """The documents of one batch in the subject."""

    def __init__(self, subject: Subject, batch: ActivationBatch) -> None:
        self.subject, self.ids = subject, batch["input_ids"]
        self.rows = torch.arange(len(self.ids), device=self.ids.device)
        self.position, last = batch["position"], batch["lengths"] - 2
        self.layer = batch.get("layer")
        steps = torch.arange(1 + FOLLOWING, device=self.ids.device)
        places = self.position[:, None] + steps  # [B, P]
        # [B, P] bool, places whose next word the document holds.
        self.counts = places <= last[:, None]
        self.places = torch.minimum(places, last[:, None])
        # [B, P, V], the logits at the position and the `FOLLOWING` ones behind it.
        self.true = self._logits(read(subject.network, self.ids))

    def effect(self, replacement: Tensor) -> tuple[Tensor, Tensor]:
        """Return the effect of activations [B, D] in the place of the true ones, [B] float64 each:
        KL(true || changed) of the next word at the position, and the nats of that word by which the
        changed subject is worse."""
        changed = self.changed(replacement)
        own, other = (logits[:, 0].double().log_softmax(-1) for logits in (self.true, changed))
        word = self.ids[self.rows, self.position + 1][:, None]
        nats = (own.exp() * (own - other)).sum(-1)
        return nats, (own - other).gather(1, word)[:, 0]

    def changed(self, replacement: Tensor) -> Tensor:
        """Return the logits [B, P, V] with activations [B, D] in the place of the true ones, each
        at its layer; gradients pass through."""

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
    """Return hex, equal for training parts of the same documents. Args: hashes of them, [D]."""
    return hashlib.sha256(np.unique(hashes).tobytes()).hexdigest()[:32]
