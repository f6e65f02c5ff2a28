"""Vectors of texts: what changes nothing about them, and gradients of chunks."""

from functools import partial

import pytest
import torch
from torch import nn

from lit_models.seo.encoders import Pooling, TransformerEncoder
from lit_models.seo.networks import BiEncoder, TemperatureOptions
from lit_models.training.dropout import SampleKeys, key_dropout, release_dropout

ROWS, POSITIONS = 12, 9


def network(pooling: Pooling = "mean", towers: str = "shared", dropout: float = 0.0) -> BiEncoder:
    torch.manual_seed(3)
    encoder = TransformerEncoder(30, 16, 2, 2, 32, dropout)
    return BiEncoder(encoder, towers, pooling, 8, TemperatureOptions()).double()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 30, (ROWS, POSITIONS), generator=generator)
    lengths = torch.randint(1, POSITIONS + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(POSITIONS) < lengths
    return ids * mask, mask


@pytest.mark.parametrize("pooling", ["mean", "first", "max"])
def test_padding_order_and_neighbours_change_no_vector(pooling: Pooling) -> None:
    model, (ids, mask) = network(pooling).eval(), texts()
    whole = model.encode(ids, mask, False)
    torch.testing.assert_close(whole.norm(dim=1), torch.ones(ROWS, dtype=torch.float64))
    wider = nn.functional.pad(ids, (0, 5)), nn.functional.pad(mask, (0, 5))
    torch.testing.assert_close(model.encode(*wider, False), whole, rtol=1e-12, atol=1e-12)
    order = torch.randperm(ROWS)
    turned = model.encode(ids[order], mask[order], False)
    torch.testing.assert_close(turned, whole[order], rtol=1e-12, atol=1e-12)


def test_two_towers_begin_alike_and_each_encodes_its_kind() -> None:
    model, (ids, mask) = network(towers="two").eval(), texts()
    assert torch.equal(model.encode(ids, mask, True), model.encode(ids, mask, False))
    with torch.no_grad():
        next(model.query_encoder.parameters()).add_(0.1)
    is_query = torch.arange(ROWS) % 3 == 0
    expected = torch.where(
        is_query[:, None], model.encode(ids, mask, True), model.encode(ids, mask, False)
    )
    mixed = model.encode_mixed(ids, mask, is_query)
    torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        model.encode_mixed(ids, mask, torch.zeros(ROWS, dtype=torch.bool)),
        model.encode(ids, mask, False),
    )


def gradients(model: BiEncoder, chunk: int | None) -> dict[str, torch.Tensor]:
    keys = SampleKeys()
    key_dropout(model, keys)
    keys.begin(7, torch.tensor([3, 8, 2, 90]))
    model.zero_grad()
    ids, mask = texts()
    queries = model.encode_samples(ids[:4], mask[:4], True, 4, chunk)
    documents = model.encode_samples(ids, mask, False, 4, chunk)
    loss = ((queries @ documents.T) / model.temperature()).logsumexp(1).sum()
    keys.is_backward = True  # as the callback says
    loss.backward()
    release_dropout(model)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("chunk", [1, 5, 12, 100])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_chunks_have_the_same_gradients(chunk: int, dropout: float) -> None:
    model = network(dropout=dropout).train()
    expected, found = gradients(model, None), gradients(model, chunk)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


def test_a_mask_belongs_to_a_text_not_to_its_row() -> None:
    model, keys, (ids, mask) = network(dropout=0.5).train(), SampleKeys(), texts()
    key_dropout(model, keys)
    encode = partial(model.encode_samples, is_query=False, chunk=None)
    keys.begin(7, torch.tensor([3, 8]))
    both = encode(ids[:4], mask[:4], num_samples=2)
    keys.begin(7, torch.tensor([8]))
    second = encode(ids[2:4], mask[2:4], num_samples=1)
    torch.testing.assert_close(both[2:], second, rtol=1e-12, atol=1e-12)
    same = encode(ids[:1].expand(2, -1), mask[:1].expand(2, -1), num_samples=1)
    assert not torch.allclose(same[0], same[1])  # two texts of one sample


def test_chunks_keep_no_activations_until_the_backward_pass() -> None:
    model, (ids, mask) = network(), texts()

    def kept_bytes(chunk: int | None) -> int:
        kept = 0

        def pack(value: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += value.untyped_storage().nbytes() * (value.grad_fn is not None)
            return value

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
            model.encode_samples(ids, mask, False, 4, chunk)
        return kept

    assert kept_bytes(2) < kept_bytes(None) / 20
