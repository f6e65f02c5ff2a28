"""Order of shard rows over optimizer steps; memory is that of a window, for any number of rows.

The rows of a source are passed over repeatedly, each pass in an order of its own. An epoch takes a
fixed number of rows from each source, evenly interleaved. A sample id is the number of its row over
all sources, plus the number of all rows for each earlier time that the epoch has taken the row.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.plan import Plan, PlanRequest, hash_ids, keys_for, make_plan
from datamodules.core.store import ArrayFile

ROUNDS = 8  # of the Feistel network; four make it pseudo-random in theory
LENGTHS_AT_ONCE, KEPT_WINDOWS = 1 << 20, 4
ORDER_OF_STEPS = 1 << 32  # keeps the keys of windows apart from those of rounds


@dataclass(frozen=True)
class ShardedRequest(PlanRequest):
    """All facts that determine a plan of shards, except the epoch."""

    # Name, samples per epoch and rows of each source; rows per shard, or only their sum if all
    # shards are shuffled together.
    sources: tuple[tuple[str, int, tuple[int, ...]], ...] = ()
    shuffle_shards: int = 0  # shards shuffled together; 0 for all of a source


def request_of(values: dict[str, Any]) -> PlanRequest:
    """Return the request with these values from JSON; ValueError, KeyError or TypeError if they do
    not describe one."""
    if "sources" not in values:
        return PlanRequest(**values)
    sources = tuple((name, samples, tuple(rows)) for name, samples, rows in values["sources"])
    return ShardedRequest(**{**values, "sources": sources})


def num_rows(request: PlanRequest) -> int:
    """Return how many lengths a plan needs: one per sample, or per row of shards."""
    if isinstance(request, ShardedRequest):
        return sum(sum(rows) for _, _, rows in request.sources)
    return request.num_samples


def planned_epoch(request: PlanRequest, lengths: Any, epoch: int) -> Plan:
    """Return the plan of one epoch: that of `make_plan`, or of shards.

    Args:
        lengths: [N] positions of each row; for shards any object indexed by arrays of ids.
        epoch: from 0.
    """
    if not isinstance(request, ShardedRequest):
        return make_plan(request, lengths, epoch)
    order: Any = WindowedOrder(request, lengths, epoch)
    return Plan(order, request.global_batch_size)


def of_sources(request: PlanRequest, lengths: Any, ids: np.ndarray) -> dict[str, list[int]]:
    """Return source name -> [samples, positions] of samples [n], for sources with a name."""
    counts, end, rows = dict[str, list[int]](), 0, ids % num_rows(request)
    for name, _, of_shards in getattr(request, "sources", ()):
        start, end = end, end + sum(of_shards)
        if name:
            own = rows[(start <= rows) & (rows < end)]
            counts[name] = [len(own), int(lengths[own].astype(np.int64).sum())]
    return counts


def add_sources(totals: dict[str, list[int]], counts: dict[str, list[int]]) -> None:
    """Add `counts` of `of_sources` to `totals`."""
    for name, some in counts.items():
        totals[name] = [a + b for a, b in zip(totals.get(name, (0, 0)), some, strict=True)]


class WindowedOrder:
    """The sample ids of an epoch in order, [N] int64, computed by windows when a slice is read.

    A window is the samples of `bucket_window` successive steps: they are sorted by length, cut into
    steps, and the steps are shuffled. A shorter last step is a window of its own.
    """

    def __init__(self, request: ShardedRequest, lengths: Any, epoch: int) -> None:
        self.request, self.lengths, self.epoch = request, lengths, epoch
        self._kept: dict[int, np.ndarray] = {}  # the last windows, by first index

    def __len__(self) -> int:
        return self.request.num_samples

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(len(self))
        size = self.request.global_batch_size
        num_whole, per_window = len(self) // size * size, size * max(1, self.request.bucket_window)
        first, last = num_whole, len(self)
        if start < num_whole:
            first = start // per_window * per_window
            last = min(first + per_window, num_whole)
        if stop > last:
            return np.concatenate([self[start:last], self[last:stop]])
        if first not in self._kept:  # the ledger reads steps again, after the loader
            before = [*self._kept.items()][1 - KEPT_WINDOWS :]
            self._kept = dict(before) | {first: self._window(first, last)}
        return self._kept[first][start - first : max(start, stop) - first]

    def _window(self, first: int, last: int) -> np.ndarray:
        """Return the ids of one window."""
        ids, size = self._ids(first, last), self.request.global_batch_size
        if len(ids) % size:
            return ids
        if self.request.bucket_window > 1:
            ids = ids[np.argsort(self.lengths[ids % len(self.lengths)], kind="stable")]
        (key,) = keys_for(self.request.seed, self.epoch, np.array([first])).tolist()
        lots = hash_ids(np.arange(len(ids) // size), key + ORDER_OF_STEPS)
        return ids.reshape(-1, size)[np.argsort(lots, kind="stable")].reshape(-1)

    def _ids(self, first: int, last: int) -> np.ndarray:
        """Return the sample ids at successive places, not yet sorted by length.

        Let a source have n of the N samples that it and the sources after it take. It takes the
        places where floor(place * n / N) increases, so that any stretch holds its share to less
        than one sample; the remaining places go to the sources after it.
        """
        ids, slots = np.empty(last - first, np.int64), np.arange(last - first)
        begin, samples_left, offset = first, self.request.num_samples, 0
        for number, (_, samples, rows) in enumerate(self.request.sources):
            if samples:
                taken, rest = divmod(begin * samples, samples_left)
                before = (rest + np.arange(len(slots) + 1) * samples) // samples_left
                is_own, start = np.diff(before) > 0, self.epoch * samples
                places = start + taken + np.arange(np.count_nonzero(is_own))
                ids[slots[is_own]] = offset + self._rows(number, rows, places, start)
                slots, begin, samples_left = slots[~is_own], begin - taken, samples_left - samples
            offset += sum(rows)
        return ids

    def _rows(self, number: int, rows: Sequence[int], places: np.ndarray, start: int) -> np.ndarray:
        """Return the rows [n] at these places, counted over all passes of a source, plus the number
        of all rows for each pass begun after place `start`, the first of the epoch."""
        size, ids = sum(rows), np.empty_like(places)
        for one in np.unique(places // size).tolist():
            is_in, again = places // size == one, one - start // size
            (key,) = keys_for(self.request.seed, one, np.array([number])).tolist()
            own = rows_of_pass(places[is_in] - one * size, rows, key, self.request.shuffle_shards)
            ids[is_in] = own + again * len(self.lengths)
        return ids


def rows_of_pass(places: np.ndarray, rows: Sequence[int], key: int, together: int) -> np.ndarray:
    """Return the row [n] int64 at each place of a pass over shards.

    Args:
        places: [n] integers from 0 to the number of rows - 1.
        rows: number of rows of each shard.
        key: key of the order, any integer.
        together: shards are shuffled, and the rows of each group of so many successive ones are
            shuffled together; 0 for all.
    """
    if not 0 < together < len(rows):
        return bijection(places, sum(rows), key)
    sizes = np.array(rows, np.int64)
    shards = np.argsort(hash_ids(np.arange(len(rows)), key), kind="stable")
    ends = np.cumsum(sizes[shards])
    group_ends = np.append(ends[together - 1 :: together], ends[-1])
    groups = np.searchsorted(group_ends, places, side="right")
    mixed = np.empty(len(places), np.int64)  # places in the shuffled shards
    for group in np.unique(groups).tolist():
        is_in, start = groups == group, int(group_ends[group - 1]) if group else 0
        (own_key,) = hash_ids(np.array([group]), key + 1).tolist()
        size = int(group_ends[group]) - start
        mixed[is_in] = start + bijection(places[is_in] - start, size, own_key)
    at = np.searchsorted(ends, mixed, side="right")
    return (np.cumsum(sizes)[shards] - ends)[at] + mixed


def bijection(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the images [n] int64 of numbers [n] under a keyed permutation of 0 … size - 1.

    A Feistel network permutes all numbers with as many bits as size - 1. An image outside of the
    range is permuted again until it is inside, fewer than two times on average.

    Source: Black, Rogaway 2002, ciphers with arbitrary finite domains (cycle walking).
    """
    bits = max(1, (size - 1).bit_length())
    low_bits = np.uint64((bits + 1) // 2)
    low, high = np.uint64((1 << (bits + 1) // 2) - 1), np.uint64((1 << bits // 2) - 1)
    images, outside = numbers.astype(np.uint64), np.arange(len(numbers))
    while len(outside):
        left, right = images[outside] >> low_bits, images[outside] & low
        for number in range(0, ROUNDS, 2):
            left ^= hash_ids(right, key + number) & high
            right ^= hash_ids(left, key + number + 1) & low
        images[outside] = left << low_bits | right
        outside = outside[images[outside] >= size]
    return images.astype(np.int64)


def stretches(lengths: Any) -> Iterator[np.ndarray]:
    """Yield lengths [N] in successive arrays that fit into memory."""
    for start in range(0, len(lengths), LENGTHS_AT_ONCE):
        yield lengths[start : start + LENGTHS_AT_ONCE]


def plan_hash(request: Mapping[str, Any], repeats_first_epoch: bool, lengths: Any) -> str:
    """Return the hash, 16 hex digits, of everything that determines a plan: the values of a
    `PlanRequest`, whether every epoch repeats the first, and the positions of each sample [N]."""
    digest = hashlib.sha256(json.dumps([request, repeats_first_epoch], sort_keys=True).encode())
    for stretch in stretches(lengths):
        digest.update(np.ascontiguousarray(stretch, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def write_lengths(path: Path, lengths: Any) -> None:
    """Write lengths [N] as a npy file."""
    with ArrayFile(path, lengths.dtype) as file:
        for some in stretches(lengths):
            file.add(some)


def longest_rows(lengths: Any, count: int) -> np.ndarray:
    """Return the ids of the `count` longest rows, ties by id."""
    longest, start, least = np.empty(0, np.int64), 0, -1
    for some in stretches(lengths):
        ids = np.append(longest, start + np.flatnonzero(some > least))
        longest = ids[np.argsort(-lengths[ids].astype(np.int64), kind="stable")[:count]]
        start, least = start + len(some), lengths[longest[-1]] if len(longest) == count else -1
    return longest
