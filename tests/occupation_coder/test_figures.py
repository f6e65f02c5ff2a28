"""Figures end up in TensorBoard's files."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from datamodules.tokenizers.codes import CodeBook, named_code_system
from lit_models.occupation_coder.metrics import (
    CalibrationBins,
    ConfusedPairs,
    OccupationFigures,
    confused_table,
    coverage_figure,
    reliability_figure,
)

CODES = ["01110", "58340"]


@pytest.fixture
def book():
    return CodeBook(named_code_system("hisco"), CODES, ["Chemist", "Soldier | officer"])


def test_a_validation_draws_two_figures_and_a_table(book, tmp_path):
    logger = TensorBoardLogger(tmp_path)
    bins, confused = CalibrationBins(), ConfusedPairs(2)
    bins.update(torch.tensor([0.9, 0.2]), torch.tensor([1, 0]), torch.ones(2))
    confused.update(torch.tensor([[0]]), torch.tensor([[1]]), torch.ones(1))
    coder = SimpleNamespace(
        val_metrics={"calibration_error": bins},
        val_confused=confused,
        recipe={"code_book": book.to_dict()},
    )
    trainer = SimpleNamespace(
        world_size=1,
        loggers=[logger],
        sanity_checking=False,
        is_global_zero=True,
        global_step=7,
    )
    OccupationFigures().on_validation_epoch_end(trainer, coder)
    logger.experiment.flush()
    events = b"".join(path.read_bytes() for path in tmp_path.rglob("events*"))
    for tag in (b"val/reliability", b"val/coverage", b"val/confused_codes", b"58340 Soldier"):
        assert tag in events


def test_curves_leave_marks_where_the_numbers_are():
    side = torch.linspace(0.05, 0.95, 10)
    low = reliability_figure(side, side * 0, torch.ones(10))
    high = reliability_figure(side, side * 0 + 1, torch.ones(10))
    assert low.shape == high.shape == (480, 480, 3)
    navy = torch.tensor([0, 0, 128])
    rows_low = (torch.tensor(low) == navy).all(-1).nonzero()[:, 0].float().mean()
    rows_high = (torch.tensor(high) == navy).all(-1).nonzero()[:, 0].float().mean()
    assert rows_high < 50 < 430 < rows_low
    assert coverage_figure(side, side).shape == (480, 480, 3)


def test_the_table_names_codes_and_keeps_its_columns(book):
    table = confused_table(torch.tensor([[0, 1, 3]]), book)
    assert table.splitlines()[-1] == "| 3 | 01110 Chemist | 58340 Soldier / officer |"


def test_a_table_needs_a_row():
    with pytest.raises(ValueError, match="num_pairs must be 1 or more, got 0"):
        OccupationFigures(num_pairs=0)
