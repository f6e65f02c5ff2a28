"""Scores of a test with confidence intervals: by hand, in any order, for each source."""

import numpy as np
import pytest
import torch

from datamodules import Columns, OccupationDataModule
from lit_models.occupation_coder.answers.scores import RESAMPLES, ScoreTable, interval, score_table
from tests.occupation_coder.test_module import small_coder, trainer_of
from tests.text_corpora import table
from tests.toy import csv_rows


def test_intervals_are_the_quantiles_of_the_means_of_redrawn_records():
    scores = np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 0.5], [1.0, 0.5]])
    low, high = interval(scores)
    draws, means = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        chosen = [scores[i] for i in draws.integers(0, 4, 4)]
        means.append([sum(one[k] for one in chosen) / 4 for k in range(2)])
    means = np.sort(means, axis=0)
    # 2.5 % of 999 gaps are below: between the 25th and the 26th value
    np.testing.assert_allclose(low, means[24] + 0.975 * (means[25] - means[24]))
    np.testing.assert_allclose(high, means[974] + 0.025 * (means[975] - means[974]))
    assert (low <= scores.mean(0)).all()
    assert (scores.mean(0) <= high).all()


def test_order_and_fillers_change_nothing():
    draws = np.random.default_rng(0)
    rows = np.column_stack([np.arange(40), np.arange(40) % 3, draws.random((40, 5))])
    expected = score_table(rows, ["b", "", "a"])
    assert [row[0] for row in expected] == ["source", "all", "b", "none", "a"]
    assert [row[1] for row in expected] == ["records", "40", "14", "13", "13"]
    filler = np.column_stack([[-1.0], [0.0], np.ones((1, 5))])
    mixed = np.concatenate([filler, rows[::-1]])
    assert score_table(mixed, ["b", "", "a"]) == expected


@pytest.fixture
def folder(tmp_path, own_cache):
    trades = {"smith": "83110", "vintner": "41025"}
    rows = [(f"{t} {i}", c, "parish" if i % 3 else "") for i in range(9) for t, c in trades.items()]
    table(tmp_path / "rows.csv", rows, ("text", "code_1", "register"))
    return tmp_path


def test_a_test_tells_sources_apart(folder, capsys):
    torch.manual_seed(0)
    files = dict.fromkeys(("train_files", "test_files"), str(folder / "rows.csv"))
    columns = Columns(source="register")
    data = OccupationDataModule(**files, columns=columns, global_batch_size=8)
    coder, trainer = small_coder(), trainer_of(folder, epochs=1)
    trainer.callbacks.append(ScoreTable())
    scores = trainer.test(coder, data, verbose=False)[0]
    row_of = {row["source"]: row for row in csv_rows(folder / "run" / "scores-test.csv")}
    assert {name: row["records"] for name, row in row_of.items()} == {
        **{"all": "18", "none": "6", "parish": "12"}
    }
    assert row_of["all"]["exact_match"] == f"{scores['test/exact_match']:.4f}"
    parts = sum(int(row_of[n]["records"]) * float(row_of[n]["f1"]) for n in ("none", "parish"))
    assert parts / 18 == pytest.approx(scores["test/f1"], abs=1e-4)
    assert "parish" in capsys.readouterr().out
    data = OccupationDataModule(**files, columns=Columns(source="book"), global_batch_size=8)
    with pytest.raises(ValueError, match=r'no column "book" \(columns.source\)'):
        trainer.test(coder, data, verbose=False)
