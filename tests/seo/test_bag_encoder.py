"""The bag of tokens: its sum by hand, and what changes nothing."""

import math

import pytest
import torch

from lit_models.seo.encoders import BagEncoder, pooled


@pytest.fixture
def encoder():
    torch.manual_seed(0)
    encoder = BagEncoder(6, width=4).double()
    encoder.start_from(torch.tensor([9, 4, 1, 1, 0, 0]), 9)
    return encoder


def summed(encoder, *rows):
    length = max(map(len, rows))
    ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    mask = torch.arange(length) < torch.tensor([len(row) for row in rows])[:, None]
    hidden = encoder(ids, mask)
    return pooled(hidden, mask, "mean") * mask.sum(1, keepdim=True)


def test_weights_begin_as_inverse_document_frequencies(encoder):
    weights = encoder.log_weights.weight.exp()[:, 0].detach()
    assert weights[0] == pytest.approx(1.0)  # in every text
    assert weights[1] == pytest.approx(1 + math.log(10 / 5))
    assert weights[2] == weights[3] > weights[1]
    assert (weights[4:] < 1e-12).all()  # marks count nothing


def test_a_text_is_the_sum_over_distinct_tokens_by_hand(encoder):
    vectors, weights = encoder.vectors.weight, encoder.log_weights.weight.exp()
    expected = (1 + math.log(3)) * weights[1] * vectors[1] + weights[2] * vectors[2]
    found = summed(encoder, [1, 2, 1, 1])
    torch.testing.assert_close(found[0], expected)


def test_order_padding_and_marks_change_nothing(encoder):
    found = summed(encoder, [1, 2, 3], [3, 1, 2], [1, 2, 3, 5], [2])
    torch.testing.assert_close(found[0], found[1])
    torch.testing.assert_close(found[0], found[2])
    torch.testing.assert_close(found[3], summed(encoder, [2])[0])


def test_every_token_of_a_text_learns(encoder):
    summed(encoder, [1, 2, 2]).square().sum().backward()
    assert encoder.vectors.weight.grad[[1, 2]].abs().sum(1).gt(0).all()
    assert encoder.log_weights.weight.grad[[1, 2]].ne(0).all()
    assert encoder.vectors.weight.grad[[0, 3]].eq(0).all()
