"""A consistency lens on one device and on two: stores and resumed runs."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from datamodules import ActivationDumpDataModule
from datamodules.activations.store import ActivationStore
from datamodules.core.planned import LoaderOptions
from lit_models import LitSubject
from lit_models.run_files import read_checkpoint
from lit_models.training.optim import AVERAGED
from lit_models.training.predictions import PredictionWriter
from lit_models.training.strategies import ReplicatedStrategy
from tests.distributed.jobs import run_jobs
from tests.distributed.launch import in_world
from tests.distributed.lens_family import JOINT_START, LENS_SUBJECT, lens_documents, story_files
from tests.distributed.test_sharding import last
from tests.toy import assert_same_samples, callbacks_with, ledger_lines, toy_trainer
from tests.training.test_predictions import Cut, CutAfter

pytestmark = pytest.mark.slow
Job = dict[str, Any]
PLACES = {"before": JOINT_START - 1, "at": JOINT_START, "after": JOINT_START + 1}


def dump(folder: Path, *names: str, until: int = 10_000) -> None:
    """Write stores into folders of their names, each up to a given batch."""
    for name in names:
        store = folder / name / "store"
        batches = {"global_batch_size": 1, "loader": LoaderOptions(num_workers=0)}
        documents = lens_documents(folder / name, min_position=1)
        data = ActivationDumpDataModule(str(store), **documents, **batches)
        writer = PredictionWriter()
        writer.part_batches = 4
        callbacks = callbacks_with(writer, CutAfter(until))
        devices = int(os.environ.get("WORLD_SIZE", "1"))
        strategy = ReplicatedStrategy() if devices > 1 else "auto"
        options = {"devices": devices, "strategy": strategy, "callbacks": callbacks}
        trainer = toy_trainer(folder / name, precision=32, **options)
        trainer.predict(LitSubject(LENS_SUBJECT), data, return_predictions=False)


def fit(name: str, strategy: str = "auto", **more: Any) -> Job:
    data = {"global_batch_size": 16, "micro_batch_size": 4}
    return {
        **{"name": name, "family": "consistency_lens", "strategy": strategy},
        **{"data": data, "decay": 0.9, "stages": (), **more},
    }


def half(name: str, steps: int, strategy: str = "auto") -> Job:
    return fit(name, strategy, trainer={"max_steps": steps}, last={"every_n_steps": steps})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs: on one device, on two, and on one with the results of two."""
    folder = tmp_path_factory.mktemp("lens")
    story_files(folder)
    in_world(1, run_jobs, folder, [fit("one"), half("one until", JOINT_START)])
    dump(folder, "dump one")
    with pytest.raises(Cut):
        dump(folder, "cut", until=30)
    assert len(list((folder / "cut").glob(".store.*.parts/part-*.npz"))) == 7  # after four batches
    with pytest.raises(FileNotFoundError, match="holds no schema.json"):
        ActivationStore(folder / "cut" / "store")
    in_world(2, dump, folder, "dump two", "cut")
    two = [
        *(half(f"two until {place}", steps, "ddp") for place, steps in PLACES.items()),
        fit("one, then two", "ddp", resume=str(last(folder / "one until"))),
    ]
    in_world(2, run_jobs, folder, two)
    resumed = [
        fit(f"two, then one {p}", resume=str(last(folder / f"two until {p}"))) for p in PLACES
    ]
    in_world(1, run_jobs, folder, resumed)
    return folder


@pytest.mark.parametrize("name", ["dump two", "cut"])
def test_two_devices_dump_what_one_does_byte_for_byte(runs, name):
    one, other = runs / "dump one" / "store", runs / name / "store"
    names = sorted(path.name for path in one.iterdir())
    assert "train.activations.npy" in names
    assert sorted(path.name for path in other.iterdir()) == names
    for name in names:
        assert (other / name).read_bytes() == (one / name).read_bytes(), name


@pytest.mark.parametrize("name", ["one, then two", *(f"two, then one {p}" for p in PLACES)])
def test_a_resumed_run_is_the_uninterrupted_one(runs, name):
    whole, found = read_checkpoint(last(runs / "one")), read_checkpoint(last(runs / name))
    for key in ("state_dict", AVERAGED):
        assert found[key].keys() == whole[key].keys()
        torch.testing.assert_close(found[key], whole[key], rtol=1e-8, atol=1e-10)
    resumed = ledger_lines(runs / name)
    assert_same_samples(ledger_lines(runs / "one")[-len(resumed) :], resumed)


def test_the_reference_is_the_networks_of_the_step_at_which_it_is_kept(runs):
    then = read_checkpoint(last(runs / "one until"))["state_dict"]
    now = read_checkpoint(last(runs / "one"))["state_dict"]
    kept = {n: v for n, v in now.items() if n.startswith("lens.reference.")}
    assert kept
    for name, value in kept.items():
        assert torch.equal(value, then[name.replace(".reference.", ".")]), name
