"""Copies of the subject that learn: blocks of their own, and the subject's words.

The embedding and the head stay those of the subject, the very same parameters: a word means the
same to all, and is held once.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from lit_models.causal_lm.network import Decoder
from lit_models.causal_lm.pretrained import Network


def copy_of(network: Network, num_layers: int | None = None) -> Network:
    """Return a trainable copy of a network, whose embedding and head are the network's own.

    Args:
        network: of the subject.
        num_layers: blocks that the copy keeps, the lowest ones; none keeps all.
    """
    shared = {id(weight): weight for weight in vocabulary(network)}
    made = copy.deepcopy(network, dict(shared))  # what the memo holds is not copied
    if num_layers is not None:
        keep_layers(made, num_layers)
    for parameter in made.parameters():
        parameter.requires_grad_(id(parameter) not in shared)
    return made.train()


def vocabulary(network: Network) -> list[nn.Parameter]:
    """Return the parameters that belong to words: of the embedding and of the head."""
    return [*network.embedding.parameters(), *network.head.parameters()]


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
