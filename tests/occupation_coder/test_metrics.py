"""Scores of code sets by hand, and sums that do not depend on how records are batched."""

import math

import pytest
import torch

from datamodules.tokenizers.codes import CodeBook, named_code_system
from lit_models.occupation_coder.decoding import Decoded, TemperatureSearch, temperatures
from lit_models.occupation_coder.metrics import (
    CalibrationBins,
    LossMetrics,
    OccupationMetrics,
    set_scores,
)

NONE = -100
CODES = ["01110", "01120", "01210", "58340"]


@pytest.fixture
def book():
    return CodeBook(named_code_system("hisco"), CODES, [""] * 4)


def decoded(code_ids, confidence=None):
    ids = torch.tensor(code_ids)
    sets = torch.tensor(confidence or [0.5] * len(ids))
    return Decoded(ids, torch.ones(ids.shape), sets)


def batch_of(code_ids, weight=None, language=None, seen=None):
    count = len(code_ids)
    return {
        "code_ids": torch.tensor(code_ids),
        "weight": torch.tensor(weight or [1.0] * count),
        "language_id": torch.tensor(language or [0] * count),
        "is_seen_text": torch.tensor(seen or [True] * count),
        "is_seen_code": torch.tensor(seen or [True] * count),
    }


def test_scores_of_a_record_by_hand():
    true = torch.tensor([[0, 1, NONE], [0, 1, 2], [3, NONE, NONE], [NONE] * 3])
    given = torch.tensor([[1, NONE], [1, 3], [3, NONE], [NONE, NONE]])
    scores = {name: score.tolist() for name, score in set_scores(true, given).items()}
    assert scores["accuracy"] == pytest.approx([1 / 2, 1 / 3, 1, 1])
    assert scores["precision"] == pytest.approx([1, 1 / 2, 1, 1])
    assert scores["recall"] == pytest.approx([1 / 2, 1 / 3, 1, 1])
    assert scores["f1"] == pytest.approx([2 / 3, 2 / 5, 1, 1])
    assert scores["exact_match"] == [0, 0, 1, 1]


def test_a_repeated_code_counts_once():
    scores = set_scores(torch.tensor([[2, 2]]), torch.tensor([[2, NONE, 2]]))
    assert [score.item() for score in scores.values()] == [1.0] * 5


def test_fewer_digits_forgive_errors_in_the_last_ones(book):
    metrics = OccupationMetrics(book, ["unk"])
    metrics.update(decoded([[1], [2], [3]]), batch_of([[0], [0], [0]]))
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    assert [round(values[f"f1_digits_{d}"] * 3) for d in (1, 2, 3, 4, 5)] == [2, 2, 1, 0, 0]
    assert values["f1_digits_5"] == values["f1"]


def test_two_codes_that_agree_in_their_first_digits_are_one_there(book):
    metrics = OccupationMetrics(book, ["unk"])
    metrics.update(decoded([[2, NONE]]), batch_of([[0, 1]]))
    assert metrics["accuracy_digits_1"].compute() == 1.0
    assert metrics["accuracy_digits_5"].compute() == 0.0


def test_languages_and_seen_strings_are_counted_apart_and_fillers_nowhere(book):
    metrics = OccupationMetrics(book, ["unk", "en"])
    metrics.update(
        decoded([[0], [1], [2], [3]]),
        batch_of(
            [[0], [0], [2], [0]], [1.0, 1.0, 1.0, 0.0], [1, 1, 0, 0], [True, False, False, True]
        ),
    )
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    assert values["f1"] == pytest.approx(2 / 3)
    assert values["f1_language_en"] == 0.5
    assert values["f1_language_unk"] == 1.0
    assert values["f1_seen_text"] == 1.0
    assert values["f1_unseen_code"] == 0.5
    assert metrics["f1"].count == 3


def test_the_way_records_are_batched_changes_nothing(book):
    torch.manual_seed(0)
    true, given = torch.randint(0, 4, (21, 2)), torch.randint(0, 4, (21, 3))
    confidence = torch.rand(21)
    whole, parts = OccupationMetrics(book, ["unk"]), OccupationMetrics(book, ["unk"])
    for metrics, cuts in ((whole, [(0, 21)]), (parts, [(0, 4), (4, 5), (5, 21)])):
        for low, high in cuts:
            out = Decoded(given[low:high], given[low:high] * 0.0, confidence[low:high])
            metrics.update(out, batch_of(true[low:high].tolist()))
    for name in whole:
        assert whole[name].compute().item() == pytest.approx(
            parts[name].compute().item(), abs=1e-14, nan_ok=True
        )


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    bins = CalibrationBins()
    bins.update(torch.tensor([0.9, 0.9, 0.25, 1.0]), torch.tensor([1, 0, 0, 1]), torch.ones(4))
    # bins 0.9 to 1 hold 0.9, 0.9 and 1.0 with 2 hits of 3; bin 0.2 holds 0.25 without a hit
    assert bins.compute().item() == pytest.approx((abs(2.8 - 2) + 0.25) / 4, abs=1e-6)
    assert bins.limit(0.6) == pytest.approx((0.89, 0.75, 2 / 3))  # float32: 0.9 - 2e-8
    assert bins.limit(1.0) == pytest.approx((0.99, 0.25, 1.0))
    bins.update(torch.tensor([1.0]), torch.tensor([0]), torch.ones(1))
    assert bins.limit(0.7) == (1.01, 0.0, 0.0)  # nothing is sure enough: everything is looked at


def test_the_temperature_of_overconfident_logits_is_found():
    torch.manual_seed(0)
    honest = torch.randn(4000)
    labels = (torch.rand(4000) < honest.sigmoid()).float()
    search = TemperatureSearch()
    nats = torch.stack(
        [
            torch.nn.functional.binary_cross_entropy_with_logits(
                2.5 * honest / t, labels, reduction="none"
            )
            for t in temperatures().tolist()
        ],
        dim=1,
    )
    nats[0] = math.inf
    weight = torch.ones(4000)
    weight[0] = 0.0  # a filler
    search.update(nats, weight)
    assert search.compute().item() == pytest.approx(2.5, rel=0.1)


def test_a_split_of_fillers_leaves_the_temperature_alone():
    search = TemperatureSearch()
    search.update(torch.rand(3, len(temperatures())), torch.zeros(3))
    assert search.compute() == 1.0


def test_losses_are_means_over_records_whatever_a_filler_holds():
    metrics = LossMetrics({"seq2seq": 0.25, "flat": 0.75})
    nan, inf = float("nan"), float("inf")
    first = {"seq2seq": torch.tensor([1.0, inf]), "flat": torch.tensor([2.0, nan])}
    assert metrics.add_batch(first, torch.tensor([1.0, 0.0]))[0] == 1.75
    second = {"seq2seq": torch.tensor([3.0]), "flat": torch.tensor([6.0])}
    assert metrics.add_batch(second, torch.ones(1)).tolist() == [5.25]
    found = {name: float(metric.compute()) for name, metric in metrics.items()}
    assert found == {"loss_seq2seq": 2.0, "loss_flat": 4.0, "loss": 3.5}
