"""Measures of heads against scikit-learn and scipy, and what is said of undefined ones."""

import logging
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn import metrics as sk

from lit_models.seo.metrics import HeadMetrics, WeightedLoss, measures
from lit_models.training.metrics import LossSum

RNG = np.random.default_rng(0)


def measured(kind: str, prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    prediction, target = (np.asarray(x, float) for x in (prediction, target))
    target = target.reshape(len(target), -1)
    return {name: value for name, (value, _) in measures(kind, prediction, target).items()}


def test_a_regression() -> None:
    truth = RNG.integers(0, 6, 60).astype(float)
    guess = np.round(truth + RNG.normal(0, 2, 60))  # many ties
    assert measured("regression", guess[:, None], truth) == pytest.approx(
        {
            "spearman": stats.spearmanr(guess, truth).statistic,
            "pearson": stats.pearsonr(guess, truth).statistic,
            "rmse": sk.root_mean_squared_error(truth, guess),
            "mae": sk.mean_absolute_error(truth, guess),
        }
    )


def test_a_correlation_has_no_unit() -> None:
    truth = RNG.normal(0, 1, 30)
    guess = truth + RNG.normal(0, 1, 30)
    expected = stats.pearsonr(guess, truth).statistic
    for unit in (1e-200, 1e-7, 1.0, 1e200):
        found = measured("regression", guess[:, None] * unit, truth * unit)
        assert found["pearson"] == pytest.approx(expected)
    assert measured("regression", np.full((30, 1), 0.1), truth)["pearson"] == 0


def test_ordinal_levels() -> None:
    truth, chances = RNG.integers(0, 4, 60), RNG.dirichlet(np.ones(4) * 0.5, 60)
    expected = chances @ np.arange(4)
    level = np.floor(expected + 0.5)
    assert measured("ordinal", chances, truth) == pytest.approx(
        {
            "kappa": sk.cohen_kappa_score(truth, level, weights="quadratic"),
            "spearman": stats.spearmanr(expected, truth).statistic,
            "mae": sk.mean_absolute_error(truth, level),
        }
    )


def test_a_binary_head() -> None:
    truth, chance = RNG.integers(0, 2, 80), np.round(RNG.random(80), 1)
    found = measured("binary", chance[:, None], truth)
    bins = np.minimum((chance * 15).astype(int), 14)
    distance = [abs((chance - truth)[bins == b].sum()) for b in range(15)]
    assert found["calibration_error"] == pytest.approx(sum(distance) / 80)
    assert found["auroc"] == pytest.approx(sk.roc_auc_score(truth, chance))
    assert found["f1"] == pytest.approx(sk.f1_score(truth, chance >= 0.5))
    assert found["log_loss"] == pytest.approx(sk.log_loss(truth, chance))
    assert math.isfinite(found["log_loss"])  # a chance of 0 that came true


def test_classes_and_labels() -> None:
    truth, chances = RNG.integers(0, 4, 60), RNG.dirichlet(np.ones(5), 60)  # one is never true
    found = measured("multiclass", chances, truth)
    chosen = chances.argmax(1)
    assert found["macro_f1"] == pytest.approx(sk.f1_score(truth, chosen, average="macro"))
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(truth, chosen))
    assert found["log_loss"] == pytest.approx(sk.log_loss(truth, chances, labels=range(5)))
    truth, chances = RNG.integers(0, 2, (60, 3)), RNG.random((60, 3))
    assert measured("multilabel", chances, truth) == pytest.approx(
        {
            "macro_f1": sk.f1_score(truth, chances >= 0.5, average="macro"),
            "macro_auroc": sk.roc_auc_score(truth, chances, average="macro"),
        }
    )


def test_missing_labels_of_a_multilabel_head_count_for_no_label() -> None:
    truth, chances = np.array([[1, math.nan], [0, 1], [1, 0.0]]), np.array([[0.9, 0.9]] * 3)
    found = measured("multilabel", chances, truth)
    assert found["macro_f1"] == pytest.approx((2 * 2 / 5 + 2 / 3) / 2)
    assert found["macro_auroc"] == 0.5


@pytest.mark.parametrize(
    ("kind", "prediction", "target", "expected", "said"),
    [
        ("regression", [[1.0], [1.0]], [1.0, 3.0], {"spearman": 0, "pearson": 0}, "all the same"),
        ("ordinal", [[1.0, 0.0]] * 2, [0.0, 0.0], {"kappa": 0}, "kappa is undefined"),
        ("binary", [[0.2], [0.3]], [0.0, 0.0], {"auroc": 0.5, "f1": 0}, "auroc is undefined"),
        ("binary", [[math.nan], [0.3]], [0.0, 1.0], {"log_loss": math.nan}, "are no numbers"),
        ("multiclass", [[0.5, 0.5]], [math.nan], {"accuracy": math.nan}, "no text of the split"),
        ("multilabel", [[0.1]], [[0.0]], {"macro_auroc": 0.5}, "of a single class are left out: 0"),
    ],
)
def test_what_is_undefined_is_said(kind, prediction, target, expected, said, caplog) -> None:
    metrics = HeadMetrics(kind, "test/quality")
    size = len(target)
    shape = (size, {"ordinal": 2, "multiclass": 2}.get(kind, 1))
    target = torch.tensor(target).float()
    with caplog.at_level(logging.WARNING):
        batch = {"sample_id": torch.arange(size), "weight": torch.ones(size)}
        metrics.update(torch.tensor(prediction).reshape(shape), target, ~target.isnan(), batch)
        figures = metrics.measure()
    found = {name: float(figures[name].compute()) for name in expected}
    assert found == pytest.approx(expected, nan_ok=True)
    assert said in caplog.text
    assert "test/quality_" in caplog.text


def test_order_batches_and_fillers_change_no_bit() -> None:
    truth, guess = torch.from_numpy(RNG.normal(0, 1, 40)).float(), torch.from_numpy(RNG.random(40))
    known = torch.from_numpy(RNG.random(40) < 0.7)
    whole, parts = HeadMetrics("regression"), HeadMetrics("regression")
    ids = torch.arange(40)
    whole.update(guess[:, None], truth, known, {"sample_id": ids, "weight": torch.ones(40)})
    for rows in torch.randperm(40).split(7):
        rows = torch.cat([rows, rows[:1]])
        weight = torch.ones(len(rows))
        weight[-1] = 0
        batch = {"sample_id": ids[rows], "weight": weight}
        parts.update(guess[rows][:, None], truth[rows], known[rows], batch)
    expected = {name: figure.compute() for name, figure in whole.measure().items()}
    assert {name: figure.compute() for name, figure in parts.measure().items()} == expected
    assert not parts.rows.target


def test_the_loss_of_all_heads_is_the_weighted_sum_of_their_means() -> None:
    loss = WeightedLoss({"a": 2.0, "b": 0.5, "none": 3.0})
    for total, count in ((6.0, 2.0), (1.0, 5.0)):
        term = LossSum(torch.tensor(total), torch.tensor(count))
        empty = LossSum(torch.tensor(0.0), torch.tensor(0.0))
        loss.update({"a": term, "b": LossSum(term.total, term.count * 2), "none": empty})
    assert float(loss.compute()) == pytest.approx(2 * 7 / 7 + 0.5 * 7 / 14)
