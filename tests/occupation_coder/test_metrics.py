"""Scores of code sets by hand, for any batching of records; the linear baseline beside them."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from datamodules.occupations import store as stores
from datamodules.tokenizers.codes import CodeBook, CodeSystem, named_code_system
from lit_models.occupation_coder import metrics as coder_metrics
from lit_models.occupation_coder.decoding import TEMPERATURES, Decoded, TemperatureSearch
from lit_models.occupation_coder.module import LitOccupationCoder
from lit_models.occupation_coder.network import NONE, CodeTrie

BOOK = CodeBook(named_code_system("hisco"), ["01110", "01120", "01210", "58340"], [""] * 4)
TRIE = CodeTrie(BOOK.table, len(BOOK.symbols), BOOK.max_codes)


def metrics_of(*languages):
    metrics = coder_metrics.OccupationMetrics(
        TRIE, ["unk", *languages], {"seq2seq": 0.25, "flat": 0.75}
    )
    nothing = torch.zeros(1)
    metrics.add_losses({"seq2seq": nothing, "flat": nothing}, nothing)
    return metrics


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
    true = torch.tensor([[0, 1, NONE], [0, 1, 2], [3, NONE, NONE], [NONE] * 3, [2, 2, NONE]])
    predicted = torch.tensor([[1, NONE], [1, 3], [3, NONE], [NONE, NONE], [2, 2]])
    scores = {
        name: score.tolist() for name, score in coder_metrics.set_scores(true, predicted).items()
    }
    assert scores["accuracy"] == pytest.approx([1 / 2, 1 / 3, 1, 1, 1])
    assert scores["precision"] == pytest.approx([1, 1 / 2, 1, 1, 1])
    assert scores["recall"] == pytest.approx([1 / 2, 1 / 3, 1, 1, 1])
    assert scores["f1"] == pytest.approx([2 / 3, 2 / 5, 1, 1, 1])
    assert scores["exact_match"] == [0, 0, 1, 1, 1]  # a repeated code counts once


def test_fewer_digits_forgive_errors_in_the_last_ones():
    metrics = metrics_of()
    metrics.update(decoded([[1], [2], [3]]), batch_of([[0], [0], [0]]))
    values = {name: metric.compute().item() for name, metric in metrics.items()}
    assert [round(values[f"f1_digits_{d}"] * 3) for d in (1, 2, 3, 4, 5)] == [2, 2, 1, 0, 0]
    assert values["f1_digits_5"] == values["f1"]
    metrics = metrics_of()  # two codes that agree in their first digits are one there
    metrics.update(decoded([[2, NONE]]), batch_of([[0, 1]]))
    assert metrics["f1_digits_1"].compute() == 1.0
    assert metrics["f1_digits_5"].compute() == 0.0


def test_languages_and_seen_strings_are_counted_apart_and_fillers_nowhere():
    metrics = metrics_of("en")
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


def test_the_way_records_are_batched_changes_nothing():
    torch.manual_seed(0)
    true, predicted = torch.randint(0, 4, (21, 2)), torch.randint(0, 4, (21, 3))
    confidence = torch.rand(21)
    whole, parts = metrics_of(), metrics_of()
    for metrics, cuts in ((whole, [(0, 21)]), (parts, [(0, 4), (4, 5), (5, 21)])):
        for low, high in cuts:
            out = Decoded(predicted[low:high], predicted[low:high] * 0.0, confidence[low:high])
            metrics.update(out, batch_of(true[low:high].tolist()))
    for name in whole:
        value, expected = whole[name].compute().item(), parts[name].compute().item()
        assert value == pytest.approx(expected, abs=1e-14, nan_ok=True)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    bins = coder_metrics.CalibrationBins()
    bins.update(torch.tensor([0.9, 0.9, 0.25, 1.0]), torch.tensor([1, 0, 0, 1]), torch.ones(4))
    # bins 0.9 to 1 hold 0.9, 0.9 and 1.0, 2 of the 3 right; bin 0.2 holds 0.25, wrong
    assert bins.compute().item() == pytest.approx((abs(2.8 - 2) + 0.25) / 4, abs=1e-6)
    assert bins.limit(0.6) == pytest.approx((0.89, 0.75, 2 / 3))  # float32: 0.9 - 2e-8
    assert bins.limit(1.0) == pytest.approx((0.99, 0.25, 1.0))
    bins.update(torch.tensor([1.0]), torch.tensor([0]), torch.ones(1))
    assert bins.limit(0.7) == (1.01, 0.0, 0.0)  # no answer is sure enough, so all need a check


def test_the_temperature_of_overconfident_logits_is_found():
    torch.manual_seed(0)
    honest = torch.randn(4000)
    labels = (torch.rand(4000) < honest.sigmoid()).double()
    search = TemperatureSearch()
    of_all = (2.5 * honest[:, None] / TEMPERATURES, labels[:, None].expand(-1, len(TEMPERATURES)))
    nats = F.binary_cross_entropy_with_logits(*of_all, reduction="none")
    nats[0] = math.inf
    weight = torch.ones(4000)
    weight[0] = 0.0  # a filler
    search.update(nats, weight)
    assert search.compute().item() == pytest.approx(2.5, rel=0.1)
    search.reset()
    search.update(torch.rand(3, len(TEMPERATURES)), torch.zeros(3))
    assert search.compute() == 1.0  # of fillers alone


def test_losses_are_means_over_records_whatever_a_filler_holds():
    metrics = metrics_of()
    nan, inf = float("nan"), float("inf")
    first = {"seq2seq": torch.tensor([1.0, inf]), "flat": torch.tensor([2.0, nan])}
    assert metrics.add_losses(first, torch.tensor([1.0, 0.0]))[0] == 1.75
    second = {"seq2seq": torch.tensor([3.0]), "flat": torch.tensor([6.0])}
    assert metrics.add_losses(second, torch.ones(1)).tolist() == [5.25]
    names = ("loss_seq2seq", "loss_flat", "loss")
    assert [float(metrics[name].compute()) for name in names] == [2.0, 4.0, 3.5]


TABLE = """text,code_1,code_2,split
baker,1,,train
old baker,1,,train
master baker,1,,train
smith,2,,train
smith,3,,train
smith,2,,train
old smith,2,,train
master smith,2,,train
young baker,1,,test
young smith,2,,test
baker and smith,1,2,test
miller,3,,test
"""


@pytest.fixture
def store(tmp_path: Path, own_cache: None) -> stores.OccupationStore:
    path = tmp_path / "jobs.csv"
    path.write_text(TABLE, encoding="utf-8")
    columns = stores.Columns(split="split")
    system = CodeSystem(max_codes=2)
    return stores.open_store(
        stores.StoreRequest({0: [path], 1: [], 2: []}, columns, system, stores.CodeBookOptions())
    )


def baseline_on(store: object, **changes: object) -> coder_metrics.LinearBaseline:
    """A baseline after the test of a trainer."""
    settings = {
        "is_global_zero": True,
        "datamodule": SimpleNamespace(store=store),
        "loggers": [],
        "callback_metrics": {"test/f1": np.float32(0.9), "test/accuracy": np.float32(0.8)},
        "global_step": 7,
    }
    baseline = coder_metrics.LinearBaseline()
    baseline.on_test_end(SimpleNamespace(**(settings | changes)), None)
    return baseline


def test_the_scores_are_those_worked_out_by_hand_beside_the_models(store, capsys):
    logged = []
    logger = SimpleNamespace(log_metrics=lambda values, step: logged.append((values, step)))
    baseline = baseline_on(store, loggers=[logger])
    # right, right, one of two codes (F1 2/3, accuracy 1/2), and an unseen trade
    assert baseline.scores["f1"] == pytest.approx((1 + 1 + 2 / 3 + 0) / 4)
    assert baseline.scores["accuracy"] == pytest.approx((1 + 1 + 1 / 2 + 0) / 4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("test, 4 records")
    assert lines[1].split()[-2:] == ["0.9000", "0.8000"]
    assert "linear SVM" in lines[2]
    assert "0.6667" in lines[2]
    assert logged == [({"test/baseline_f1": pytest.approx(2 / 3)}, 7)]


@pytest.mark.parametrize("f1", [0.6, 0.7])
def test_a_baseline_that_wins_is_printed_with_its_remedy(store, capsys, f1):
    figures = {"test/f1": np.float32(f1), "test/accuracy": np.float32(f1)}
    baseline_on(store, callback_metrics=figures)
    remedy = "the baseline is ahead by 0.0667: the linear head of occupation_coder/table.yaml"
    assert (remedy in capsys.readouterr().out) == (f1 == 0.6)


def test_only_rank_zero_trains(store, capsys):
    assert not baseline_on(store, is_global_zero=False).scores
    assert not capsys.readouterr().out


def test_more_strings_than_allowed_are_thinned_out_evenly(store, capsys, monkeypatch):
    for most, line in ((20, "6 training strings"), (3, "3 training strings"), (1, "1 training s")):
        monkeypatch.setattr(coder_metrics, "MOST_TEXTS", most)
        baseline_on(store)
        assert line in capsys.readouterr().out


def test_the_recipe_for_a_table_of_ones_own_needs_no_code_book_and_no_language(done, own_folder):
    codes = {"baker": 1, "smith": 2, "weaver": 3, "miller": 4}
    places = ("", "old", "master", "young", "the king's")
    rows = [f"{place} {trade},{codes[trade]}" for place in places for trade in codes]
    Path("mine.csv").write_text("\n".join(["text,code_1", *rows]) + "\n", encoding="utf-8")
    small = ["--model.encoder.num_buckets=512", "--model.loss.linear.num_features=512"]
    files = ["--data.train_files=mine.csv", "--data.code_book=null", "--data.split.test_share=0.3"]
    output = done(
        "fit", "--config", "occupation_coder/table.yaml", *files, *small, "--trainer.max_steps=2"
    )
    assert "linear SVM" in output
    checkpoint = next(Path("runs").glob("*/checkpoints/last.ckpt"))
    coder = LitOccupationCoder.load_from_checkpoint(checkpoint)
    # two steps teach the decoder nothing; the linear head, solved before them, has the answers
    options = {"method": "mixed", "flat_share": 1.0}
    assert [one.codes for one in coder.code(["a weaver", "a miller"], **options)] == [["3"], ["4"]]
