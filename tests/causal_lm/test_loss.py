"""The loss over target tokens: exact, the same in chunks of any size; its metrics by hand."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.causal_lm import loss
from lit_models.causal_lm.loss import TextMetrics, language_model_loss, sample_nats
from lit_models.training.metrics import LossSum
from tests.causal_lm.tiny import Made

R, T, D, V = 3, 7, 5, 11


@pytest.fixture
def chunks_of_4(monkeypatch):
    monkeypatch.setattr(loss, "SMALL_BYTES", 0)
    monkeypatch.setattr(loss, "CHUNK_ROWS_ON_CPU", 4)


def a_batch(weight: tuple[float, ...] = (1, 1, 1), num_tokens: int = V) -> dict[str, Any]:
    """Return rows of one sample each; a third of the labels is ignored."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(num_tokens, (R, T), generator=generator)
    labels[torch.rand(R, T, generator=generator) < 1 / 3] = -100
    index = torch.arange(R).unsqueeze(1).expand(R, T)
    return counted({"labels": labels, "sample_index": index, "weight": torch.tensor(weight)})


def counted(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch with its number of targets, which the plan knows."""
    is_used = batch["weight"][batch["sample_index"]] > 0
    return {**batch, "num_targets": {"tokens": int((is_used & (batch["labels"] != -100)).sum())}}


def inputs(dtype: torch.dtype = torch.float64, num_tokens: int = V) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(R, T, D, generator=generator, dtype=torch.float64)
    head = torch.randn(num_tokens, D, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()


def direct(hidden: Tensor, head: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return the cross-entropy by its definition."""
    logits, labels = F.linear(hidden, head).flatten(0, 1), batch["labels"].flatten()
    weight = batch["weight"][batch["sample_index"]].flatten() * (labels != -100)
    return (F.cross_entropy(logits, labels, reduction="none") * weight.to(logits)).sum()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
@pytest.mark.parametrize("chunk", [1, 4, 1000, None])
@pytest.mark.parametrize(("padded_to", "compiles"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_chunks_padding_and_compiling_change_nothing(
    chunk, padded_to, compiles, dtype, error, monkeypatch
):
    if chunk is not None:  # else the few logits are computed at once
        monkeypatch.setattr(loss, "SMALL_BYTES", 0)
        monkeypatch.setattr(loss, "CHUNK_ROWS_ON_CPU", chunk)
    monkeypatch.setattr(loss, "PADDED_TO_ON_CPU", padded_to)
    compiled = torch.compile(loss.chunk_nats, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(loss, "compiled_chunk", lambda: compiled)
    values = []
    for function in (direct, lambda *inputs: language_model_loss(*inputs, compiles).total):
        hidden, head = inputs(dtype)
        total = function(hidden, head, a_batch())
        (total / 7).backward()
        values.append([total.detach(), hidden.grad, head.grad])
    expected, found = values
    torch.testing.assert_close(found, expected, rtol=error, atol=10 * error)


def test_the_gradient_is_that_of_finite_differences(chunks_of_4):
    def nats(hidden: Tensor, head: Tensor) -> Tensor:
        return language_model_loss(hidden, head, a_batch((1, 0, 1))).total

    assert torch.autograd.gradcheck(nats, inputs())
    hidden, head = inputs()
    assert torch.autograd.gradcheck(lambda h: nats(h, head.detach()), hidden)  # a frozen head
    assert torch.autograd.gradcheck(lambda w: nats(hidden.detach(), w), head)


@pytest.mark.parametrize("used", [[0, 2], []])
def test_fillers_and_ignored_labels_count_nowhere(chunks_of_4, used):
    batch = a_batch(tuple(float(row in used) for row in range(R)))
    hidden, head = inputs()
    nats = language_model_loss(hidden, head, batch)
    nats.total.backward()
    assert nats.count == (batch["labels"][used] != -100).sum()
    assert hidden.grad[batch["weight"] == 0].eq(0).all()
    assert hidden.grad[batch["labels"] == -100].eq(0).all()
    assert head.grad.any() == bool(used)
    own = {name: batch[name][used] for name in ("labels", "weight")}
    own["sample_index"] = torch.arange(len(used))[:, None].expand(-1, T)
    alone = language_model_loss(hidden[used], head, counted(own))
    torch.testing.assert_close(alone.total, nats.total, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_nats_of_a_sample_are_the_mean_over_its_own_targets(mode, chunks_of_4):
    hidden, head, batch = *inputs(), a_batch((1, 0, 1))
    batch["labels"][2] = -100  # a sample without targets
    own = language_model_loss(hidden, head, a_batch((1, 0, 0)))
    expected = torch.stack([own.total / own.count, *torch.zeros(2)]).double()
    rows = {name: batch[name].reshape(1, -1) for name in ("labels", "sample_index")}
    one_row = counted({**rows, "weight": batch["weight"]})
    with mode():
        nats, of_sample = sample_nats(hidden, head, counted(batch))
        _, in_one_row = sample_nats(hidden.reshape(1, R * T, -1), head, one_row)
    torch.testing.assert_close([of_sample, in_one_row], [expected] * 2, rtol=1e-12, atol=0)
    torch.testing.assert_close(nats.total, own.total.detach(), rtol=1e-12, atol=0)
    assert nats.count == own.count
    assert not nats.total.requires_grad


def test_autocast_multiplies_in_half_and_sums_in_full_precision(chunks_of_4):
    hidden, head = inputs(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nats = language_model_loss(hidden, head, a_batch())
    assert nats.total.dtype == torch.float32
    nats.total.backward()
    assert hidden.grad.dtype == head.grad.dtype == torch.float32
    reference = inputs(torch.float32)
    expected = direct(*(x.bfloat16().float() for x in reference), a_batch())
    assert nats.total.item() == pytest.approx(expected.item(), rel=5e-3)
    expected.backward()
    torch.testing.assert_close(head.grad, reference[1].grad, rtol=0.05, atol=0.05)


def test_gradients_of_halves_are_summed_and_weighed_in_full_precision(chunks_of_4):
    hidden, head = inputs(torch.bfloat16)
    factor = 0.0013  # lies between two bfloat16 numbers
    (language_model_loss(hidden, head, a_batch()).total * factor).backward()
    reference = [x.detach().double().requires_grad_() for x in (hidden, head)]
    direct(*reference, a_batch()).backward()
    for found, expected in zip((hidden.grad, head.grad), reference, strict=True):
        assert found.dtype == torch.bfloat16
        ratio = (found.double() * expected.grad).sum() / expected.grad.square().sum()
        assert ratio.item() == pytest.approx(factor, rel=1e-3)


def test_a_gpu_adds_products_of_halves_up_as_they_are():
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((V, 4), (4, D)))
    total = loss.with_product(None, a, b, torch.float32)
    assert total.dtype == torch.float32
    assert loss.with_product(total, a, b, torch.float32) is total


@pytest.mark.parametrize("training", [True, False])
def test_no_tensor_is_larger_than_a_chunk_or_the_head(training, chunks_of_4):
    num_tokens = 400
    batch = a_batch(num_tokens=num_tokens)
    hidden, head = inputs(num_tokens=num_tokens)
    with Made() as seen, torch.set_grad_enabled(training):
        if training:
            language_model_loss(hidden, head, batch).total.backward()
        else:
            sample_nats(hidden, head, batch)
    assert seen.largest() <= num_tokens * D
    with Made() as seen:
        direct(hidden, head, batch)
    assert seen.largest() >= R * T * num_tokens


def test_metrics_of_two_batches_by_hand():
    metrics = TextMetrics([1, 2, 4], 5)  # the vocabulary is larger
    assert metrics.byte_lengths.tolist() == [1, 2, 4, 0, 0]
    batch = {
        "labels": torch.tensor([[0, 1, -100], [2, 2, 2]]),
        "sample_index": torch.tensor([[0, 0, 0], [1, 1, 1]]),
        "weight": torch.tensor([1.0, 0.0]),  # the second row is a filler
    }
    for total, count in ((math.log(16) - 1, 1.0), (math.log(16) + 1, 3.0)):
        metrics.add_batch(LossSum(torch.tensor(total), torch.tensor(count)), batch)
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert found["loss"] == pytest.approx(math.log(16) / 2)  # not a mean of means
    assert found["perplexity"] == pytest.approx(4.0)
    assert found["bits_per_byte"] == pytest.approx(4 / 3)  # 8 bits for 6 bytes
    assert "bits_per_byte" not in TextMetrics(None, 4)
