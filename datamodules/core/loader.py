"""Datasets with random access by sample id, and the loader of one replica's micro-batches."""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from datamodules.core.plan import MicroBatch

RESERVED = frozenset(
    {"sample_id", "weight", "step_index", "num_targets", "load", "step_denominators"}
)


class PlannedDataset(ABC):
    """One split with random access by sample id 0 … N - 1.

    Attributes:
        lengths: [N] integers, positions of each sample before augmentation.
        fingerprint: hex digest of the content that the plan depends on.
        target_counts: term -> [N] number of targets of each sample; `None` for one per sample.
        is_padded: whether samples of a micro-batch are padded to the longest of them.
    """

    lengths: np.ndarray
    fingerprint: str
    target_counts: dict[str, np.ndarray | None]
    is_padded: bool = True

    @abstractmethod
    def example(self, sample_id: int, epoch: int) -> Any:
        """Return one sample; randomness is keyed by (seed, epoch, sample id)."""

    def examples(self, sample_ids: np.ndarray, epoch: int) -> list[Any]:
        """Return `example` of several samples [B]."""
        return [self.example(i, epoch) for i in sample_ids.tolist()]

    @abstractmethod
    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return the padded batch without the keys of `PlannedBatch`."""

    def batch(self, sample_ids: np.ndarray, epoch: int) -> dict[str, Any]:
        """Return the padded batch of several samples [B]."""
        return self.collate(self.examples(sample_ids, epoch))

    def describe(self, sample_id: int, epoch: int) -> dict[str, str]:
        """Return what the network sees of a sample in an epoch, as name -> text for a reader."""
        return {"length": str(self.lengths[sample_id])}


class Sample(NamedTuple):
    """What `example` returns where `collate` reads all samples of a batch at once."""

    number: int
    epoch: int


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made ready.

    Args:
        num_workers: processes that prepare batches; `auto` is the CPUs that this process may use
            divided by the processes on this machine, at most 16, and 0 where training itself
            runs on those CPUs.
        prefetch_factor: batches that each worker keeps ready.
        persistent_workers: keep workers from one epoch to the next.
        pin_memory: hand batches over in page-locked memory, from which a GPU copies without
            waiting; `auto` is true with a GPU.
    """

    num_workers: int | Literal["auto"] = "auto"
    prefetch_factor: int = 4
    persistent_workers: bool = True
    pin_memory: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.num_workers != "auto" and self.num_workers < 0:
            raise ValueError(f"num_workers must be 0 or more, got {self.num_workers}.")
        if self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor must be at least 1, got {self.prefetch_factor}.")


def auto_workers(local_processes: int, on_cpu: bool) -> int:
    """Return how many loader processes `num_workers: auto` means for one training process, of
    `local_processes` on this machine; none where training itself computes on the CPUs."""
    if on_cpu:
        return 0
    cpus = int(os.environ.get("SLURM_CPUS_PER_TASK", 0)) * local_processes
    return min((cpus or usable_cpus()) // max(1, local_processes), 16)


def usable_cpus() -> int:
    """Return how many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not everywhere
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class _Collated(Dataset):
    """Fetches a whole micro-batch at once, in whichever process the DataLoader asks."""

    def __init__(self, dataset: PlannedDataset) -> None:
        self.dataset = dataset

    def __getitems__(self, batch: MicroBatch) -> dict[str, Any]:
        return collated(self.dataset, batch)


def collated(dataset: PlannedDataset, batch: MicroBatch) -> dict[str, Any]:
    """Return the tensors of one micro-batch with the keys of `PlannedBatch`.

    Raises:
        ValueError: the dataset's own `collate` returns one of those keys.
    """
    own = dataset.batch(batch.ids, batch.epoch)
    if not RESERVED.isdisjoint(own):
        taken = ", ".join(f'"{key}"' for key in own if key in RESERVED)
        raise ValueError(
            f"collate of {type(dataset).__name__} returns {taken}: the plan fills in "
            f"{', '.join(sorted(RESERVED))} itself, and a dataset must not; rename its key."
        )
    used = batch.ids[batch.weights > 0]
    return {
        **own,
        "sample_id": torch.from_numpy(batch.ids.astype(np.int64)),
        "weight": torch.from_numpy(batch.weights.copy()),
        "step_index": batch.step,
        "num_targets": {
            term: len(used) if counts is None else int(counts[used].sum())
            for term, counts in dataset.target_counts.items()
        },
        "load": load_of(dataset, batch),
        "step_denominators": batch.denominators,
    }


def load_of(dataset: PlannedDataset, batch: MicroBatch) -> dict[str, int]:
    """Return a micro-batch's samples and tokens without fillers, and all computed positions."""
    lengths = dataset.lengths[batch.ids]
    longest = int(lengths[lengths.argmax()])  # `max` of an array takes three times as long
    return {
        "samples": int(np.count_nonzero(batch.weights)),
        "tokens": int(lengths.dot(batch.weights)),
        "positions": longest * len(lengths) if dataset.is_padded else int(lengths.sum()),
    }


def _as_it_is(batch: dict[str, Any]) -> dict[str, Any]:
    return batch


class _MicroBatchSampler:
    """Names what the DataLoader fetches; asked anew, and lazily, at the start of each epoch."""

    def __init__(self, micro_batches: Callable[[], Iterator[MicroBatch]]) -> None:
        self.micro_batches = micro_batches

    def __iter__(self) -> Iterator[MicroBatch]:
        yield from self.micro_batches()


class PlannedLoader:
    """The micro-batches of one replica, epoch after epoch.

    An iterable around a DataLoader and no subclass of it: Lightning then injects no sampler. The
    position is asked for at the first `next`, since Lightning calls `iter` before it knows it.

    Args:
        dataset: the split.
        micro_batches: called at the first `next`; yields the micro-batches to fetch.
        length: micro-batches of a whole epoch, whatever the position.
        loader_options: keyword arguments of the DataLoader.

    Attributes:
        wait_s: seconds that were waited for batches so far.
    """

    def __init__(
        self,
        dataset: PlannedDataset,
        micro_batches: Callable[[], Iterator[MicroBatch]],
        length: int,
        loader_options: dict[str, Any],
    ) -> None:
        self.dataset = dataset
        self._length = length
        self.wait_s = 0.0
        self._loader = DataLoader(
            _Collated(dataset),
            batch_sampler=_MicroBatchSampler(micro_batches),
            collate_fn=_as_it_is,
            **loader_options,
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches, end = iter(self._loader), object()
        while True:
            begun = time.perf_counter()
            batch: Any = next(batches, end)
            self.wait_s += time.perf_counter() - begun
            if batch is end:
                return
            yield batch
