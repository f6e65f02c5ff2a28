"""Ranking losses by hand, and against slow references that go over pairs one by one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_models.seo.networks import RankingLoss
from lit_models.training.metrics import LossSum

NAN, INF = math.nan, math.inf
LOSSES = {kind: RankingLoss(kind) for kind in ("listnet", "bce", "lambda", "margin_mse")}
each_loss = pytest.mark.parametrize("name", LOSSES)


def nats(difference):
    return math.log1p(math.exp(-difference))


def of_one(loss, scores, target):
    scores = torch.tensor([scores], dtype=torch.float64)
    return float(loss(scores, torch.tensor([target], dtype=torch.float64)))


def reference(name, scores, target):
    """The loss of the candidates that take part, written as its source has it."""
    size = len(scores)
    pairs = [(i, j) for i in range(size) for j in range(size) if target[i] > target[j]]
    if name == "bce":
        wanted = [min(grade, 1) for grade in target]
        found = [w * nats(s) + (1 - w) * nats(-s) for s, w in zip(scores, wanted, strict=True)]
        return sum(found) / max(1, size)
    if name == "margin_mse":
        every = [(i, j) for i in range(size) for j in range(i)]
        squares = [(scores[i] - scores[j] - target[i] + target[j]) ** 2 for i, j in every]
        return sum(squares) / max(1, len(squares))
    if not pairs:
        return 0.0
    if name == "listnet":
        total = sum(math.exp(score) for score in scores)
        shares = [grade / sum(target) for grade in target]
        return -sum(p * math.log(math.exp(s) / total) for p, s in zip(shares, scores, strict=True))
    gains = [2**g - 1 for g in target]
    best = sum(g / math.log2(2 + r) for r, g in enumerate(sorted(gains, reverse=True)))
    rank = {c: r for r, c in enumerate(sorted(range(size), key=lambda c: -scores[c]), start=1)}
    total = 0.0
    for i, j in pairs:
        apart = abs(rank[i] - rank[j])
        rho = abs(1 / math.log2(1 + rank[i]) - 1 / math.log2(1 + rank[j]))
        delta = abs(1 / math.log2(1 + apart) - 1 / math.log2(2 + apart))
        total += (rho + 10 * delta) * (gains[i] - gains[j]) / best * nats(scores[i] - scores[j])
    return total


candidates = st.lists(
    st.tuples(
        st.floats(-3, 3).map(lambda x: round(x, 2)),
        st.sampled_from([NAN, 0.0, 1.0, 2.0, 3.0]),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
    unique_by=lambda candidate: candidate[0],
)


@each_loss
@settings(max_examples=30, deadline=None)
@given(st.lists(candidates, min_size=1, max_size=3))
def test_a_loss_is_that_of_its_source(name, queries):
    width = max(map(len, queries))
    scores = torch.full((len(queries), width), -INF, dtype=torch.float64)
    target = torch.full((len(queries), width), NAN, dtype=torch.float64)
    expected = []
    for row, query in enumerate(queries):
        for column, (score, grade, is_there) in enumerate(query):
            scores[row, column], target[row, column] = score if is_there else -INF, grade
        known = [(s, g) for s, g, there in query if there and not math.isnan(g)]
        expected.append(reference(name, *zip(*known, strict=True)) if known else 0.0)
    found = LOSSES[name](scores, target)
    assert found.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_losses_by_hand():
    grades, scores = [1.0, 0.0], [0.0, 0.0]
    ln2 = math.log(2)
    assert of_one(LOSSES["listnet"], scores, grades) == pytest.approx(ln2)
    assert of_one(LOSSES["bce"], scores, grades) == pytest.approx(ln2)
    assert of_one(LOSSES["bce"], [9.0], [2.0]) == pytest.approx(nats(9.0))
    # Ranks 1 and 2, best gain 1: rho is 1 - 1/log2(3), and so is delta.
    weight = 11 * (1 - 1 / math.log2(3))
    assert of_one(LOSSES["lambda"], scores, grades) == pytest.approx(weight * ln2)
    assert of_one(LOSSES["margin_mse"], [3.0, 1.0, 0.0], [5.0, NAN, 1.0]) == pytest.approx(1.0)


@each_loss
def test_unjudged_and_missing_candidates_get_no_gradient_and_fillers_count_nothing(name):
    scores = torch.tensor([[0.3, -0.2, 1.0, -INF], [0.1, 0.5, -0.7, 2.0]], dtype=torch.float64)
    scores.requires_grad_()
    target = torch.tensor([[2.0, 0.0, NAN, NAN], [1.0, 0.0, 3.0, NAN]])
    total, count = LossSum.of(LOSSES[name](scores, target.double()), torch.tensor([1.0, 0.0]))
    total.backward()
    assert count == 1
    assert scores.grad[0, 2:].tolist() == [0, 0]
    assert scores.grad[1].abs().sum() == 0
    assert scores.grad[0, :2].abs().min() > 0


@each_loss
@pytest.mark.parametrize("target", [[NAN, NAN, NAN], [1.0, NAN, NAN], [2.0, 2.0, NAN]])
def test_a_query_without_information_has_no_loss(name, target):
    if name == "bce" and not all(map(math.isnan, target)):
        return  # a candidate by itself tells something
    scores = torch.tensor([[0.4, 0.4, 2.0]], dtype=torch.float64, requires_grad=True)
    total, count = LossSum.of(LOSSES[name](scores, torch.tensor([target]).double()), torch.ones(1))
    total.backward()
    assert (total.tolist(), count.tolist()) == (0, 1)
    assert scores.grad.abs().sum() == 0


@each_loss
def test_the_order_of_candidates_changes_nothing(name):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    target = torch.tensor([[0.0, 1.0, NAN, 3.0, 0.0, 2.0], [1.0, 1.0, 0.0, NAN, NAN, 2.0]])
    order = torch.tensor([3, 5, 0, 4, 2, 1])
    expected = LOSSES[name](scores, target.double())
    torch.testing.assert_close(LOSSES[name](scores[:, order], target[:, order].double()), expected)


@each_loss
def test_a_score_that_is_no_number_gives_a_loss_that_is_none(name):
    scores = torch.tensor([[NAN, 0.5, 1.0]], dtype=torch.float64)
    assert LOSSES[name](scores, torch.tensor([[2.0, 0.0, 1.0]]).double()).isnan().all()


@each_loss
def test_only_the_loss_of_single_candidates_tells_where_zero_is(name):
    scores = torch.tensor([[0.3, -0.2, 1.0]], dtype=torch.float64)
    target = torch.tensor([[2.0, 0.0, 1.0]], dtype=torch.float64)
    is_same = torch.allclose(LOSSES[name](scores, target), LOSSES[name](scores + 2, target))
    assert is_same != LOSSES[name].reads_offset
