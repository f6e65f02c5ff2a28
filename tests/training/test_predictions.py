"""Predictions that resume, and tables of errors."""

import csv
import math
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from lit_models.training import ErrorTable, Ledger
from lit_models.training.metrics import SampleResult
from lit_models.training.optim import parameter_groups
from lit_models.training.predictions import PredictionWriter, as_table, merged, rows_of, worst_of
from tests.toy import LitToy, ToyData, toy_trainer


class Cut(RuntimeError):
    pass


class CutAfter(Callback):
    def __init__(self, batches: int) -> None:
        self.batches, self.seen = batches, 0

    def on_predict_batch_end(self, *_):
        self.seen += 1
        if self.seen == self.batches:
            raise Cut


def predict(folder, cut_after=None, module=None, output="out.csv", part_batches=1, **trainer):
    counter, writer = CutAfter(cut_after or 10_000), PredictionWriter()
    writer.part_batches = part_batches
    callbacks = [writer, counter]
    options = {"callbacks": callbacks, "enable_checkpointing": False, **trainer}
    data = ToyData(global_batch_size=4, predict_output=str(folder / output))
    try:
        toy_trainer(folder, **options).predict(module or LitToy(), data, return_predictions=False)
    except Cut:
        assert cut_after
    return counter.seen


def test_a_killed_prediction_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "whole").mkdir()
    assert predict(tmp_path / "whole") == 6
    expected = (tmp_path / "whole" / "out.csv").read_bytes()
    assert expected.count(b"\n") == 21
    cut = tmp_path / "cut"
    cut.mkdir()
    predict(cut, cut_after=4)
    assert not (cut / "out.csv").exists()
    assert predict(cut) == 2
    assert (cut / "out.csv").read_bytes() == expected
    assert [path.name for path in cut.iterdir()] == ["out.csv"]


def test_a_script_predicts_again_after_an_error_with_the_same_trainer(tmp_path):
    trainer = toy_trainer(tmp_path, callbacks=[PredictionWriter(), CutAfter(4)])
    data = ToyData(global_batch_size=4, predict_output=str(tmp_path / "out.csv"))
    with pytest.raises(Cut):
        trainer.predict(LitToy(), data)
    trainer.predict(LitToy(), data)
    assert (tmp_path / "out.csv").read_bytes().count(b"\n") == 21


def test_parts_of_other_weights_are_not_used(tmp_path):
    predict(tmp_path, cut_after=4)
    other = LitToy()
    other.configure_model()
    next(iter(parameter_groups(other)))["params"][0][1].data += 1
    assert predict(tmp_path, module=other) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_a_kill_within_the_first_part_file_loses_a_minute_at_most(tmp_path, monkeypatch):
    predict(tmp_path, cut_after=4, part_batches=32)
    assert not list(tmp_path.rglob("part-*"))
    monkeypatch.setattr(PredictionWriter, "part_s", 0.0)
    predict(tmp_path, cut_after=4, part_batches=32)
    assert predict(tmp_path) == 2


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "out.csv").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.csv exists and is not overwritten.*predict_output"):
        predict(tmp_path)
    assert (tmp_path / "out.csv").read_text() == "precious"


def test_a_kind_of_file_that_lacks_its_extra_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(ValueError, match=r"out\.xlsx needs openpyxl: pip install"):
        predict(tmp_path, output="out.xlsx")
    assert not any(tmp_path.iterdir())


def test_a_limit_that_leaves_samples_out_writes_no_file_and_is_made_good(tmp_path):
    for limit in (2, 0.5):
        with pytest.raises(RuntimeError, match="samples have no prediction.*without limit_predict"):
            predict(tmp_path, limit_predict_batches=limit)
        assert not (tmp_path / "out.csv").exists()
    assert predict(tmp_path) == 2
    assert (tmp_path / "out.csv").read_bytes().count(b"\n") == 21


def test_missing_and_repeated_samples_are_noticed(tmp_path):
    part = {"batches": np.array([0]), "x": np.ones(3)}
    np.savez(tmp_path / "part-0.npz", sample_id=np.array([0, 1, 1]), **part)
    with pytest.raises(RuntimeError, match="2 samples have no prediction and 1 have several"):
        merged(tmp_path, 4)


def rows(losses: list[float], ids: list[int], weights: list[float] | None = None) -> Tensor:
    result = SampleResult(torch.tensor(losses), {"answer": torch.tensor(ids) * 10})
    return rows_of(result, torch.tensor(ids), torch.tensor(weights or [1.0] * len(ids)))


def ids_of(found: Tensor) -> list[int]:
    return [int(row[1]) for row in found.tolist() if row[1] >= 0]


def test_the_largest_come_first_and_those_that_rounding_sets_apart_by_their_number():
    found = worst_of(rows([1.0, 3.0, 2.0, 3.0, 0.0], [4, 7, 1, 2, 9]), 3)
    assert found[:, [0, 1, 4]].tolist() == [[3.0, 2.0, 20.0], [3.0, 7.0, 70.0], [2.0, 1.0, 10.0]]
    nearly = 2.0 / 3 * (1 + 1e-7)
    assert ids_of(worst_of(rows([2.0 / 3, nearly], [1, 8]), 2)) == [1, 8]
    assert ids_of(worst_of(rows([2.0 / 3, 2.0 / 3 * 1.001], [1, 8]), 2)) == [8, 1]
    for loss in (1e-30, 3.7, 1e30):
        assert rows([loss], [0])[0, 0].item() == pytest.approx(loss, rel=1 / 4096)


def test_fillers_and_right_answers_are_left_out_and_nan_is_worst():
    found = worst_of(rows([math.inf, 9.0, math.nan, 1.0], [0, 1, 2, 3], [1, 0, 1, 1]), 4)
    assert ids_of(found) == [2, 0, 3]
    said = {"answer": torch.arange(3)}
    wrong, sure = torch.tensor([True, False, True]), torch.tensor([0.5, 0.9, 0.25])
    result = SampleResult(torch.tensor([1.0, 5.0, 2.0]), said, wrong, sure, wrong)
    found = worst_of(rows_of(result, torch.arange(3), torch.ones(3)), 3)
    assert found[:2].tolist() == [[2, 2, 0.25, 1, 2], [1, 0, 0.5, 1, 0]]
    assert ids_of(found) == [2, 0]


def test_texts_that_a_sample_lacks_are_empty_and_long_ones_are_cut():
    samples = [
        ({"text": "2", "b": "y", "given": "z" * 2001}, ("0.5", "yes", "5", "0.5")),
        ({"text": "1", "given": "z", "c": "w"}, ("", "", "3", "nan")),
    ]
    heads, *found = as_table(samples)
    assert heads == [
        *("input", "b", "answer", "c"),
        *("confidence", "seen in training", "sample", "loss"),
    ]
    assert found[0] == ["2", "y", "z" * 2000 + "…", "", "0.5", "yes", "5", "0.5"]
    assert found[1] == ["1", "", "z", "w", "", "", "3", "nan"]
    assert as_table([]) == [heads[4:]]


def test_a_run_lists_what_looking_at_each_sample_lists(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("lit_models.training.predictions.MOST", 14)
    monkeypatch.setattr("lit_models.training.predictions.BATCHES", 3)
    trainer = toy_trainer(tmp_path, max_epochs=1, callbacks=[Ledger(), ErrorTable()])
    module, data = LitToy(), ToyData(micro_batch_size=2)
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    dataset, expected = data.datasets["test"], []
    for number in range(21):
        batch = dataset.collate([dataset.example(number, 0)])
        with torch.no_grad():
            result = module.double().sample_result(batch, module(batch))
        expected.append((-result.loss.item(), number, result.answers["sum"].item()))
    with (tmp_path / "errors-test.csv").open(newline="") as file:
        heads, *found = csv.reader(file)
    assert heads == ["length", "sum", "confidence", "seen in training", "sample", "loss"]
    for row, (loss, number, said) in zip(found, sorted(expected)[:14], strict=True):
        assert row[:5] == [str(dataset.lengths[number]), f"{said:g}", "", "", str(number)]
        assert float(row[5]) == pytest.approx(-loss, rel=0.01)
    assert not list(tmp_path.glob(".*unfinished"))
    path = tmp_path / "errors-test.csv"
    assert f"errors: {path} (14 samples, the largest loss first)" in capsys.readouterr().out


def test_a_module_that_says_nothing_of_its_samples_has_no_table(tmp_path, monkeypatch):
    monkeypatch.setattr(LitToy, "test_step", lambda *_: None)
    toy_trainer(tmp_path, callbacks=[ErrorTable()]).test(LitToy(), ToyData(), verbose=False)
    assert not list(tmp_path.glob("errors-*"))
