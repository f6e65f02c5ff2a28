"""The loss over target tokens: exact, chunked without a trace, counted once."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lit_models.causal_lm.loss import LossOptions, language_model_loss, sample_nats
from lit_models.training.exact import share_of_step

R, T, D, V = 3, 7, 5, 11
SMOOTH = LossOptions(label_smoothing=0.1, z_loss=0.01)


def a_batch(weight: tuple[float, ...] = (1, 1, 1), num_tokens: int = V) -> dict[str, Any]:
    """Rows of one sample each, a third of the labels ignored."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(num_tokens, (R, T), generator=generator)
    labels[torch.rand(R, T, generator=generator) < 1 / 3] = -100
    index = torch.arange(R).unsqueeze(1).expand(R, T)
    return counted({"labels": labels, "sample_index": index, "weight": torch.tensor(weight)})


def counted(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with the number of its targets, as the plan knows it."""
    is_used = batch["weight"][batch["sample_index"]] > 0
    return {**batch, "num_targets": {"tokens": int((is_used & (batch["labels"] != -100)).sum())}}


def inputs(dtype: torch.dtype = torch.float64, num_tokens: int = V) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(R, T, D, generator=generator, dtype=torch.float64)
    head = torch.randn(num_tokens, D, generator=generator, dtype=torch.float64)
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()


def direct(hidden: Tensor, head: Tensor, batch: dict[str, Any], options: LossOptions) -> Tensor:
    """The objective as one would write it down."""
    logits = F.linear(hidden, head).flatten(0, 1)
    labels = batch["labels"].flatten()
    weight = batch["weight"][batch["sample_index"]].flatten() * (labels != -100)
    nats = F.cross_entropy(
        logits, labels, reduction="none", label_smoothing=options.label_smoothing
    )
    nats = nats + options.z_loss * logits.logsumexp(1).square()
    return (nats * weight.to(nats)).sum()


@pytest.mark.parametrize("options", [LossOptions(), SMOOTH])
@pytest.mark.parametrize("chunk_size", [1, 4, 1000, "auto"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_chunks_change_nothing(options, chunk_size, dtype, error):
    batch = a_batch()
    values = []
    for is_direct in (True, False):
        hidden, head = inputs(dtype)
        chunked = LossOptions(options.label_smoothing, options.z_loss, chunk_size)
        total = (
            direct(hidden, head, batch, options)
            if is_direct
            else language_model_loss(hidden, head, batch, chunked)["tokens"].total
        )
        (total / 7).backward()
        values.append([total.detach(), hidden.grad, head.grad])
    for expected, found in zip(*values, strict=True):
        torch.testing.assert_close(found, expected, rtol=error, atol=10 * error)


@pytest.mark.parametrize("options", [LossOptions(chunk_size=4), LossOptions(0.1, 0.01, 4)])
def test_the_gradient_is_that_of_finite_differences(options):
    batch = a_batch((1, 0, 1))

    def loss(hidden: Tensor, head: Tensor) -> Tensor:
        return language_model_loss(hidden, head, batch, options)["tokens"].total

    assert torch.autograd.gradcheck(loss, inputs())
    hidden, head = inputs()
    assert torch.autograd.gradcheck(lambda h: loss(h, head.detach()), hidden)  # a frozen head
    assert torch.autograd.gradcheck(lambda w: loss(hidden.detach(), w), head)


def test_a_hand_worked_loss():
    hidden, head = torch.zeros(1, 2, D), torch.randn(4, D)
    batch = {
        "labels": torch.tensor([[2, -100]]),
        "sample_index": torch.zeros(1, 2, dtype=torch.int64),
        "weight": torch.ones(1),
    }
    terms = language_model_loss(hidden, head, counted(batch), LossOptions(0.2, 0.5))
    log4 = torch.tensor(4.0).log()  # all four tokens alike, smoothed or not
    assert terms["tokens"].total == pytest.approx(float(log4 + 0.5 * log4**2))
    assert terms["nats"].total == pytest.approx(float(log4))
    assert terms["tokens"].count == terms["nats"].count == 1


def test_fillers_and_ignored_labels_count_nowhere():
    batch = a_batch((1, 0, 1))
    hidden, head = inputs()
    loss = language_model_loss(hidden, head, batch, SMOOTH)["tokens"]
    loss.total.backward()
    assert loss.count == (batch["labels"][[0, 2]] != -100).sum()
    assert hidden.grad[1].eq(0).all()
    assert hidden.grad[batch["labels"] == -100].eq(0).all()
    others = {name: batch[name][[0, 2]] for name in ("labels", "weight")}
    others["sample_index"] = torch.tensor([[0], [1]]).expand(2, T)
    alone = language_model_loss(hidden[[0, 2]], head, counted(others), SMOOTH)["tokens"]
    torch.testing.assert_close(alone.total, loss.total, rtol=1e-12, atol=0)


def test_samples_add_up_to_their_batch():
    hidden, head = inputs()
    alone = []
    for sample in range(R):
        weight = tuple(float(i == sample) for i in range(R))
        alone.append(language_model_loss(hidden, head, a_batch(weight), SMOOTH)["tokens"])
    whole = language_model_loss(hidden, head, a_batch(), SMOOTH)["tokens"]
    torch.testing.assert_close(sum(a.total for a in alone), whole.total, rtol=1e-12, atol=0)
    assert sum(a.count for a in alone) == whole.count


def test_no_target_gives_a_zero_loss_with_zero_gradients():
    hidden, head = inputs()
    loss = language_model_loss(hidden, head, a_batch((0, 0, 0)), SMOOTH)["tokens"]
    loss.total.backward()
    assert loss.total == loss.count == 0
    assert hidden.grad.eq(0).all()
    assert head.grad.eq(0).all()


def test_evaluation_reports_plain_nats_and_builds_no_graph():
    hidden, head = inputs()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            nats, _ = sample_nats(hidden, head, a_batch(), SMOOTH)
            plain = direct(hidden, head, a_batch(), LossOptions())
        torch.testing.assert_close(nats.total, plain, rtol=1e-12, atol=0)
        assert not nats.total.requires_grad


def test_the_nats_of_a_sample_are_the_mean_over_its_own_targets():
    hidden, head, batch = *inputs(), a_batch((1, 0, 1))
    batch["labels"][2] = -100  # a sample without targets
    nats, of_sample = sample_nats(hidden, head, counted(batch), SMOOTH)
    own = language_model_loss(hidden, head, a_batch((1, 0, 0)), LossOptions())["tokens"]
    expected = torch.stack([own.total / own.count, *torch.zeros(2)]).double()
    torch.testing.assert_close(of_sample, expected, rtol=1e-12, atol=0)
    assert nats.count == own.count
    rows = {name: batch[name].reshape(1, -1) for name in ("labels", "sample_index")}
    one_row = counted({**rows, "weight": batch["weight"]})
    one_row = (hidden.reshape(1, R * T, -1), head, one_row, SMOOTH)
    torch.testing.assert_close(sample_nats(*one_row)[1], of_sample, rtol=1e-12, atol=0)


def test_plain_nats_are_reported_beside_the_objective_and_change_no_gradient():
    terms = language_model_loss(*inputs(), a_batch(), SMOOTH)
    planned = {**a_batch(), "step_denominators": {"tokens": 40.0}}
    share = share_of_step(terms, planned, {"nats": 0.0})
    assert share.item() == pytest.approx(terms["tokens"].total.item() / 40)
    with pytest.raises(KeyError, match="nats"):  # of which the plan has no count
        share_of_step(terms, planned, {})


def test_a_tied_head_gets_both_gradients():
    batch, ids = a_batch(), torch.randint(V, (R, T))
    grads = []
    for is_direct in (True, False):
        table = inputs()[1]
        hidden = F.embedding(ids, table).tanh()
        terms = language_model_loss(hidden, table, batch, LossOptions(chunk_size=2))
        (
            direct(hidden, table, batch, LossOptions()) if is_direct else terms["tokens"].total
        ).sum().backward()
        grads.append(table.grad)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.0}, "loss.label_smoothing must be 0 to below 1, got 1.0"),
        ({"z_loss": -1.0}, "loss.z_loss must be 0 or more, got -1.0"),
        ({"chunk_size": 0}, "loss.chunk_size must be at least 1 position, got 0"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LossOptions(**options)
