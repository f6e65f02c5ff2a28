"""A self-test: do documents of a row see each other, or tokens that follow?

A leak does not stop a training: the loss is only a little too low, and wrong.
Shapes: T positions, D hidden.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

LENGTHS = (3, 4)  # the documents of the row, and a padding position after them
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # of the largest value
HALF_TOLERANCE = 0.1


def check_isolation(network: Any) -> None:
    """Refuse a network in which a document sees its neighbours in the row, or what follows.

    Two documents in a row must have the hidden states that each has alone, and those of one token
    must have no gradient in the embeddings of the other document or of tokens that follow. Modes,
    gradients and random numbers stay as they are. Compiled blocks run as they were written: nothing
    is compiled for the few tokens of this test.

    Args:
        network: a `Decoder` or a `PretrainedDecoder`, whole, on any device.

    Raises:
        RuntimeError: it leaks.
    """
    with _undisturbed(network), torch.enable_grad():
        packed = _documents(network)
        embedded, hidden = _run(network, *packed)
        difference = _worst_difference(network, hidden.detach(), packed)
        tolerance = TOLERANCES.get(hidden.dtype, HALF_TOLERANCE)
        if not difference <= tolerance:
            _refuse(network, f"hidden states differ by {difference:.2g} of the largest one")
        _check_gradients(network, embedded, hidden)


def _documents(network: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return token, position and document ids [1, T]; all tokens differ where there are enough."""
    weight = network.embedding.weight
    places = [torch.arange(length) for length in LENGTHS]
    positions = torch.cat([*places, torch.zeros(1, dtype=torch.long)])
    ids = torch.tensor([number for number, n in enumerate(LENGTHS) for _ in range(n)] + [-1])
    tokens = (torch.arange(len(ids)) * 5 + 1) % weight.shape[0]
    tokens, positions, ids = (x[None].to(weight.device) for x in (tokens, positions, ids))
    return tokens, positions, ids


def _run(network: Any, tokens: Tensor, positions: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the embeddings [1, T, D] that the network used, a leaf, and its hidden states."""
    leaves: list[Tensor] = []

    def catch(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
        leaves.append(embedded.detach().requires_grad_())
        return leaves[-1]

    hook = network.embedding.register_forward_hook(catch)
    try:
        hidden = network(tokens, positions, ids)
    finally:
        hook.remove()
    return leaves[0], hidden


def _worst_difference(network: Any, hidden: Tensor, packed: tuple[Tensor, ...]) -> float:
    """Return the largest difference between packed and single documents, as a share of the
    largest hidden state."""
    worst, start = 0.0, 0
    for length in LENGTHS:
        tokens, positions, ids = (x[:, start : start + length] for x in packed)
        with torch.no_grad():
            alone = network(tokens, positions, ids - ids[:, :1])
        apart = (alone - hidden[:, start : start + length]).abs().max() / alone.abs().max()
        worst, start = max(worst, float(apart)), start + length
    return worst


def _check_gradients(network: Any, embedded: Tensor, hidden: Tensor) -> None:
    # Sums and squares of normed states are constant: each channel gets a weight of its own.
    channels = torch.arange(hidden.shape[-1], device=hidden.device).cos().to(hidden)
    probe = hidden[0] @ channels  # [T]
    start = 0
    for length in LENGTHS:
        end = start + length
        seen = _seen(probe[start:end].sum(), embedded)
        if seen[:start].any() or seen[end:].any():
            _refuse(network, "a token's hidden state depends on another document of its row")
        if _seen(probe[end - 2], embedded)[end - 1]:
            _refuse(network, "a token's hidden state depends on one that follows it")
        start = end


def _seen(probe: Tensor, embedded: Tensor) -> Tensor:
    """Return which tokens a number depends on [T] bool; NaN counts as dependence."""
    (gradient,) = torch.autograd.grad(probe, embedded, retain_graph=True)
    return gradient[0].ne(0).any(-1)


def _refuse(network: Any, what: str) -> None:
    model = type(getattr(network, "model", network)).__name__
    raise RuntimeError(
        f"{model} lets a token see what it must not: {what} (in a self-test with two documents in "
        "one row). Its loss would be wrong. Take a model with full causal attention, such as "
        "Llama, Qwen or GPT-2, or a newer version of transformers."
    )


@contextmanager
def as_written(network: Any) -> Iterator[None]:
    """Run a compiled network as it is written: every new length would compile it once more."""
    if not network.is_compiled:  # what says so would import the compiler
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _undisturbed(network: Any) -> Iterator[None]:
    """Put a network into evaluation mode and put back all modes and random states at the end."""
    modes = {module: module.training for module in network.modules()}
    device = network.embedding.weight.device
    network.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), as_written(network):
            yield
    finally:
        for module, was_training in modes.items():
            module.training = was_training
