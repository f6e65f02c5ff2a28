"""What is read is what is written: the output of a block, in every kind of network."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lit_models.causal_lm.network import Decoder, Documents, frequencies, rotations
from lit_models.consistency_lens.subject import PatchedSubject, Subject
from tests.consistency_lens.tiny import (
    NETWORKS,
    activations,
    documents,
    effects,
    network_of,
    patched_logits,
)

KINDS = list(NETWORKS)
LAYERS = (0, 1, 2)  # the last one, too
POSITION = torch.tensor([3, 11, 6])
ROWS = torch.arange(3)


def by_hand(network: Decoder, ids: Tensor, layer: int, replacement: Tensor | None) -> list[Tensor]:
    """The activations of a block and the logits, block by block, one row after the other."""
    found, logits = [], []
    for row in range(len(ids)):
        hidden, places = network.embedding(ids[[row]]), torch.arange(ids.shape[1])[None]
        rotation = None
        if network.positions is None:
            config = network.config
            frequency = frequencies(config.head_size, config.rope_theta, ids.device)
            rotation = rotations(places, frequency, hidden.dtype)
        else:
            hidden = hidden + network.positions(places)
        for index, block in enumerate(network.layers):
            hidden = block(hidden, rotation, Documents())
            if index == layer:
                hidden = hidden.clone()
                if replacement is not None:
                    hidden[0, POSITION[row]] = replacement[row]
                found.append(hidden)
        logits.append(network.norm(hidden) @ network.head.weight.T)
    return [torch.cat(found), torch.cat(logits)]


def by_transformers(
    network: torch.nn.Module, ids: Tensor, layer: int, replacement: Tensor | None
) -> list[Tensor]:
    """The same of a model of transformers, called as its users call it, with a plain hook."""
    found = []

    def hook(block: torch.nn.Module, given: object, output: object) -> object:
        hidden = (output[0] if isinstance(output, tuple) else output).clone()
        if replacement is not None:
            hidden[ROWS, POSITION] = replacement
        found.append(hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    handle = network.blocks()[layer].register_forward_hook(hook)
    logits = network.model(input_ids=ids, use_cache=False).logits
    handle.remove()
    return [found[0], logits]


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", KINDS)
def test_activations_and_patched_logits_are_those_of_a_plain_forward(kind: str, layer: int) -> None:
    network = network_of(kind)
    reference = by_hand if isinstance(network, Decoder) else by_transformers
    subject, (ids, _), other = Subject(network, layer), documents(), activations()

    true, logits = reference(network, ids, layer, None)
    torch.testing.assert_close(subject.activations(ids), true, rtol=1e-9, atol=1e-9)
    plain = patched_logits(subject, ids, POSITION, None)
    torch.testing.assert_close(plain, logits, rtol=1e-9, atol=1e-9)
    own = subject.activations(ids)[ROWS, POSITION]  # in its own place it changes no bit
    assert torch.equal(patched_logits(subject, ids, POSITION, own), plain)

    _, changed = reference(network, ids, layer, other)
    found = patched_logits(subject, ids, POSITION, other)
    torch.testing.assert_close(found, changed, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[ROWS, POSITION], logits[ROWS, POSITION])


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_neither_padding_nor_neighbours_change_an_activation(kind: str) -> None:
    subject, (ids, lengths) = Subject(network_of(kind), 1), documents()
    together = subject.activations(ids)
    for row, length in enumerate(lengths.tolist()):
        alone = subject.activations(ids[[row], :length])[0]
        torch.testing.assert_close(together[row, :length], alone, rtol=1e-9, atol=1e-9)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_no_block_above_the_layer_is_computed_for_activations(kind: str) -> None:
    subject, (ids, _) = Subject(network_of(kind), 1), documents()
    expected = subject.activations(ids)
    for parameter in subject.network.blocks()[2].parameters():
        parameter.fill_(torch.nan)
    assert not patched_logits(subject, ids, POSITION, None).isfinite().any()
    called: list[bool] = []
    for part in subject.network.blocks()[2].children():
        part.register_forward_hook(lambda *given: called.append(True))
    assert torch.equal(subject.activations(ids), expected)
    assert not called


def test_no_hook_is_left_even_where_the_forward_fails() -> None:
    network = network_of("own GPT-2")
    subject = Subject(network, 1)
    with pytest.raises(IndexError):
        subject.activations(torch.full((1, 4), 10_000))
    assert not any(block._forward_hooks for block in network.blocks())


@torch.no_grad()
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_effects_are_those_of_the_whole_model(kind: str, layer: int) -> None:
    subject, replacement = Subject(network_of(kind), layer), activations()
    (ids, lengths), position = documents((12, 12, 12)), torch.tensor([2, 5, 9])
    batch: Any = {"input_ids": ids, "position": position, "lengths": lengths}
    nats, following, number, _ = PatchedSubject(subject, batch).effect(replacement)
    whole = effects(subject, ids, position, replacement)
    torch.testing.assert_close(nats, whole[ROWS, position], rtol=1e-9, atol=1e-9)
    assert nats.min() > 0
    behind = [row[at + 1 : min(at + 9, 11)] for row, at in zip(whole, position, strict=True)]
    torch.testing.assert_close(following, torch.stack([row.sum() for row in behind]))
    assert number.tolist() == [len(row) for row in behind]
