"""The loader and the datamodule without a trainer: workers, facts, batches in other processes."""

import math
import multiprocessing
import os
from itertools import count

import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.states import RunningStage

from datamodules.core.loader import LoaderOptions, auto_workers, collated, made_together
from datamodules.core.plan import MicroBatch, PlanOptions
from tests.toy import LitToy, ToyData, ToySequences, toy_trainer


def test_auto_workers_share_the_cpus_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert auto_workers(4, on_cpu=False) == 6
    assert auto_workers(1, on_cpu=False) == 16
    assert auto_workers(1, on_cpu=True) == 0
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # SLURM speaks of one task, one process
    assert auto_workers(4, on_cpu=False) == 3


def test_wrong_loader_options_are_refused():
    with pytest.raises(ValueError, match="num_workers must be 0 or more, got -1"):
        LoaderOptions(num_workers=-1)
    with pytest.raises(ValueError, match="prefetch_factor must be at least 1, got 0"):
        LoaderOptions(prefetch_factor=0)


def test_a_collate_that_returns_a_key_of_the_plan_is_refused():
    class Loaded(ToySequences):
        def collate(self, examples):
            return {"values": torch.ones(len(examples)), "load": 1.0, "weight": 2.0}

    words = (
        'collate of Loaded returns "load", "weight": the plan fills in load, num_targets, '
        "sample_id, step_denominators, step_index, weight itself, and a dataset must not; "
        "rename its key"
    )
    with pytest.raises(ValueError, match=words):
        collated(Loaded(3, seed=0), MicroBatch(0, 0, np.arange(2), np.ones(2, np.float32), {}))


def test_workers_change_nothing_in_any_epoch():
    epochs = []
    for num_workers in (0, 2):
        data = ToyData(num_workers=num_workers)
        data.setup("fit")
        loader = data.train_dataloader()
        epochs.append([list(loader), list(loader)])
        assert len(loader) == len(epochs[-1][0]) == 7
    for left, right in zip(*epochs, strict=True):
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a["sample_id"], b["sample_id"])
            assert torch.equal(a["values"], b["values"])
            assert a["step_denominators"] == b["step_denominators"]


def test_batches_that_are_made_together_come_one_by_one_and_unchanged(monkeypatch):
    batches = {}
    for number in (1, 3, 8, 50):
        monkeypatch.setattr("datamodules.core.planned.TOGETHER", number)
        data = ToyData()
        data.setup("fit")
        loader = data.train_dataloader()
        assert loader.at_a_time == number
        batches[number] = [batch["sample_id"].tolist() for _ in range(2) for batch in loader]
    assert len(batches[1]) == 14
    assert all(found == batches[1] for found in batches.values())


def test_a_batch_that_cannot_be_made_fails_in_its_turn():
    made = []

    def batches():
        for number in range(9):
            if number == 6:
                raise RuntimeError("sample 17 is damaged")
            made.append(number)
            yield {"number": number}

    found = []

    def take(batch):
        found.append((batch["number"], len(made)))

    with pytest.raises(RuntimeError, match="sample 17 is damaged"):
        list(map(take, made_together(batches(), 4)))
    assert found == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 6), (5, 6)]
    assert [len(list(made_together(iter([{}] * n), 4))) for n in range(9)] == list(range(9))


@pytest.mark.parametrize(
    ("mebibytes", "needed", "expected"),
    [
        (0, 100, [8] * 8 + [16] * 8),
        (0, 2, [2, 2, 3, 4]),  # the trainer asks for no more than two
        (0, 10, [8] * 8 + [10, 10, 11]),
        (0, 0, [1, 2, 3]),
        (30, 100, [3, 3, 3, 6, 6, 6]),  # more than 64 MiB with the third
        (65, 100, [1, 2, 3]),
    ],
)
def test_no_more_batches_stand_ready_than_are_needed_and_memory_holds(mebibytes, needed, expected):
    made = []
    values = np.empty(mebibytes << 20, np.uint8)  # never written: takes no memory
    batches = (made.append(n) or {"n": n, "of": {"values": values}} for n in count())
    dealt = made_together(batches, 8, needed)
    assert [len(made) for _, _ in zip(expected, dealt, strict=False)] == expected


def test_no_more_batches_stand_ready_than_are_made_in_a_moment(monkeypatch):
    seconds, made = [0.0], []

    def slow():
        for n in count():
            seconds[0] += 0.04
            made.append(n)
            yield {"n": n}

    monkeypatch.setattr("datamodules.core.loader.perf_counter", lambda: seconds[0])
    found = [len(made) for _, _ in zip(range(6), made_together(slow(), 8), strict=False)]
    assert found == [3, 3, 3, 6, 6, 6]  # a tenth of a second is over with the third
    monkeypatch.setattr("datamodules.core.loader.TOGETHER_S", 0.0)
    made.clear()
    assert [len(made) for _, _ in zip(range(3), made_together(slow(), 8), strict=False)] == [
        1,
        2,
        3,
    ]


def test_a_loader_knows_how_many_batches_the_trainer_asks_for(tmp_path):
    trainer = toy_trainer(tmp_path, max_steps=3, limit_val_batches=2, num_sanity_val_steps=1)
    data = ToyData(global_batch_size=8, micro_batch_size=4)
    trainer.fit(LitToy(), data)
    limits = data._limits
    assert limits.needed("validation") == 2 * 2  # of two micro-batches each
    assert limits.needed("train") == 0
    trainer.fit_loop.epoch_loop.max_steps = 5
    assert limits.needed("train") == (5 - 3) * 2
    trainer.state.stage = RunningStage.SANITY_CHECKING
    assert limits.needed("validation") == 1
    assert limits.needed("predict") == math.inf


def test_a_gpu_or_a_worker_makes_one_batch_after_the_other(monkeypatch):
    data = ToyData(num_workers=1)
    data.setup("fit")
    assert data.train_dataloader().at_a_time == 1
    data = ToyData(num_workers=0)
    data.setup("fit")
    monkeypatch.setattr(ToyData, "_on_cpu", False)
    assert data.train_dataloader().at_a_time == 1


def test_the_facts_of_the_plan_are_what_the_batches_show():
    data = ToyData(num_samples=50, global_batch_size=8)
    data.setup("fit")
    facts = data.plan_facts
    assert (facts.num_samples, facts.steps_per_epoch, facts.num_replicas) == (50, 7, 1)
    batches = list(data.train_dataloader())
    used = sum(int(batch["mask"].sum()) for batch in batches)
    padded = sum(batch["mask"].numel() for batch in batches)
    assert facts.padding_share == pytest.approx(1 - used / padded)
    assert (facts.samples_per_epoch, facts.planned_steps) == (50, 7)


def test_a_batch_knows_how_many_targets_it_has_without_its_fillers():
    data = ToyData(num_samples=7, global_batch_size=4, micro_batch_size=3)
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert any((batch["weight"] == 0).any() for batch in batches)
    for batch in batches:
        is_used = batch["weight"] > 0
        counts = {"sum": is_used.sum(), "values": batch["mask"][is_used].sum()}
        assert batch["num_targets"] == counts
    assert sum(batch["num_targets"]["sum"] for batch in batches) == 7


def test_the_seed_comes_from_the_options_or_from_seed_everything(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "77")
    assert ToyData(plan=PlanOptions()).seed == 77
    assert ToyData(plan=PlanOptions(seed=5)).seed == 5


@pytest.mark.parametrize("is_kept", [True, False])
def test_persistent_workers_stay_from_one_epoch_to_the_next(is_kept):
    data = ToyData(num_samples=8, num_workers=1)
    data.loader_options = LoaderOptions(num_workers=1, persistent_workers=is_kept)
    data.setup("fit")
    loader, seen = data.train_dataloader(), []
    for _ in range(2):
        assert len(list(loader)) == 1
        seen.append({child.pid for child in multiprocessing.active_children()})
    assert (seen[0] == seen[1] != set()) == is_kept
