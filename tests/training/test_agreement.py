"""Ranks whose nodes have different files: they report it and stop, or train alike all the same."""

import contextlib
import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lit_models.training.hyperparameters import plain_values
from lit_models.training.run import Run, RunFolder
from tests.conftest import TOY
from tests.distributed.launch import in_world, unisono_here
from tests.toy import LitToy, ToyData, fit, toy_trainer
from tests.training.test_predictions import predict

pytestmark = pytest.mark.slow


def rank() -> int:
    return int(os.environ["RANK"])


def of_config(folder: Path, rates: tuple[str, str] = ("0.01", "0.02")) -> int:
    """Train by a command whose config has another rate on each rank."""
    path = folder / str(rank()) / "toy.yaml"
    path.parent.mkdir()
    path.write_text(TOY.replace("lr: 0.01", f"lr: {rates[rank()]}"))
    run = (f"--trainer.default_root_dir={folder / 'run'}", "--trainer.logger=false")
    return unisono_here("fit", f"--config={path}", "--trainer.devices=2", *run)


def of_version(folder: Path) -> int:
    with mock.patch.object(torch, "__version__", f"2.13.{rank()}"):
        return of_config(folder, ("0.01", "0.01"))


def of_strategy(folder: Path) -> int:
    """Train where each rank's memory has led to another strategy."""
    chosen = ("ddp", "fsdp")[rank()], ""
    with mock.patch("lit_models.cli.choose_strategy", return_value=chosen):
        return of_config(folder, ("0.01", "0.01"))


def of_choice(folder: Path) -> None:
    choice = Run("here", f"{rank()}.ckpt", "a line for the user")
    options: Any = {"callbacks": [RunFolder(choice)], "devices": 2, "strategy": "ddp"}
    toy_trainer(folder, **options).fit(LitToy(), ToyData())


def of_data(folder: Path) -> None:
    fit(folder, data=ToyData(num_samples=50 + rank()), devices=2, strategy="ddp")


def of_checkpoint(folder: Path) -> None:
    os.chdir(folder / str(rank()))
    trainer = toy_trainer(Path(), devices=2, strategy="ddp")
    trainer.fit(LitToy(), ToyData(), ckpt_path="checkpoints/last.ckpt", weights_only=True)


def of_parts(folder: Path) -> None:
    """Predict where the second rank cannot yet see files of an earlier prediction."""
    late: Any = mock.patch.object(Path, "glob", return_value=[])
    with late if rank() else contextlib.nullcontext():
        predict(folder, devices=2, strategy="ddp")


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (of_config, "different runs: rank 0"),
        (of_version, "different runs: rank 0"),
        (of_strategy, "different runs: rank 0"),
        (of_choice, "different runs: rank 0 here, from 0.ckpt, .*rank 1 here, from 1.ckpt"),
        (of_data, "different data: rank 0 train 50 samples.*rank 1 train 51 samples"),
    ],
)
def test_ranks_that_differ_end_before_their_first_step(tmp_path, of, words):
    printed = in_world(2, of, tmp_path, status=1)
    assert re.search(f"the ranks have {words}", printed), printed
    assert not list(tmp_path.rglob("*.jsonl"))


def test_another_checkpoint_on_one_rank_ends_all(tmp_path):
    for number, steps in enumerate((4, 6)):
        fit(tmp_path / str(number), max_steps=steps)
    printed = in_world(2, of_checkpoint, tmp_path, status=1)
    assert "different checkpoints: rank 0 checkpoints/last.ckpt of step 4" in printed


def test_a_prediction_goes_on_though_a_rank_does_not_see_yet_what_was_written(tmp_path):
    predict(tmp_path, output="whole.csv")
    predict(tmp_path, cut_after=3)
    in_world(2, of_parts, tmp_path)
    assert (tmp_path / "out.csv").read_text() == (tmp_path / "whole.csv").read_text()


def test_a_set_among_hyperparameters_has_one_order_in_every_interpreter():
    names = {f"layer-{number:02}" for number in range(20)}
    assert plain_values({"names": names})["names"] == sorted(names)
