"""The subject: a frozen language model, and the place in it that a lens explains.

Shapes: B rows, T tokens, D features, V vocabulary.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from datamodules.activations.store import SubjectFacts
from datamodules.core.store import cache_root, digest_of, file_digest
from lit_models.causal_lm.decoder_config import DecoderConfig
from lit_models.causal_lm.model_folders import read_config, weight_files
from lit_models.causal_lm.pretrained import (
    Backend,
    Network,
    Recipe,
    check_recipe,
    load_network,
    network_from_config,
    own_recipe,
    read_recipe,
)
from lit_models.consistency_lens.hooks import output_edited, output_kept, outputs_given
from lit_models.consistency_lens.reading import read
from lit_models.training.exact import float32_on

SITE = "block_output"


@dataclass(frozen=True)
class SubjectOptions:
    """Which model is explained, and where.

    Args:
        path: folder of the model in the Hugging Face layout, as `unisono export` writes it.
        layer: index of the block whose output is the activation, from 0.
        network: shape of a subject with random weights, instead of a folder.
        random_weights: take the folder's shape and tokenizer, and no weights: a control.
        seed: of random weights, which are drawn in float32 on the host; their digest is kept.
        backend: who computes a model from a folder, see `LitCausalLM`.

    Raises:
        ValueError: neither or both of path and network, or a negative layer.
    """

    path: str | None = None
    layer: int = 2
    network: DecoderConfig | None = None
    random_weights: bool = False
    seed: int = 0
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if (self.path is None) == (self.network is None):
            raise ValueError(
                "a lens needs one subject: name a model's folder with subject.path, or the shape "
                "of one with random weights with subject.network."
            )
        if self.layer < 0:
            raise ValueError(f"subject.layer must be 0 or more, got {self.layer}.")


class Subject(nn.Module):
    """A network that stands still, and one of its layers.

    Args:
        network: with its weights.
        layer: index of a block.

    Raises:
        ValueError: there is no such block.
    """

    def __init__(self, network: Network, layer: int) -> None:
        super().__init__()
        check_layer(layer, len(network.blocks()))
        self.network, self.layer = network.requires_grad_(False).eval(), layer

    @property
    def block(self) -> nn.Module:
        """The block whose output is the activation."""
        return self.network.blocks()[self.layer]

    def train(self, mode: bool = True) -> "Subject":
        """Stay in evaluation mode."""
        return super().train(False)

    def activations(self, input_ids: Tensor) -> Tensor:
        """Return the activations [B, T, D] at every token of `input_ids` [B, T] int64.

        The blocks above the layer are not computed.
        """
        above = self.network.blocks()[self.layer + 1 :]
        with output_kept(self.block) as kept, outputs_given(above, kept):
            read(self.network, input_ids)
        return kept[0][0] if isinstance(kept[0], tuple) else kept[0]

    def logits(self, input_ids: Tensor, position: Tensor, replacement: Tensor | None) -> Tensor:
        """Return the logits [B, T, V], with an activation put in the place of the true one.

        Args:
            input_ids: [B, T] int64, padded at the right.
            position: [B] int64, where.
            replacement: [B, D]; none leaves all as it is.
        """
        if replacement is None:
            return self.network.head(read(self.network, input_ids))
        rows = torch.arange(len(input_ids), device=input_ids.device)

        def patch(output: Tensor) -> Tensor:
            return output.index_put((rows, position), replacement.to(output.dtype))

        with output_edited(self.block, patch):
            return self.network.head(read(self.network, input_ids))


def check_layer(layer: int, num_layers: int) -> None:
    """Refuse a layer that is not there.

    Raises:
        ValueError: it is not.
    """
    if layer >= num_layers:
        raise ValueError(
            f"subject.layer {layer} is none of the subject's {num_layers} blocks; give one from 0 "
            f"to {num_layers - 1}."
        )


def subject_recipe(options: SubjectOptions, vocab_size: int) -> Recipe:
    """Return the recipe of the subject's network.

    Args:
        options: of the user.
        vocab_size: of the tokenizer, for a network without a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it holds nothing that can be computed.
    """
    if options.path is not None:
        return read_recipe(options.path, options.backend)
    assert options.network is not None
    config = {**vars(options.network), "vocab_size": options.network.vocab_size or vocab_size}
    return own_recipe(DecoderConfig(**config))


def load_subject(
    options: SubjectOptions, recipe: Recipe, context_length: int, size: int
) -> Network:
    """Return the subject's network with its weights, on the CPU.

    Args:
        options: of the user.
        recipe: as `subject_recipe` returns it.
        context_length: positions of the longest document.
        size: tokens of the data's tokenizer.

    Raises:
        FileNotFoundError: a file of the model is missing.
        ValueError: one is damaged, or the documents do not fit the model.
    """
    check_recipe(recipe, context_length, size)
    if options.path is not None and not options.random_weights:
        return load_network(options.path, options.backend)
    return _random_network(options.seed, recipe)


def _random_network(seed: int, recipe: Recipe) -> Network:
    # Another device or precision draws other numbers of the same seed.
    with torch.random.fork_rng(), float32_on("cpu"):
        torch.manual_seed(seed)
        return network_from_config(recipe)


def subject_facts(options: SubjectOptions, recipe: Recipe) -> SubjectFacts:
    """Return what a store and a lens keep of the subject, to know it again."""
    facts: dict[str, Any] = {"recipe": recipe}
    if options.path is None or options.random_weights:
        network = _random_network(options.seed, recipe)
        digest = hashlib.sha256()
        for name, weight in sorted(network.state_dict().items()):
            digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
            digest.update(weight.contiguous().numpy().tobytes())
        facts["weights"] = [digest.hexdigest()]
    else:
        root = cache_root()
        facts["weights"] = [file_digest(path, root) for path in weight_files(options.path)]
        with torch.device("meta"):
            network = network_from_config(recipe)
    size, layers = network.embedding.weight.shape[1], len(network.blocks())
    check_layer(options.layer, layers)
    return SubjectFacts(digest_of(facts), options.layer, SITE, size, layers)


def tokenizer_folder(options: SubjectOptions) -> str | None:
    """Return the folder of the subject's tokenizer; none where the data bring one.

    Raises:
        FileNotFoundError: there is no such folder, or no model in it.
        ValueError: its config.json is damaged.
    """
    if options.path is None:
        return None
    read_config(options.path)  # before anybody misses a tokenizer there
    return str(Path(options.path).expanduser())
