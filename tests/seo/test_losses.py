"""Losses by hand and beside slow references: rankings, a retriever's pairs, heads of a scorer."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_models.seo import networks
from lit_models.training.metrics import LossSum

NAN, INF = math.nan, math.inf
LOSSES = {kind: networks.RankingLoss(kind) for kind in ("listnet", "bce", "lambda")}
each_loss = pytest.mark.parametrize("name", LOSSES)


def nats(difference):
    return math.log1p(math.exp(-difference))


def reference(name, scores, target):
    """Return the loss of the candidates that take part, written as in its source."""
    size = len(scores)
    pairs = [(i, j) for i in range(size) for j in range(size) if target[i] > target[j]]
    if name == "bce":
        labels = [min(grade, 1) for grade in target]
        found = [w * nats(s) + (1 - w) * nats(-s) for s, w in zip(scores, labels, strict=True)]
        return sum(found) / max(1, size)
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
        return  # a single candidate has a loss too
    scores = torch.tensor([[0.4, 0.4, 2.0]], dtype=torch.float64, requires_grad=True)
    total, count = LossSum.of(LOSSES[name](scores, torch.tensor([target]).double()), torch.ones(1))
    total.backward()
    assert (total.tolist(), count.tolist()) == (0, 1)
    assert scores.grad.abs().sum() == 0


@each_loss
def test_a_score_of_nan_gives_a_loss_of_nan(name):
    scores = torch.tensor([[NAN, 0.5, 1.0]], dtype=torch.float64)
    assert LOSSES[name](scores, torch.tensor([[2.0, 0.0, 1.0]]).double()).isnan().all()


HALF = torch.tensor(0.5, dtype=torch.float64)


def test_the_in_batch_loss_is_a_loop_over_all_documents_but_known_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, documents = (
        F.normalize(torch.randn(n, 6, dtype=torch.float64, generator=generator), dim=1)
        for n in (4, 12)
    )
    document = torch.tensor([0, 1, 2, 3, 1, 5, 6, 0, -1, 8, 9, 3])
    known = torch.tensor([[0, 9], [1, -1], [2, 5], [3, -1]])
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    expected = 0.0
    for row in (0, 1, 3):
        scores = [float(queries[row] @ documents[row]) / 0.5]
        scores += [
            float(queries[row] @ vector) / 0.5
            for number, vector in zip(document.tolist(), documents, strict=True)
            if number != -1 and number not in known[row].tolist()
        ]
        expected += math.log(sum(map(math.exp, scores))) - scores[0]
    total, count = networks.in_batch_loss(
        queries, documents[:4], documents, document, known, HALF, weight
    )
    assert float(total) == pytest.approx(expected, rel=1e-12)
    assert float(count) == 3


@pytest.mark.parametrize("start", [0.01, 0.05, 0.9])
def test_a_temperature_begins_where_it_should_and_stays_between_its_bounds(start: float) -> None:
    temperature = networks.Temperature(networks.TemperatureOptions(start)).double()
    assert float(temperature().detach()) == pytest.approx(start, rel=1e-6)
    for position in (-50.0, 50.0):
        temperature.position.data.fill_(position)
        assert 0.005 - 1e-9 <= float(temperature().detach()) <= 1.0 + 1e-9
    still = networks.Temperature(networks.TemperatureOptions(learns=False))
    assert not still.position.requires_grad


def test_a_temperature_of_a_float64_run_is_float64_before_its_checkpoint_is_read() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        temperature = networks.Temperature(networks.TemperatureOptions(start=0.07))
    finally:
        torch.set_default_dtype(before)
    assert temperature.position.dtype == torch.float64
    assert float(temperature().detach()) == pytest.approx(0.07, rel=1e-14)


REGRESSION = {"kind": "regression", "classes": None, "mean": 10.0, "std": 2.0}
LEVELS = {"kind": "ordinal", "classes": ["a", "b", "c", "d"], "shares": [0.1, 0.2, 0.3, 0.4]}
SURE, FILLER = torch.tensor([1.0]), torch.tensor([1.0, 1.0, 0.0])


def loss_of(head: networks.Head, output: float, target: float) -> float:
    known, label = torch.tensor([True]), torch.tensor([target], dtype=torch.float64)
    return float(head.loss(torch.tensor([[output]]), label, known, SURE).total)


def test_a_regression_is_learnt_in_standard_deviations() -> None:
    # a label of 14 is 2 standard deviations above the mean
    for loss, expected in (("mse", 0.25), ("mae", 0.5), ("huber", 0.125)):
        assert loss_of(networks.Head(REGRESSION, loss, 3), 1.5, 14.0) == pytest.approx(expected)
    assert loss_of(networks.Head(REGRESSION, "huber", 3), 5.0, 14.0) == pytest.approx(2.5)
    time = networks.Head({**REGRESSION, "mean": 1.7e9}, "mse", 3)
    assert loss_of(time, 1.5, 1.7e9 + 3) == 0  # float32 lacks these digits
    head = networks.Head(REGRESSION, "mse", 3)
    assert head.prediction(torch.tensor([[1.5]])).tolist() == [[13.0]]
    assert networks.baseline(REGRESSION).tolist() == [10.0]


def test_levels_are_differences_of_sigmoids_of_ascending_thresholds() -> None:
    head = networks.Head(LEVELS, "cumulative", 2).double()
    torch.nn.init.normal_(head.gaps, std=3.0)
    vectors = torch.randn(5, 2, dtype=torch.float64)
    steps = F.softplus(head.gaps) + 1e-3
    thresholds = torch.stack([head.first[0], head.first[0] + steps[0], head.first[0] + steps.sum()])
    below = torch.sigmoid(thresholds - vectors @ head.output.weight[0][:, None])
    edges = F.pad(F.pad(below, (0, 1), value=1.0), (1, 0))
    chances = head.prediction(head(vectors))
    torch.testing.assert_close(chances, edges.diff(dim=1))
    target = torch.tensor([0.0, 1, 2, 3, 1])
    total = head.loss(head(vectors), target, torch.ones(5, dtype=torch.bool), torch.ones(5)).total
    assert total.item() == pytest.approx(-chances[range(5), target.long()].log().sum().item())


def test_far_scores_keep_a_finite_loss_and_gradient() -> None:
    head = networks.Head(LEVELS, "cumulative", 1)
    vectors = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    every = torch.ones(2, dtype=torch.bool)
    total = head.loss(head(vectors), torch.tensor([0.0, 1.0]), every, torch.ones(2)).total
    total.backward()
    assert total.isfinite()
    assert vectors.grad.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 5.0, math.inf])
def test_missing_labels_and_fillers_count_for_nothing_at_any_value(value) -> None:
    head = networks.Head(REGRESSION, "mse", 3)
    outputs = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    known = torch.tensor([True, False, True])
    total, count = head.loss(outputs, torch.tensor([14.0, value, value]), known, FILLER)
    total.backward()
    assert (total.item(), count.item()) == (1.0, 1.0)
    assert outputs.grad[:, 0].tolist() == [-2.0, 0.0, 0.0]


def test_a_multilabel_head_counts_each_label_that_is_there() -> None:
    head = networks.Head({"kind": "multilabel", "classes": ["x", "y"]}, "cross_entropy", 3)
    known = torch.tensor([[True, False], [True, True], [True, True]])
    total, count = head.loss(torch.zeros(3, 2), torch.ones(3, 2), known, FILLER)
    assert (total.item(), count.item()) == (pytest.approx(3 * math.log(2)), 3.0)


def test_the_baseline_has_the_units_of_a_prediction() -> None:
    assert networks.baseline(LEVELS).tolist() == LEVELS["shares"]
    assert networks.baseline({"kind": "binary", "shares": [0.75, 0.25]}).tolist() == [0.25]


def test_the_loss_of_a_text_is_the_mean_over_its_own_labels() -> None:
    head = networks.Head({"kind": "multilabel", "classes": ["a", "b", "c"]}, "cross_entropy", 2)
    outputs, target = torch.zeros(3, 3), torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 0]])
    outputs[0, 0] = 50.0  # right, and certain
    known = torch.tensor([[True, True, True], [False, True, False], [False] * 3])
    log2 = math.log(2)
    found = head.loss_of_texts(outputs, target, known)
    assert found.tolist() == pytest.approx([2 / 3 * log2, log2, 0.0])
    single = networks.Head(REGRESSION, "mse", 2)
    given = (torch.tensor([[1.5], [1.0]]), torch.tensor([14.0, math.nan]).nan_to_num())
    assert single.loss_of_texts(*given, torch.tensor([True, False])).tolist() == [0.25, 0.0]
