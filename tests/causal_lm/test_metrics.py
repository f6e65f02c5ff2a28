"""Nats, perplexity and bits per byte, by hand."""

import math

import pytest
import torch

from lit_models.causal_lm.loss import TextMetrics, byte_table
from lit_models.training.metrics import LossSum


def values(metrics: TextMetrics) -> dict[str, float]:
    return {name: float(metric.compute()) for name, metric in metrics.items()}


def test_figures_by_hand():
    metrics = TextMetrics(torch.tensor([1, 2, 4]))
    batch = {
        "labels": torch.tensor([[0, 1, -100], [2, 2, 2]]),
        "sample_index": torch.tensor([[0, 0, 0], [1, 1, 1]]),
        "weight": torch.tensor([1.0, 0.0]),  # the second row is a filler
    }
    metrics.add_batch(LossSum(torch.tensor(math.log(16.0)), torch.tensor(2.0)), batch)
    found = values(metrics)
    assert found["loss"] == pytest.approx(math.log(16) / 2)
    assert found["perplexity"] == pytest.approx(4.0)
    assert found["bits_per_byte"] == pytest.approx(4 / 3)  # 4 bits for 1 + 2 bytes


def test_the_perplexity_of_two_batches_is_that_of_their_union():
    metrics = TextMetrics(None)
    for total, count in ((6.0, 2.0), (1.0, 5.0)):
        metrics.add_batch(LossSum(torch.tensor(total), torch.tensor(count)), {})
    assert values(metrics) == {"loss": 1.0, "perplexity": pytest.approx(math.e)}


def test_a_vocabulary_may_be_larger_than_the_tokenizer():
    assert byte_table(torch.tensor([3, 1]), 4).tolist() == [3, 1, 0, 0]
    assert byte_table(None, 4) is None
