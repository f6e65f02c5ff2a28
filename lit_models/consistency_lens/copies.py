"""Copies of the subject: blocks of their own where they learn, and the subject's words.

The embedding and the head stay those of the subject, the very same parameters: a word means the
same to all, and is held once. So is everything else that stands still. fsdp alone cannot share what
lies in blocks, which it shards one by one: there frozen blocks are sharded copies.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lit_models.causal_lm.lora import LoraOptions, add_lora, lora_recipe
from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.pretrained import Network


@dataclass(frozen=True)
class BaseOptions:
    """What learns of a network that begins as the subject; by default all but the words.

    Args:
        is_frozen: nothing of it learns, only what stands around it.
        lora: adapters alone learn.
        unfreeze_at: optimizer step from which on it learns.

    Raises:
        ValueError: two of them are given, or one is out of its range.
    """

    is_frozen: bool = False
    lora: LoraOptions | None = None
    unfreeze_at: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.lora, dict):  # of a checkpoint's plain values
            object.__setattr__(self, "lora", LoraOptions(**self.lora))
        if self.unfreeze_at < 0:
            raise ValueError(f"unfreeze_at must be 0 or more steps, got {self.unfreeze_at}.")
        if self.is_frozen + (self.lora is not None) + (self.unfreeze_at > 0) > 1:
            raise ValueError(
                "is_frozen, lora and unfreeze_at each say what of a network learns; give one of "
                "them alone."
            )
        if self.lora is not None and (self.lora.adapter or self.lora.base_dtype != "float32"):
            raise ValueError(
                "an adapter of a lens begins anew, on the weights that the subject has: leave "
                "lora.adapter and lora.base_dtype out."
            )


def copy_of(network: Network, options: BaseOptions, num_layers: int | None = None) -> Network:
    """Return a copy of a network, whose embedding and head are the network's own.

    Args:
        network: of the subject.
        options: what learns.
        num_layers: blocks that the copy keeps, the lowest ones; none keeps all.
    """
    shared = {id(weight): weight for weight in vocabulary(network)}
    made = copy.deepcopy(network, dict(shared))  # what the memo holds is not copied
    if num_layers is not None:
        keep_layers(made, num_layers)
    for parameter in made.parameters():
        parameter.requires_grad_(id(parameter) not in shared and not options.is_frozen)
    if options.lora is not None:
        add_lora(made, lora_recipe(made, options.lora))
    return made.train()


def vocabulary(network: Network) -> list[nn.Parameter]:
    """Return the parameters that belong to words: of the embedding and of the head."""
    return [*network.embedding.parameters(), *network.head.parameters()]


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
    """Freeze every parameter that does not reach the result of `run`.

    Under ddp a parameter without a gradient would be waited for: a final norm behind the layer
    that is read, for instance.

    Args:
        module: whose parameters are tried.
        run: computes something of small size with the module.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    with torch.enable_grad():
        found = torch.autograd.grad(run().sum(), trainable, allow_unused=True)
    for parameter, gradient in zip(trainable, found, strict=True):
        if gradient is None:
            parameter.requires_grad_(False)


def share_frozen(made: Network, network: Network) -> None:
    """Let what stands still in a copy be the very parameters of the network, in place."""
    own = dict(network.named_parameters(remove_duplicate=False))
    for name, parameter in list(made.named_parameters(remove_duplicate=False)):
        if not parameter.requires_grad:
            owner, _, last = name.rpartition(".")
            setattr(made.get_submodule(owner), last, own[name])
