"""Memory of the data: all processes map a store's one file, and none copies its content.

The tests count bytes: what a dataset holds besides mapped files does not grow with the length of
texts, and neither does the pickle for a worker that is not forked.
"""

import mmap
import pickle
import re
from collections.abc import Callable, Iterator
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

pytestmark = pytest.mark.usefixtures("own_cache")

NUMBER, SHORT, LONG = 200, 20, 160  # samples; words of each
ROOMY = {"context_length": 1024}
MOST_TAKEN = 0.02  # of the growth of the files


def texts(size: int, number: int = NUMBER) -> list[str]:
    """Return different texts of so many words."""
    places = range(size)
    return [
        " ".join(f"{(n * 7919 + place * 104729) % 9973:04d}" for place in places)
        for n in range(number)
    ]


def lens(folder: Path, size: int) -> Any:
    shape = DecoderConfig(max_positions=16, hidden_size=4 * size, num_layers=1, num_heads=2)
    dumped(folder / "store", stories(folder, 60), SubjectOptions(layer=0, network=shape))
    return ActivationDataModule(str(folder / "store"), global_batch_size=8)


STORES: dict[str, Callable[[Path, int], Any]] = {
    "blocks": lambda folder, size: of.text(folder, texts(size), layout="blocks", **ROOMY),
    "packed": lambda folder, size: of.text(folder, texts(size), layout="packed", **ROOMY),
    "occupation": lambda folder, size: of.occupation(folder, texts(size // 8, 1000)),
    "retrieval": lambda folder, size: of.retrieval(folder, texts(size)),
    "lens": lens,
}


def made(name: str, folder: Path, size: int) -> PlannedDataset:
    """Return a dataset after reading all of it."""
    folder.mkdir()
    data = STORES[name](folder, size)
    data.prepare_data()
    data.setup("fit")
    dataset = data.datasets["train"]
    for number in range(len(dataset.lengths)):
        dataset.batch(np.array([number]), 0)
    return dataset


def buffers(thing: Any) -> Iterator[tuple[int, int, bool]]:
    """Yield address, bytes and whether a file is mapped there, for all memory of an object."""
    seen, left = set(), [thing]
    while left:
        part = left.pop()
        if id(part) in seen or isinstance(part, type | re.Pattern):
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            yield part.data_ptr(), part.nbytes, False
        elif isinstance(part, np.ndarray):
            base: Any = part
            while isinstance(base, np.ndarray) and base.base is not None:
                base = base.base
            yield part.__array_interface__["data"][0], part.nbytes, isinstance(base, mmap.mmap)
        elif isinstance(part, str | bytes | bytearray):
            yield id(part), len(part), False
        elif isinstance(part, dict):
            left += [*part.keys(), *part.values()]
        elif isinstance(part, list | tuple | set | frozenset):
            left += part
        elif type(part).__module__.startswith("datamodules"):
            left.append(vars(part))


def private_bytes(dataset: PlannedDataset) -> int:
    """Return the bytes of an object outside mapped files, each memory once."""
    sizes: dict[int, int] = {}
    for address, size, is_mapped in buffers(dataset):
        if not is_mapped:
            sizes[address] = max(size, sizes.get(address, 0))
    return sum(sizes.values())


@pytest.mark.parametrize("name", STORES)
def test_longer_texts_or_activations_take_no_more_of_a_process(name: str, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    held, taken, files = [], [], []
    for size in (SHORT, LONG):
        dataset = made(name, tmp_path / str(size), size)
        held.append(private_bytes(dataset))
        taken.append(len(pickle.dumps(dataset)))  # as passed to a worker that is not forked
        paths = (path for path in (tmp_path / str(size)).rglob("*") if path.is_file())
        files.append(sum(path.stat().st_size for path in paths))  # the files grow with the texts
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
