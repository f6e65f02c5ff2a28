"""Throughput: intervals of whole steps, known sleeps in their column, no effect on the run."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lit_models.run_files import json_lines, read_checkpoint
from lit_models.training import Throughput, default_callbacks
from lit_models.training.run import AppendingCSVLogger
from lit_models.training.sharding import is_compiled
from lit_models.training.throughput import peak_of
from tests.toy import LitToy, ToyData, ToySequences, csv_rows, toy_trainer

NAP_S = 0.06


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return json_lines(folder / "throughput.jsonl")


def run(folder: Path, **options: Any) -> None:
    """Train three epochs of two steps, with a validation after each."""
    settings = {"max_epochs": 3, "log_every_n_steps": 2, "num_sanity_val_steps": 0}
    toy_trainer(folder, **{**settings, **options}).fit(LitToy(), ToyData(num_samples=16))


def test_intervals_hold_whole_steps_and_what_they_learned_from_and_a_trial_has_none(tmp_path):
    run(tmp_path)
    lines = lines_of(tmp_path)
    assert [(line["step"], line["steps"]) for line in lines] == [(2, 2), (4, 2), (6, 2)]
    tokens = int(ToySequences(16, 0).lengths.sum())  # of an epoch, here one interval
    for line in lines:
        assert line["seconds"] == pytest.approx(sum(line["split"].values()), abs=1e-5)
        assert line["samples_per_s"] * line["seconds"] == pytest.approx(16, abs=1e-2)
        assert line["tokens_per_s"] * line["seconds"] == pytest.approx(tokens, abs=1e-2)
        assert line["attempt"] == 1
        assert "mfu" not in line
    run(tmp_path / "trial", fast_dev_run=True)
    assert not (tmp_path / "trial" / "throughput.jsonl").exists()


@pytest.mark.parametrize(
    ("place", "slow", "slept"),
    [
        ("data", (ToySequences, "collate"), [2, 2, 2]),
        ("steps", (LitToy, "training_step"), [2, 2, 2]),
        ("evaluation", (LitToy, "validation_step"), [0, 3, 3]),
    ],
)
def test_a_sleep_lands_in_its_column(tmp_path, place, slow, slept, monkeypatch):
    now = [0.0]  # a clock that only sleeps advance, so that a busy machine changes nothing
    quick = getattr(*slow)

    def sleepy(*given):
        now[0] += NAP_S
        return quick(*given)

    monkeypatch.setattr(*slow, sleepy)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run(tmp_path)
    # An evaluation follows its interval's steps, so it counts for the next interval.
    found = [line["split"][place] for line in lines_of(tmp_path)]
    assert found == pytest.approx([times * NAP_S for times in slept], abs=1e-6)


def test_padding_is_the_share_of_positions_that_hold_no_token(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=1, log_every_n_steps=1, limit_val_batches=0)
    seen = []
    module = LitToy()
    module.on_train_batch_start = lambda batch, _: seen.append(batch["mask"])
    trainer.fit(module, ToyData(global_batch_size=8, micro_batch_size=3))
    tokens, positions = sum(int(m.sum()) for m in seen), sum(m.numel() for m in seen)
    (line,) = lines_of(tmp_path)
    assert len(seen) == 3
    # A filler of weight 0 completes the third micro-batch; it has a mask, but does not count.
    assert line["padding_share"] >= 1 - tokens / positions
    assert line["samples_per_s"] * line["seconds"] == pytest.approx(8, abs=1e-3)


@pytest.mark.parametrize("peak_flops", [None, 1e12])
def test_the_run_has_the_same_bits_with_and_without_it(tmp_path, peak_flops):
    without = [c for c in default_callbacks() if not isinstance(c, Throughput)]
    with_it = [without[0], Throughput(peak_flops), *without[1:]]
    states, weights = [], []
    for name, callbacks in (("without", without), ("with", with_it)):
        torch.manual_seed(0)
        trainer = toy_trainer(tmp_path / name, callbacks=callbacks, log_every_n_steps=3)
        trainer.fit(LitToy(dropout=0.2), ToyData(micro_batch_size=3))
        states.append(torch.get_rng_state())
        last = tmp_path / name / "checkpoints" / "last.ckpt"
        weights.append(read_checkpoint(last)["state_dict"])
    assert torch.equal(*states)
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=0)
    assert all(("mfu" in line) == bool(peak_flops) for line in lines_of(tmp_path / "with"))


def test_a_resumed_run_goes_on_in_the_file_and_cuts_a_torn_line(tmp_path):
    run(tmp_path)
    path = tmp_path / "throughput.jsonl"
    before = path.read_text()
    path.write_text(before + '{"attempt": 1, "st')
    trainer = toy_trainer(tmp_path, max_epochs=5, log_every_n_steps=2)
    trainer.fit(LitToy(), ToyData(num_samples=16), ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    assert path.read_text().startswith(before)
    lines = lines_of(tmp_path)
    assert [(x["attempt"], x["step"], x["steps"]) for x in lines[3:]] == [(2, 8, 2), (2, 10, 2)]


def test_loggers_get_the_same_numbers(tmp_path):
    run(tmp_path, logger=AppendingCSVLogger(str(tmp_path)))
    found = [row for row in csv_rows(tmp_path / "metrics.csv") if row["throughput/seconds"]]
    for row, line in zip(found, lines_of(tmp_path), strict=True):
        assert int(row["step"]) == line["step"]
        assert float(row["throughput/data_seconds"]) == line["split"]["data"]
        assert float(row["throughput/tokens_per_s"]) == line["tokens_per_s"]


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", "bf16-mixed", 989.4e12),
        ("NVIDIA H200 NVL", "16-true", 835.5e12),
        ("NVIDIA A100-SXM4-80GB", "bf16-true", 312e12),
        ("NVIDIA A10G", "bf16-mixed", None),
        ("NVIDIA H200", "32-true", None),
        ("NVIDIA H200 MIG 1g.18gb", "bf16-mixed", None),
    ],
)
def test_peaks_are_those_of_the_precision(name, precision, peak):
    assert peak_of(name, precision) == peak


def test_every_way_to_compile_is_seen():
    plain, inside = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(plain)
    inside[0].compile(backend="eager")
    assert is_compiled(inside)
    assert is_compiled(nn.Sequential(torch.compile(plain, backend="eager")))
