"""Copies of the data: each process maps the one file of a store, and none takes its content along.

Counted in bytes: whatever a dataset holds besides mapped files is as large with long texts as with
short ones, and so is what a worker gets that is started anew.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from datamodules import ActivationDataModule
from datamodules.core.planned import PlannedDataset
from lit_models.causal_lm.network import DecoderConfig
from lit_models.consistency_lens.subject import SubjectOptions
from tests.activation_dumps import dumped, stories
from tests.data import data_of_texts as of
from tests.process_memory import SMAPS, mappings, private_bytes, read_elsewhere

NUMBER, SHORT, LONG = 200, 20, 160  # samples, words of each
MOST_TAKEN = 0.02  # of what the files grow by


def texts(size: int, number: int = NUMBER) -> list[str]:
    """Return different texts of as many words."""
    places = range(size)
    return [
        " ".join(f"{(n * 7919 + place * 104729) % 9973:04d}" for place in places)
        for n in range(number)
    ]


def text(folder: Path, size: int, layout: Any) -> Any:
    return of.text(folder, texts(size), layout=layout, context_length=1024)


def occupation(folder: Path, size: int) -> Any:
    return of.occupation(folder, texts(size // 8, 1000))


def retrieval(folder: Path, size: int) -> Any:
    return of.retrieval(folder, texts(size))


def lens(folder: Path, size: int) -> Any:
    shape = DecoderConfig(max_positions=16, hidden_size=4 * size, num_layers=1, num_heads=2)
    subject = SubjectOptions(layer=0, network=shape)
    dumped(folder / "store", stories(folder, 60), subject)
    return ActivationDataModule(str(folder / "store"), global_batch_size=8)


STORES: dict[str, Callable[[Path, int], Any]] = {
    "blocks": lambda folder, size: text(folder, size, "blocks"),
    "packed": lambda folder, size: text(folder, size, "packed"),
    "occupation": occupation,
    "retrieval": retrieval,
    "lens": lens,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNISONO_CACHE", str(tmp_path / "cache"))


def made(name: str, folder: Path, size: int) -> PlannedDataset:
    """Return a dataset all of which has been read."""
    folder.mkdir()
    data = STORES[name](folder, size)
    data.prepare_data()
    data.setup("fit")
    dataset = data.datasets["train"]
    for number in range(len(dataset.lengths)):
        dataset.batch(np.array([number]), 0)
    return dataset


def content_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder that grow with the texts."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", STORES)
def test_longer_texts_or_activations_take_no_more_of_a_process(name: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    held, taken, files = [], [], []
    for size in (SHORT, LONG):
        dataset = made(name, tmp_path / str(size), size)
        held.append(private_bytes(dataset))
        taken.append(len(pickle.dumps(dataset)))  # what a worker gets that is not forked
        files.append(content_bytes(tmp_path / str(size)))
    growth = files[1] - files[0]
    assert growth > 50_000
    assert held[1] - held[0] < MOST_TAKEN * growth
    assert taken[1] - taken[0] < MOST_TAKEN * growth


def test_a_worker_that_is_no_fork_maps_the_activations_itself(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    dataset = made("lens", tmp_path / "files", SHORT)
    arrived = pickle.loads(pickle.dumps(dataset))
    assert isinstance(arrived.activations.base, np.memmap)
    found = arrived.batch(np.array([3, 1]), 0)
    for name, value in dataset.batch(np.array([3, 1]), 0).items():
        assert torch.equal(found[name], value), name


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells which pages are shared")
@pytest.mark.parametrize("name", ["blocks", "occupation", "lens"])
def test_two_processes_hold_one_copy_of_a_store(name: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    dataset = made(name, tmp_path / "files", LONG)
    paths = list(mappings(tmp_path))
    with read_elsewhere(paths) as reader:
        held = mappings(tmp_path)
        reader.stdin.close()
    resident = sum(kinds["Rss"] for kinds in held.values())
    assert 1024 * resident > 50_000
    assert sum(kinds["Private_Dirty"] + kinds["Private_Clean"] for kinds in held.values()) == 0
    assert sum(kinds["Shared_Clean"] + kinds["Shared_Dirty"] for kinds in held.values()) == resident
    del dataset
