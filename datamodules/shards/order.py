"""Order of the rows of shards over optimizer steps, whatever their number, in the memory of a
window.

A source is a number of rows that is passed over again and again, each pass in an order of its own;
an epoch takes the next so many of each source, evenly in turns. The id of a sample is the number of
its row, counted over all sources; a row that an epoch takes again has the number of all rows added
for each time. Everything is a pure function of the request and the epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from datamodules.core.plan import Plan, PlanRequest, hash_ids, keys_for, make_plan
from datamodules.core.store import ArrayFile

ROUNDS = 8  # of the network that scrambles places; four are called pseudo-random
LENGTHS_AT_ONCE = 1 << 20
KEPT_WINDOWS = 2  # the ledger asks for a step behind the loader
ORDER_OF_STEPS = 1 << 32  # with which a key of windows differs from those of rounds
Source = tuple[str, int, tuple[int, ...]]  # name, samples per epoch, rows of each shard or of all


@dataclass(frozen=True)
class ShardedRequest(PlanRequest):
    """All that the plan of shards depends on besides the epoch.

    Args:
        sources: of each its name, its samples per epoch and its rows: of each shard, or their sum
            where all shards are one group.
        shuffle_shards: shards whose rows are shuffled together; 0 for all of a source.
    """

    sources: tuple[Source, ...] = ()
    shuffle_shards: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of all sources, of which an epoch may take some never and others several times."""
        return sum(sum(rows) for _, _, rows in self.sources)


def request_of(values: dict[str, Any]) -> PlanRequest:
    """Return the request whose values these are, as they come from JSON; a ValueError, KeyError or
    TypeError where they are none."""
    if "sources" not in values:
        return PlanRequest(**values)
    sources = tuple((name, samples, tuple(rows)) for name, samples, rows in values["sources"])
    return ShardedRequest(**{**values, "sources": sources})


def num_rows(request: PlanRequest) -> int:
    """Return how many lengths a plan is made of: one per sample, or per row of shards."""
    return request.num_rows if isinstance(request, ShardedRequest) else request.num_samples


def planned_epoch(request: PlanRequest, lengths: Any, epoch: int) -> Plan:
    """Return the global steps of one epoch: of `make_plan`, or of shards.

    Args:
        request: what the plan depends on.
        lengths: [N] positions of each row; for shards anything that arrays of ids index.
        epoch: from 0.

    Raises:
        ValueError: lengths and request disagree.
    """
    if not isinstance(request, ShardedRequest):
        return make_plan(request, lengths, epoch)
    if len(lengths) != request.num_rows:
        raise ValueError(
            f"the plan needs one length per row: {request.num_rows} rows, {len(lengths)} lengths."
        )
    order: Any = WindowedOrder(request, lengths, epoch)
    return Plan(order, request.global_batch_size)


class WindowedOrder:
    """The sample ids of an epoch in their order, [N] int64, made by windows where a slice asks.

    A window is `bucket_window` steps: so many samples as they come, sorted by length, cut into
    steps, and the steps put in a random order. A last step that is shorter than the others is a
    window of its own.
    """

    def __init__(self, request: ShardedRequest, lengths: Any, epoch: int) -> None:
        self.request, self.lengths, self.epoch = request, lengths, epoch
        self._kept: dict[int, np.ndarray] = {}  # windows by their numbers

    def __len__(self) -> int:
        return self.request.num_samples

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop, _ = places.indices(len(self))
        size, steps = self.request.global_batch_size, max(1, self.request.bucket_window)
        per_window, num_whole = size * steps, len(self) // size * size
        parts = [np.empty(0, np.int64)]
        while start < stop:
            number = -(-num_whole // per_window) if start >= num_whole else start // per_window
            first = num_whole if start >= num_whole else number * per_window
            last = len(self) if start >= num_whole else min(first + per_window, num_whole)
            window = self._kept.pop(number, None)
            if window is None:
                window = self._window(number, first, last)
            kept = list(self._kept.items())[1 - KEPT_WINDOWS :]
            self._kept = {**dict(kept), number: window}
            parts.append(window[start - first : stop - first])
            start = last
        return np.concatenate(parts)

    def _window(self, number: int, first: int, last: int) -> np.ndarray:
        """Return the ids of one window."""
        ids, size = self.ids_at(first, last), self.request.global_batch_size
        if len(ids) % size:
            return ids
        if self.request.bucket_window > 1:
            lengths = self.lengths[ids % self.request.num_rows]
            ids = ids[np.argsort(lengths, kind="stable")]
        (key,) = keys_for(self.request.seed, self.epoch, np.array([number])).tolist()
        lots = hash_ids(np.arange(len(ids) // size), key + ORDER_OF_STEPS)
        return ids.reshape(-1, size)[np.argsort(lots, kind="stable")].reshape(-1)

    def ids_at(self, first: int, last: int) -> np.ndarray:
        """Return the sample ids at successive places of the epoch, not yet sorted by length.

        A source with n of the N samples that it and the sources behind it have owns the places
        where the whole part of place x n / N grows: any stretch holds its share of it, but for
        less than one sample. What it does not own is left to those behind it.
        """
        ids, slots = np.empty(last - first, np.int64), np.arange(last - first)
        begin, samples_left, offset = first, self.request.num_samples, 0
        for number, (_, samples, rows) in enumerate(self.request.sources):
            if samples:
                taken, rest = divmod(begin * samples, samples_left)
                before = (rest + np.arange(len(slots) + 1) * samples) // samples_left
                is_own = np.diff(before) > 0
                start = self.epoch * samples
                own = start + taken + np.arange(np.count_nonzero(is_own))
                ids[slots[is_own]] = offset + self._rows(number, rows, own, start)
                slots, begin, samples_left = slots[~is_own], begin - taken, samples_left - samples
            offset += sum(rows)
        return ids

    def _rows(self, number: int, rows: Sequence[int], own: np.ndarray, start: int) -> np.ndarray:
        """Return the rows [n] at successive places of the endless passes over a source, plus the
        number of all rows for each pass that this epoch has begun since `start`, its first place.
        """
        total, made = sum(rows), np.empty_like(own)
        for one in np.unique(own // total).tolist():
            is_in = own // total == one
            (key,) = keys_for(self.request.seed, one, np.array([number])).tolist()
            found = rows_of_pass(own[is_in] - one * total, rows, key, self.request.shuffle_shards)
            made[is_in] = found + (one - start // total) * self.request.num_rows
        return made


def rows_of_pass(places: np.ndarray, rows: Sequence[int], key: int, together: int) -> np.ndarray:
    """Return the row [n] int64 at each place of a pass over shards.

    Args:
        places: [n] integers from 0 to the number of rows - 1.
        rows: of each shard.
        key: of the order, any integer.
        together: successive shards of a random order of theirs whose rows are shuffled together;
            0 for all.
    """
    together = together or len(rows)
    if together >= len(rows):
        return bijection(places, sum(rows), key)
    sizes = np.array(rows, np.int64)
    shards = np.argsort(hash_ids(np.arange(len(rows)), key), kind="stable")
    ends = np.cumsum(sizes[shards])
    group_ends = np.append(ends[together - 1 :: together], ends[-1])
    groups = np.searchsorted(group_ends, places, side="right")
    mixed = np.empty(len(places), np.int64)  # places before the rows of a group were shuffled
    for group in np.unique(groups).tolist():
        is_in, start = groups == group, int(group_ends[group - 1]) if group else 0
        size = int(group_ends[group]) - start
        (own_key,) = hash_ids(np.array([group]), key + 1).tolist()
        mixed[is_in] = start + bijection(places[is_in] - start, size, own_key)
    at = np.searchsorted(ends, mixed, side="right")
    return (np.cumsum(sizes)[shards] - ends)[at] + mixed


def bijection(numbers: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the images [n] int64 of numbers under a keyed permutation of 0 … size - 1.

    A Feistel network permutes the numbers of as many bits as the largest has; one that leaves the
    range is taken through it again until it is back, which takes less than two times in the mean.

    Args:
        numbers: [n] integers from 0 to size - 1.
        size: of the range.
        key: any integer; another key gives an unrelated permutation.

    Source: Black, Rogaway 2002, ciphers with arbitrary finite domains (cycle walking).
    """
    bits = max(1, (size - 1).bit_length())
    low_bits = np.uint64((bits + 1) // 2)
    low, high = (np.uint64((1 << n) - 1) for n in ((bits + 1) // 2, bits // 2))
    x = numbers.astype(np.uint64)
    outside = np.arange(len(x))
    while len(outside):
        left, right = x[outside] >> low_bits, x[outside] & low
        for number in range(0, ROUNDS, 2):
            left ^= hash_ids(right, key + number) & high
            right ^= hash_ids(left, key + number + 1) & low
        x[outside] = left << low_bits | right
        outside = outside[x[outside] >= size]
    return x.astype(np.int64)


def stretches(lengths: Any) -> Iterator[np.ndarray]:
    """Yield lengths [N] in successive arrays that fit into memory, whatever N."""
    for start in range(0, len(lengths), LENGTHS_AT_ONCE):
        yield lengths[start : start + LENGTHS_AT_ONCE]


def write_lengths(path: Path, lengths: Any) -> None:
    """Write lengths [N] as a npy file."""
    with ArrayFile(path, lengths.dtype) as file:
        for some in stretches(lengths):
            file.add(some)


def longest_rows(lengths: Any, count: int) -> np.ndarray:
    """Return the ids [count] of the longest, of equal ones the first; fewer where there are not so
    many."""
    found, start = np.empty(0, np.int64), 0
    for some in stretches(lengths):
        ids = np.concatenate([found, np.arange(start, start + len(some))])
        found = ids[np.argsort(-lengths[ids].astype(np.int64), kind="stable")[:count]]
        start += len(some)
    return found
