"""Losses of heads by hand: levels, masks, standard deviations, weights."""

import math

import pytest
import torch
import torch.nn.functional as F

from lit_models.seo.networks import Head, HeadOptions, baseline, said

REGRESSION = {"kind": "regression", "classes": None, "mean": 10.0, "std": 2.0}
LEVELS = {"kind": "ordinal", "classes": ["a", "b", "c", "d"], "shares": [0.1, 0.2, 0.3, 0.4]}
SURE, FILLER = torch.tensor([1.0]), torch.tensor([1.0, 1.0, 0.0])


def loss_of(head: Head, output: float, target: float) -> float:
    known = torch.tensor([True])
    return float(head.loss(torch.tensor([[output]]), torch.tensor([target]), known, SURE).total)


def test_a_regression_is_learnt_in_standard_deviations() -> None:
    # a label of 14 is 2 standard deviations above the mean
    for loss, expected in (("mse", 0.25), ("mae", 0.5), ("huber", 0.125)):
        assert loss_of(Head(REGRESSION, loss, 3), 1.5, 14.0) == pytest.approx(expected)
    assert loss_of(Head(REGRESSION, "huber", 3), 5.0, 14.0) == pytest.approx(2.5)
    head = Head(REGRESSION, "mse", 3)
    assert head.prediction(torch.tensor([[1.5]])).tolist() == [[13.0]]
    assert baseline(REGRESSION).tolist() == [10.0]


def test_levels_are_differences_of_sigmoids_of_ascending_thresholds() -> None:
    head = Head(LEVELS, "cumulative", 2).double()
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
    head = Head(LEVELS, "cumulative", 1)
    vectors = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    every = torch.ones(2, dtype=torch.bool)
    total = head.loss(head(vectors), torch.tensor([0.0, 1.0]), every, torch.ones(2)).total
    total.backward()
    assert total.isfinite()
    assert vectors.grad.isfinite().all()


@pytest.mark.parametrize("value", [0.0, 5.0, math.inf])
def test_a_missing_label_and_a_filler_count_for_nothing_whatever_stands_there(value) -> None:
    head = Head(REGRESSION, "mse", 3)
    outputs = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    known = torch.tensor([True, False, True])
    total, count = head.loss(outputs, torch.tensor([14.0, value, value]), known, FILLER)
    total.backward()
    assert (total.item(), count.item()) == (1.0, 1.0)
    assert outputs.grad[:, 0].tolist() == [-2.0, 0.0, 0.0]


def test_a_multilabel_head_counts_each_label_that_is_there() -> None:
    head = Head({"kind": "multilabel", "classes": ["x", "y"]}, "cross_entropy", 3)
    known = torch.tensor([[True, False], [True, True], [True, True]])
    total, count = head.loss(torch.zeros(3, 2), torch.ones(3, 2), known, FILLER)
    assert (total.item(), count.item()) == (pytest.approx(3 * math.log(2)), 3.0)


def test_the_baseline_is_what_prediction_would_be() -> None:
    assert baseline(LEVELS).tolist() == LEVELS["shares"]
    assert baseline({"kind": "binary", "shares": [0.75, 0.25]}).tolist() == [0.25]


def test_a_loss_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match='model.heads.q: loss "mse" does not fit a binary head'):
        HeadOptions("mse").loss_of("q", "binary")
    with pytest.raises(ValueError, match="weight must be 0 or more, got -1"):
        HeadOptions(weight=-1)


def test_the_loss_of_a_text_is_the_mean_over_its_own_labels() -> None:
    head = Head({"kind": "multilabel", "classes": ["a", "b", "c"]}, "cross_entropy", 2)
    outputs, target = torch.zeros(3, 3), torch.tensor([[1.0, 0, 1], [1, 0, 0], [0, 0, 0]])
    outputs[0, 0] = 50.0  # right, and sure of it
    known = torch.tensor([[True, True, True], [False, True, False], [False] * 3])
    log2 = math.log(2)
    found = head.loss_of_texts(outputs, target, known)
    assert found.tolist() == pytest.approx([2 / 3 * log2, log2, 0.0])
    single = Head(REGRESSION, "mse", 2)
    given = (torch.tensor([[1.5], [1.0]]), torch.tensor([14.0, math.nan]).nan_to_num())
    assert single.loss_of_texts(*given, torch.tensor([True, False])).tolist() == [0.25, 0.0]


@pytest.mark.parametrize(
    ("kind", "prediction", "words"),
    [
        ("regression", [12.345], "12.3"),
        ("binary", [0.25], "0.25"),
        ("ordinal", [0.2, 0.5, 0.3], "b"),
        ("multilabel", [0.9, 0.5, 0.6], "a c"),
        ("multilabel", [0.1, 0.2, 0.3], ""),
    ],
)
def test_a_prediction_in_words(kind: str, prediction: list[float], words: str) -> None:
    assert said({"kind": kind, "classes": ["a", "b", "c"]}, prediction) == words
