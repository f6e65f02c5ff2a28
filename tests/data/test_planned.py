"""Loader and datamodule without a trainer: workers, facts, batches from other processes."""

import multiprocessing
import os

import numpy as np
import pytest
import torch

from datamodules.core.plan import MicroBatch, PlanOptions
from datamodules.core.planned import auto_workers
from tests.toy import ToyData, ToySequences, toy_trainer


def test_auto_workers_share_the_cpus_of_this_process(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(24)))
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert auto_workers(4, on_cpu=False) == 6
    assert auto_workers(1, on_cpu=False) == 16
    assert auto_workers(1, on_cpu=True) == 0
    assert auto_workers(24, on_cpu=False) == 2  # batches are never made in the training process
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")  # a SLURM task is one process
    assert auto_workers(4, on_cpu=False) == 3


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
        Loaded(3, seed=0).collated(MicroBatch(0, 0, np.arange(2), np.ones(2, np.float32), {}))


def test_workers_change_nothing_and_stay_from_one_epoch_to_the_next():
    epochs, processes = [], []
    for num_workers in (0, 2):
        data = ToyData(num_workers=num_workers)
        data.setup("fit")
        loader = data.train_dataloader()
        for _ in range(2):
            epochs.append(list(loader))
            assert len(loader) == len(epochs[-1]) == 7
            processes.append({child.pid for child in multiprocessing.active_children()})
        data.teardown("fit")  # else garbage collection waits five seconds for each worker
    assert processes[0] == processes[1] == set() != processes[2] == processes[3]
    for a, b in zip([*epochs[0], *epochs[1]], [*epochs[2], *epochs[3]], strict=True):
        assert torch.equal(a["sample_id"], b["sample_id"])
        assert torch.equal(a["values"], b["values"])
        assert a["step_denominators"] == b["step_denominators"]


def test_the_facts_of_the_plan():
    data = ToyData(num_samples=50, global_batch_size=8)
    with pytest.raises(RuntimeError, match=r'no data for validation yet: .* and setup\("fit"\)'):
        data.val_dataloader()
    data.setup("fit")
    facts = data.plan_facts
    assert [facts[n] for n in ("num_samples", "steps_per_epoch", "num_replicas")] == [50, 7, 1]
    assert (facts["samples_per_epoch"], facts["planned_steps"]) == (50, 7)


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


@pytest.mark.parametrize("own", [None, "7"])
@pytest.mark.parametrize("first", [None, "3"])
def test_every_rank_plans_with_the_seed_of_rank_0(tmp_path, monkeypatch, own, first):
    data, trainer = ToyData(plan=PlanOptions()), toy_trainer(tmp_path)
    data.trainer = trainer
    monkeypatch.setattr(trainer.strategy, "broadcast", lambda seed: first)
    monkeypatch.setenv("PL_GLOBAL_SEED", own or "")
    if own is None:
        monkeypatch.delenv("PL_GLOBAL_SEED")
    data.setup("fit")
    assert data.seed == int(first or 0)
