"""Predictions: streamed to parts, resumed after a kill, merged in order, never overwritten."""

import numpy as np
import pytest
from lightning.pytorch import Callback

from lit_models.training.optim import parameter_groups
from lit_models.training.predictions import PredictionWriter, merged
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


def predict(folder, cut_after=None, module=None, size=4, part_batches=1, **trainer_options):
    counter = CutAfter(cut_after or 10_000)
    callbacks = [PredictionWriter(part_batches), counter]
    options = {"callbacks": callbacks, "enable_checkpointing": False, **trainer_options}
    trainer = toy_trainer(folder, **options)
    data = ToyData(global_batch_size=size, predict_output=str(folder / "out.csv"))
    try:
        trainer.predict(module or LitToy(), data, return_predictions=False)
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


def test_parts_of_other_weights_are_not_used(tmp_path):
    predict(tmp_path, cut_after=4)
    other = LitToy()
    other.configure_model()
    next(iter(parameter_groups(other)))["params"][0][1].data += 1
    assert predict(tmp_path, module=other) == 6


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "out.csv").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.csv exists and is not overwritten.*predict_output"):
        predict(tmp_path)
    assert (tmp_path / "out.csv").read_text() == "precious"


@pytest.mark.parametrize("limit", [0, 5, 0.5])
def test_a_limit_that_leaves_samples_out_is_refused_before_any_work(tmp_path, limit):
    rule = rf"limit_predict_batches is {limit} per device.* 6 batches.*Leave the limit"
    with pytest.raises(ValueError, match=rule):
        predict(tmp_path, limit_predict_batches=limit)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [6, 7, 1.0])
def test_a_limit_that_leaves_nothing_out_is_kept(tmp_path, limit):
    assert predict(tmp_path, limit_predict_batches=limit) == 6
    assert (tmp_path / "out.csv").read_bytes().count(b"\n") == 21


def test_missing_and_repeated_samples_are_noticed(tmp_path):
    part = {"batches": np.array([0]), "x": np.ones(3)}
    np.savez(tmp_path / "part-0.npz", sample_id=np.array([0, 1, 1]), **part)
    with pytest.raises(RuntimeError, match="2 samples have no prediction and 1 have several"):
        merged(tmp_path, 4)


def test_part_files_hold_at_least_one_batch():
    with pytest.raises(ValueError, match="part_batches must be at least 1, got 0"):
        PredictionWriter(part_batches=0)
