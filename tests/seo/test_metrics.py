"""Metrics by hand, beside trec_eval, scikit-learn and scipy; the bootstrap."""

import logging
import math

import numpy as np
import pytest
import pytrec_eval
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_models.seo import metrics as seo_metrics

NAN = math.nan
TREC_NAMES = {
    "ndcg": "ndcg",
    "ndcg@5": "ndcg_cut_5",
    "ndcg@10": "ndcg_cut_10",
    "mrr": "recip_rank",
    "map": "map",
    "map@5": "map_cut_5",
    "recall@5": "recall_5",
    "recall@10": "recall_10",
}


def one_query(
    scores: list[float], relevance: list[float], judged: list[float]
) -> seo_metrics.RankedQueries:
    return seo_metrics.rank_queries(
        torch.tensor([scores]),
        torch.tensor([relevance]),
        torch.ones(1, len(scores), dtype=torch.bool),
        torch.tensor([judged]),
    )


def test_the_first_relevant_document_has_a_rank_or_none() -> None:
    ranked = one_query([1.0, 4.0, 3.0, 2.0], [2.0, NAN, 1.0, 0.0], [1.0, 2.0])
    assert seo_metrics.first_relevant(ranked).tolist() == [2]
    assert seo_metrics.first_relevant(one_query([1.0, 2.0], [0.0, NAN], [0.0, 1.0])).tolist() == [0]
    assert seo_metrics.first_relevant(one_query([], [], [1.0])).tolist() == [0]


def test_a_score_of_nan_and_a_query_without_relevant_documents_are_no_good_ranking() -> None:
    scores = torch.tensor([[1.0, 0.0], [NAN, 0.0], [1.0, 9.0]])
    is_candidate = torch.tensor([[True, True]] * 2 + [[True, False]])
    relevance = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 5.0]])
    judged = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    ranked = seo_metrics.rank_queries(scores, relevance, is_candidate, judged)
    for values in seo_metrics.values_per_query(ranked, ("ndcg@1", "recall@1")).values():
        assert values.tolist() == pytest.approx([1.0, NAN, 0.0], nan_ok=True)


@st.composite
def queries(draw: st.DrawFn) -> list[tuple[list[float], list[float | None], list[int]]]:
    """Return scores and grades of each query's candidates, and grades of missed documents."""
    grade = st.integers(-1, 3)
    found = st.lists(st.tuples(st.sampled_from(range(6)), st.none() | grade), max_size=12)
    return [
        ([score / 4 for score, _ in rows], [g for _, g in rows], draw(st.lists(grade, max_size=4)))
        for rows in draw(st.lists(found.filter(bool), min_size=1, max_size=4))
    ]


@settings(max_examples=40, deadline=None)
@given(queries())
def test_equal_to_trec_eval(cases: list) -> None:
    width = max(len(scores) for scores, _, _ in cases)
    scores, relevance = torch.zeros(len(cases), width), torch.full((len(cases), width), NAN)
    is_candidate = torch.zeros(len(cases), width, dtype=torch.bool)
    all_relevance = torch.full((len(cases), width + 4), NAN)
    qrels: dict[str, dict[str, int]] = {}
    run: dict[str, dict[str, float]] = {}
    for q, (found, grades, missed) in enumerate(cases):
        names = [str(9000 - i) for i in range(len(found))]  # trec_eval's ties: the larger first
        judged = {n: g for n, g in zip(names, grades, strict=True) if g is not None}
        judged |= {f"missed{i}": grade for i, grade in enumerate(missed)}
        scores[q, : len(found)], is_candidate[q, : len(found)] = torch.tensor(found), True
        relevance[q, : len(found)] = torch.tensor([NAN if g is None else g for g in grades])
        # trec_eval hangs at some queries whose grades are all below 0
        floor = {name: max(grade, 0) for name, grade in judged.items()}
        qrels[f"q{q}"] = floor
        for column, grade in enumerate(floor.values()):
            all_relevance[q, column] = grade  # below 0 would say that there is no document
        run[f"q{q}"] = dict(zip(names, found, strict=True))
    ranked = seo_metrics.rank_queries(scores, relevance, is_candidate, all_relevance)
    values = seo_metrics.values_per_query(ranked, TREC_NAMES)
    measures = {"ndcg", "ndcg_cut", "recip_rank", "map", "map_cut", "recall"}
    reference = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(run)
    for q in range(len(cases)):
        if qrels[f"q{q}"]:
            expected = {n: reference[f"q{q}"][trec] for n, trec in TREC_NAMES.items()}
            assert {n: float(values[n][q]) for n in TREC_NAMES} == pytest.approx(expected, abs=1e-6)


def test_the_bootstrap_finds_the_interval_of_a_mean_difference() -> None:
    rng = np.random.default_rng(0)
    b = rng.random(400)
    a = b + rng.normal(0.1, 0.5, 400)
    mean, low, high = seo_metrics.paired_bootstrap(a, b, seed=1, num=4000)
    assert mean == pytest.approx((a - b).mean())
    error = (a - b).std() / math.sqrt(400)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.005)
    assert seo_metrics.paired_bootstrap(a, b, seed=1, num=4000) == (mean, low, high)
    assert seo_metrics.paired_bootstrap(b, b, seed=1) == (0.0, 0.0, 0.0)


RNG = np.random.default_rng(0)


def measured(kind: str, prediction: np.ndarray, target: np.ndarray) -> dict[str, float]:
    prediction, target = (np.asarray(x, float) for x in (prediction, target))
    target = target.reshape(len(target), -1)
    return {
        name: value for name, (value, _) in seo_metrics.measures(kind, prediction, target).items()
    }


@pytest.mark.parametrize(
    ("kind", "prediction", "target", "expected"),
    [
        (
            "regression",
            [[1], [2], [3], [4]],
            [1, 3, 2, 4],
            {"spearman": 0.8, "pearson": 0.8, "rmse": math.sqrt(0.5), "mae": 0.5},
        ),
        (  # levels 0, 1, 2, 1: squared errors 2, by chance 4
            "ordinal",
            [[0.6, 0.4, 0], [0, 1, 0], [0, 0, 1], [0, 1, 0]],
            [0, 1, 1, 2],
            {"kappa": 0.5, "spearman": 0.5, "mae": 0.5},
        ),
        (
            "binary",
            [[0.9], [0.2], [0.6], [0.4]],
            [1, 0, 0, 1],
            {
                "auroc": 3 / 4,
                "f1": 0.5,
                "calibration_error": (0.1 + 0.2 + 0.6 + 0.6) / 4,
                "log_loss": -math.log(0.9 * 0.8 * 0.4 * 0.4) / 4,
            },
        ),
        (  # the third class neither occurs nor is predicted
            "multiclass",
            [[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.6, 0.1]],
            [0, 1, 0],
            {
                "macro_f1": 2 / 3,
                "accuracy": 2 / 3,
                "calibration_error": (0.3 + 0.2 + 0.6) / 3,
                "log_loss": -math.log(0.7 * 0.8 * 0.3) / 3,
            },
        ),
    ],
)
def test_measures_of_heads_by_hand(kind, prediction, target, expected) -> None:
    assert measured(kind, prediction, target) == pytest.approx(expected)


def test_missing_labels_of_a_multilabel_head_count_for_no_label() -> None:
    truth, chances = np.array([[1, math.nan], [0, 1], [1, 0.0]]), np.array([[0.9, 0.9]] * 3)
    found = measured("multilabel", chances, truth)
    assert found["macro_f1"] == pytest.approx((2 * 2 / 5 + 2 / 3) / 2)
    assert found["macro_auroc"] == 0.5


@pytest.mark.parametrize(
    ("kind", "prediction", "target", "expected", "reason"),
    [
        ("regression", [[1.0], [1.0]], [1.0, 3.0], {"spearman": 0, "pearson": 0}, "all the same"),
        ("regression", [[1.0]], [3.0], {"spearman": 0, "pearson": 0, "mae": 2}, "all the same"),
        ("ordinal", [[1.0, 0.0]] * 2, [0.0, 0.0], {"kappa": 0}, "kappa is undefined"),
        ("binary", [[0.2], [0.3]], [0.0, 0.0], {"auroc": 0.5, "f1": 0}, "auroc is undefined"),
        ("binary", [[math.nan], [0.3]], [0.0, 1.0], {"log_loss": math.nan}, "are no numbers"),
        ("multiclass", [[0.5, 0.5]], [math.nan], {"accuracy": math.nan}, "no text of the split"),
        ("multilabel", [[0.1]], [[0.0]], {"macro_auroc": 0.5}, "of a single class are left out: 0"),
    ],
)
def test_undefined_measures_warn(kind, prediction, target, expected, reason, caplog) -> None:
    metrics = seo_metrics.HeadMetrics(kind)
    size = len(target)
    shape = (size, {"ordinal": 2, "multiclass": 2}.get(kind, 1))
    target = torch.tensor(target).float()
    with caplog.at_level(logging.WARNING):
        numbers = torch.arange(size)
        batch = {"sample_id": numbers, "weight": torch.ones(size), "text_index": numbers}
        metrics.update(torch.tensor(prediction).reshape(shape), target, ~target.isnan(), batch)
        figures = metrics.measure("test", "quality")
    found = {name: float(figures[f"test/quality_{name}"]) for name in expected}
    assert found == pytest.approx(expected, nan_ok=True)
    assert reason in caplog.text
    assert "test/quality_" in caplog.text
    assert metrics.has_labels == (reason != "no text of the split")  # without labels, no loss


def test_order_batches_fillers_and_rounding_of_copies_change_no_bit() -> None:
    truth, guess = torch.from_numpy(RNG.normal(0, 1, 40)).float(), torch.from_numpy(RNG.random(40))
    known, ids = torch.from_numpy(RNG.random(40) < 0.7), torch.arange(40)
    text, noise = ids % 13, 1e-8 * torch.from_numpy(RNG.normal(0, 1, 40))
    guess, known[:13], noise[:13] = guess[text], True, 0  # the first rows of the texts
    whole, parts = seo_metrics.HeadMetrics("regression"), seo_metrics.HeadMetrics("regression")
    batch = {"sample_id": ids, "weight": torch.ones(40), "text_index": text}
    whole.update(guess[:, None], truth, known, batch)
    for rows in torch.randperm(40).split(7):
        rows = torch.cat([rows, rows[:1]])
        weight = torch.ones(len(rows))
        weight[-1] = 0
        batch = {"sample_id": ids[rows], "weight": weight, "text_index": text[rows]}
        parts.update((guess + noise)[rows][:, None], truth[rows], known[rows], batch)
    assert parts.measure("val", "price") == whole.measure("val", "price")
    assert not parts.rows.target
