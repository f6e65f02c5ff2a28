"""Throughput: every moment in one column, known sleeps in theirs, and no trace on the run."""

import json
import time

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from lit_models.training.callbacks import Ledger, Throughput, default_callbacks
from lit_models.training.checkpoints import read_checkpoint
from lit_models.training.loggers import AppendingCSVLogger
from lit_models.training.throughput.clock import PHASES
from tests.toy import LitToy, ToyData, ToySequences, toy_trainer
from tests.training.throughput_runs import NAP_S, run, seconds_in, throughput_lines

STEPS = 6


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return folder, run(folder).seconds


def test_the_columns_sum_to_the_seconds_and_these_to_the_wall_clock(plain):
    folder, wall = plain
    lines = throughput_lines(folder)
    for line in lines:
        assert list(line["split"]) == list(PHASES)
        assert line["seconds"] == pytest.approx(sum(line["split"].values()), abs=1e-9)
    # The watch starts a callback earlier and ends a callback earlier.
    assert sum(line["seconds"] for line in lines) == pytest.approx(wall, abs=0.05)
    assert seconds_in(folder, "other") < 0.15 * wall


def test_intervals_hold_whole_steps_and_what_they_learned_from(plain):
    lines = throughput_lines(plain[0])
    assert [(line["step"], line["steps"]) for line in lines] == [(2, 2), (4, 2), (6, 2)]
    tokens = int(ToySequences(16, 0).lengths.sum())  # of an epoch, which is an interval here
    for line in lines:
        assert line["samples_per_s"] * line["seconds"] == pytest.approx(16, abs=1e-2)
        assert line["tokens_per_s"] * line["seconds"] == pytest.approx(tokens, abs=1e-2)
        assert line["ranks"]["seconds"][0] <= line["seconds"] / 2
        assert (line["attempt"], line["slowest_rank"], line["mfu"]) == (1, None, None)
        assert line["machine"]["disk_free_bytes"] > 0


@pytest.mark.parametrize(
    ("place", "times"),
    [
        ("data", 2),
        ("other", 2),  # a hook before the step
        ("forward", 2),
        ("backward", 2),
        ("optimizer", 2),
        ("logging", 2),
        ("checkpoint", 3),  # the best, the last by the epoch and the last by its steps
        ("evaluation", 3),  # 21 samples are three batches
    ],
)
def test_a_sleep_lands_in_its_column(tmp_path, place, times, monkeypatch):
    now = [0.0]  # of a clock that only sleeps move: a busy machine hides none, and adds none

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    run(tmp_path, place)
    for line in throughput_lines(tmp_path):
        slept = dict.fromkeys(PHASES, 0.0) | {place: times * NAP_S}  # an interval has two steps
        assert line["split"] == pytest.approx(slept, abs=1e-9)


def test_padding_is_the_share_of_positions_that_hold_no_token(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=1, log_every_n_steps=1, limit_val_batches=0)
    seen = []
    module = LitToy()
    module.on_train_batch_start = lambda batch, _: seen.append(batch["mask"])
    trainer.fit(module, ToyData(global_batch_size=8, micro_batch_size=3))
    tokens, positions = sum(int(m.sum()) for m in seen), sum(m.numel() for m in seen)
    (line,) = throughput_lines(tmp_path)
    assert len(seen) == 3
    # A filler of weight 0 completes the third micro-batch: its mask is set, but it counts nothing.
    assert line["padding_share"] >= 1 - tokens / positions
    assert line["samples_per_s"] * line["seconds"] == pytest.approx(8, abs=1e-3)


def weights(folder):
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


@pytest.mark.parametrize("measures", [False, True])
def test_the_run_has_the_same_bits_with_and_without_it(tmp_path, measures):
    without = [c for c in default_callbacks() if not isinstance(c, Throughput)]
    with_it = [without[0], Throughput(measures_ceiling=measures), *without[1:]]
    states = []
    for name, callbacks in (("without", without), ("with", with_it)):
        torch.manual_seed(0)
        trainer = toy_trainer(tmp_path / name, callbacks=callbacks, log_every_n_steps=3)
        trainer.fit(LitToy(dropout=0.2), ToyData(micro_batch_size=3))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    expected = weights(tmp_path / "without")
    for name, value in weights(tmp_path / "with").items():
        assert torch.equal(value, expected[name])
    assert not (tmp_path / "without" / "throughput.jsonl").exists()


def test_a_resumed_run_goes_on_in_the_file_and_cuts_a_torn_line(tmp_path):
    run(tmp_path)
    path = tmp_path / "throughput.jsonl"
    before = path.read_text()
    path.write_text(before + '{"attempt": 1, "st')
    trainer = toy_trainer(tmp_path, max_epochs=5, log_every_n_steps=2)
    last = tmp_path / "checkpoints" / "last.ckpt"
    trainer.fit(LitToy(), ToyData(num_samples=16), ckpt_path=last)
    assert path.read_text().startswith(before)
    lines = throughput_lines(tmp_path)
    assert [(x["attempt"], x["step"], x["steps"]) for x in lines[3:]] == [(2, 8, 2), (2, 10, 2)]


def test_loggers_get_the_same_numbers(tmp_path):
    logger = AppendingCSVLogger(str(tmp_path))
    run(tmp_path, logger=logger)
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    columns = header.split(",")
    found = [dict(zip(columns, row.split(","), strict=True)) for row in rows]
    found = [row for row in found if row["throughput/seconds"]]
    for row, line in zip(found, throughput_lines(tmp_path), strict=True):
        assert int(row["step"]) == line["step"]
        assert float(row["throughput/split/data"]) == line["split"]["data"]
        assert float(row["throughput/tokens_per_s"]) == line["tokens_per_s"]
        assert float(row["throughput/ranks/seconds/0"]) == line["ranks"]["seconds"][0]


def test_rows_of_steps_that_a_checkpoint_holds_are_kept_on_resume(tmp_path):
    logger = AppendingCSVLogger(str(tmp_path))
    for step in (2, 4, 6):
        logger.log_metrics({"throughput/seconds": 0.5}, step)
    AppendingCSVLogger(str(tmp_path), resumed_step=4).log_metrics({"train/loss": 1.0}, 5)
    rows = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert [row.split(",")[0] for row in rows] == ["2", "4", "5"]


def test_a_profiler_of_the_user_goes_on_beside_it_and_is_given_back(tmp_path):
    profiler = SimpleProfiler()
    run(tmp_path, profiler=profiler)
    assert len(profiler.recorded_durations["run_training_batch"]) == STEPS
    assert seconds_in(tmp_path, "forward") > 0


def test_a_trial_run_writes_nothing(tmp_path):
    trainer = toy_trainer(tmp_path, fast_dev_run=True)
    trainer.fit(LitToy(), ToyData())
    assert not (tmp_path / "throughput.jsonl").exists()


def test_the_ledger_comes_before_it():
    kinds = [type(callback) for callback in default_callbacks()]
    assert kinds.index(Ledger) < kinds.index(Throughput)


def test_a_run_that_fails_leaves_whole_lines_and_the_profiler(tmp_path):
    trainer = toy_trainer(tmp_path, log_every_n_steps=2, profiler=SimpleProfiler())
    module = LitToy()

    def fail(optimizer):
        if trainer.global_step == 5:
            raise LookupError("planted")

    module.on_before_optimizer_step = fail
    with pytest.raises(LookupError, match="planted"):
        trainer.fit(module, ToyData())
    steps = [line["step"] for line in throughput_lines(tmp_path)]
    assert steps == [2, 4]
    assert type(trainer.profiler) is SimpleProfiler
    assert json.loads((tmp_path / "throughput.jsonl").read_text().splitlines()[0])["steps"] == 2
