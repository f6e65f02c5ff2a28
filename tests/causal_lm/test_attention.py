"""Attention over rows of documents, against a slow plain reference."""

import pytest
import torch
from torch import Tensor

from lit_models.causal_lm.network import Documents, attend, documents_of

ROWS = [[0, 0, 0, 1, 1, 2, -1, -1], [3, 3, 3, 3, 3, 3, 3, 3], [4, 5, 5, 5, 5, 5, 5, -1]]


def made(num_rows: int, kv_heads: int, length: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = [(num_rows, heads, length, 6) for heads in (4, kv_heads, kv_heads)]
    q, k, v = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return q, k, v


def slowly(q: Tensor, k: Tensor, v: Tensor, document_ids: Tensor) -> Tensor:
    """Every position of every head by itself; heads of k and v repeated."""
    out = torch.zeros_like(q)
    share = q.shape[1] // k.shape[1]
    rows, heads, length, size = q.shape
    for row, head, place in torch.cartesian_prod(*map(torch.arange, (rows, heads, length))):
        seen = [i for i in range(place + 1) if document_ids[row, i] == document_ids[row, place]]
        keys, values = k[row, head // share, seen], v[row, head // share, seen]
        weights = torch.softmax(keys @ q[row, head, place] / size**0.5, 0)
        out[row, head, place] = weights @ values
    return out


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("as_mask", [False, True])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], ROWS[1:2], [ROWS[0]] * 2])
def test_both_ways_equal_a_slow_reference(rows, as_mask, kv_heads):
    ids = torch.tensor(rows)
    q, k, v = made(len(rows), kv_heads)
    documents = documents_of(ids, as_mask=as_mask)
    assert (documents.mask is not None) == as_mask
    expected = slowly(q, k, v, ids)
    torch.testing.assert_close(attend(q, k, v, documents), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("as_mask", [False, True])
def test_gradients_stay_in_their_document(as_mask):
    ids = torch.tensor(ROWS)
    inputs = [x.requires_grad_() for x in made(3, 2)]
    attended = attend(*inputs, documents_of(ids, as_mask=as_mask))
    for document in range(6):
        is_own = (ids == document)[:, None, :, None]
        total = (attended * is_own).sin().sum()
        for gradient in torch.autograd.grad(total, inputs, retain_graph=True):
            assert gradient.isfinite().all()
            assert not (gradient * ~is_own).any()


def test_single_documents_need_no_mask():
    ids = torch.tensor([[0, 0, 0, -1], [1, 1, 1, 1], [2, -1, -1, -1]])
    q, k, v = made(3, 4, length=4)
    assert documents_of(ids, are_single=True) == Documents()
    real = (ids >= 0)[:, None, :, None]
    whole, apart = attend(q, k, v, Documents()), attend(q, k, v, documents_of(ids))
    torch.testing.assert_close(whole * real, apart * real, rtol=0, atol=1e-12)
    assert whole.isfinite().all()
