"""Order of samples over optimizer steps, as pure functions of data, seed and epoch.

Nothing here asks which rank it runs on. `make_plan` cuts an epoch into global steps, `deal` cuts
one step into the micro-batches of one data-parallel replica. Order comes from a keyed integer hash
and stable sorting alone, so that a plan is the same on every machine and with every version of
numpy.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def hash_ids(ids: np.ndarray, key: int = 0) -> np.ndarray:
    """Return one well-mixed 64-bit hash per id; each key, any integer, gives an unrelated order.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014).
    """
    x = ids.astype(np.uint64)  # integer arrays overflow without a warning
    x += np.uint64((key * _GOLDEN + _GOLDEN) % 2**64)
    x ^= x >> np.uint64(30)
    x *= np.uint64(_MIX_1)
    x ^= x >> np.uint64(27)
    x *= np.uint64(_MIX_2)
    x ^= x >> np.uint64(31)
    return x


def digest_ids(ids: np.ndarray) -> int:
    """Return the order-free digest of a set of sample ids: the sum of their hashes modulo 2^63."""
    return int(hash_ids(ids).sum(dtype=np.uint64)) % 2**63


@lru_cache
def _key(*parts: int) -> int:
    """Return one 64-bit key for a tuple of integers."""
    key = 0
    for part in parts:
        key = int(hash_ids(np.array([part]), key)[0])
    return key


def keys_for(seed: int, epoch: int, sample_ids: np.ndarray) -> np.ndarray:
    """Return the keys of samples [N] in one epoch, [N] uint64; their hashes are the draws."""
    return hash_ids(sample_ids, _key(seed, epoch))


def uniforms_for(seed: int, epoch: int, sample_ids: np.ndarray, count: int) -> np.ndarray:
    """Return uniform draws in [0, 1) for samples [N] in one epoch, [N, count] float64.

    They are independent of the draws of `rng_for` for the same sample.
    """
    keys = keys_for(seed, epoch, sample_ids)
    words = np.stack([hash_ids(keys, draw) for draw in range(count)], axis=-1)
    return (words >> np.uint64(11)) * 2.0**-53  # the 53 bits of a double


def rng_for(seed: int, epoch: int, sample_id: int) -> np.random.Generator:
    """Return the generator of one sample in one epoch: the same on every rank."""
    (key,) = keys_for(seed, epoch, np.array([sample_id])).tolist()
    return np.random.Generator(np.random.Philox(key=key))


@dataclass(frozen=True)
class PlanOptions:
    """How an epoch is cut into steps.

    Args:
        seed: key of the order and of all augmentation; `None` means `seed_everything`, else 0.
        bucket_window: number of global batches whose samples are sorted by length together: a
            larger window means less padding and less shuffling, 1 means no sorting.
    """

    seed: int | None = None
    bucket_window: int = 50


@dataclass(frozen=True)
class Plan:
    """The steps of one epoch: `step_size` samples each, fewer in the last one if need be."""

    order: np.ndarray  # [N] sample ids
    step_size: int

    @property
    def num_steps(self) -> int:
        return math.ceil(len(self.order) / self.step_size)

    def step_ids(self, step: int) -> np.ndarray:
        """Return the sample ids of one global step."""
        return self.order[step * self.step_size : (step + 1) * self.step_size]

    def samples_in(self, num_steps: int) -> int:
        """Return how many samples the first steps hold."""
        return min(num_steps * self.step_size, len(self.order))


@dataclass(frozen=True)
class PlanRequest:
    """Everything except the epoch that a plan depends on: plain values with one digest."""

    fingerprint: str  # digest of the data, from the dataset
    num_samples: int  # in the split
    global_batch_size: int  # samples of one step
    seed: int  # as in `PlanOptions`
    bucket_window: int  # as in `PlanOptions`
    # Earlier versions could cut steps by a budget of tokens. The field stays, since the digests of
    # existing runs include it.
    global_batch_tokens: None = None
    # False keeps the order of the file from one window to the next (prediction).
    shuffle: bool = True

    def digest(self) -> str:
        """Return the digest that a checkpoint stores and a resumed run compares."""
        text = json.dumps(vars(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_plan(request: PlanRequest, lengths: np.ndarray, epoch: int) -> Plan:
    """Return the global steps of one epoch.

    Samples are put in a keyed random order, sorted by length within windows of `bucket_window`
    steps and cut into steps, whose order is then shuffled by key. A shorter last step stays last
    and is left out of the sorting, so that it is a random sample and not the longest texts.

    Args:
        lengths: [N] positions of each sample.
        epoch: from 0; evaluation always uses epoch 0.
    """
    size, total = request.global_batch_size, request.num_samples
    order = np.arange(total, dtype=np.int32 if total < 2**31 else np.int64)
    if request.shuffle:
        keys = hash_ids(order, _key(request.seed, epoch, 0))
        order = order[np.argsort(keys, kind="stable")]
        del keys
    num_whole = total // size
    whole = order[: num_whole * size]
    if request.bucket_window > 1:
        window = size * request.bucket_window
        for start in range(0, len(whole), window):
            part = whole[start : start + window]
            part[:] = part[np.argsort(lengths[part], kind="stable")]
    if request.shuffle:
        steps = np.arange(math.ceil(total / size))
        steps = np.argsort(hash_ids(steps, _key(request.seed, epoch, 1)), kind="stable")
        steps = steps[steps < num_whole]
        whole[:] = whole.reshape(num_whole, size)[steps].reshape(-1)
    return Plan(order, size)


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward call on one replica."""

    epoch: int  # key for augmentation
    step: int  # index of the global step in the epoch
    ids: np.ndarray  # [B] sample ids
    weights: np.ndarray  # [B] 1, or 0 for a filler
    denominators: dict[str, float]  # term -> count over the whole optimizer step


def deal(
    ids: np.ndarray, lengths: np.ndarray, num_replicas: int, replica: int, num_micro_batches: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the (ids, weights) of each micro-batch that one replica computes in one step.

    All steps of an epoch have the same number of micro-batches, and all micro-batches of one step
    have the same number of rows on every replica. At each turn the replicas get samples of similar
    length, so that none waits long for another. Where the samples do not divide evenly, the
    shortest one is repeated with weight 0.

    The cut depends only on replicas x micro-batches. Where both are powers of two, `turn_order`
    makes every replica's share one subtree of the same binary tree.

    Args:
        ids: [n] sample ids of the step.
        lengths: [N] positions of every sample of the split.
        replica: index of the replica, from 0.
        num_micro_batches: micro-batches of each replica in this step.
    """
    by_length = ids[np.argsort(-lengths[ids].astype(np.int64), kind="stable")]
    num_chunks = num_replicas * num_micro_batches
    rows = math.ceil(len(ids) / num_chunks)
    filled = np.full(rows * num_chunks, by_length[-1], by_length.dtype)
    filled[: len(ids)] = by_length
    weights = np.zeros(len(filled), np.float32)
    weights[: len(ids)] = 1
    chunks = []
    for turn in turn_order(num_micro_batches):
        seat = replica if turn % 2 == 0 else num_replicas - 1 - replica
        start = (turn * num_replicas + seat) * rows
        chunks.append((filled[start : start + rows], weights[start : start + rows]))
    return chunks


def turn_order(num_turns: int) -> list[int]:
    """Return the order in which a replica computes its turns (micro-batches) of a step.

    The order walks a binary tree that pairs the first turn with the last, the second with the last
    but one, and so on, then pairs these pairs in the same way: partial sums of gradients then need
    memory for log2(num_turns) of them. Replicas are seated in alternating direction, so that the
    replica with chunk c in turn t has chunk C - 1 - c in the mirrored turn: half as many replicas
    add the same pairs in the same order. Without a power of two there is no such tree, and turns
    keep their order.
    """
    if num_turns & (num_turns - 1):
        return list(range(num_turns))
    order = [0]
    while len(order) < num_turns:
        last = 2 * len(order) - 1
        order = [t for turn in order for t in (turn, last - turn)]
    return order


@dataclass(frozen=True)
class Batching:
    """How one global batch is spread over replicas and accumulated micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    accumulate_grad_batches: int


@dataclass(frozen=True)
class Rehearsed:
    """Result of the trial runs (rehearsal) for `micro_batch_size: auto`."""

    micro_batch_size: int  # the largest that fits on every device
    peak_gib: float  # memory used on the fullest device
    memory_gib: float  # memory of one device


def check_range(
    group: str, least: float, most: float = math.inf, /, **values: float | None
) -> None:
    """Raise ValueError for an option of a group outside its range; `None` is not checked."""
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            rule = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            raise ValueError(f"{group}.{name} must be {rule}, got {value}.")


def smaller_shares(num_replicas: int, global_batch_size: int) -> list[int]:
    """Return the sizes that `auto` may choose from: a device's share, halved down to 1."""
    sizes = [math.ceil(global_batch_size / num_replicas)]
    while sizes[-1] > 1:
        sizes.append(math.ceil(sizes[-1] / 2))
    return sizes[::-1]


def derive_batching(
    num_replicas: int,
    global_batch_size: int,
    micro_batch_size: int | Literal["auto"] = "auto",
    accumulate_grad_batches: int = 1,
) -> Batching:
    """Derive the batching from the global batch size and the number of replicas.

    Args:
        global_batch_size: samples of one optimizer step, over all replicas.
        micro_batch_size: largest number of samples in one forward call on one replica; `auto` is
            the replica's whole share, until a rehearsal finds what fits into memory.
        accumulate_grad_batches: of the trainer; a value above 1 determines the micro-batch.

    Raises:
        ValueError: a size below 1, or values that contradict each other.
    """
    fixed_size = None if micro_batch_size == "auto" else micro_batch_size
    check_range("data", 1, global_batch_size=global_batch_size, micro_batch_size=fixed_size)
    check_range("trainer", 1, accumulate_grad_batches=accumulate_grad_batches)
    accumulation = accumulate_grad_batches
    if accumulation == 1 and micro_batch_size != "auto":
        accumulation = math.ceil(global_batch_size / (num_replicas * micro_batch_size))
    share = math.ceil(global_batch_size / (num_replicas * accumulation))
    if micro_batch_size != "auto" and share > micro_batch_size:
        raise ValueError(
            f"{num_replicas} devices x micro_batch_size {micro_batch_size} x "
            f"accumulate_grad_batches {accumulation} = "
            f"{num_replicas * micro_batch_size * accumulation} samples, fewer than "
            f"global_batch_size {global_batch_size}; leave accumulate_grad_batches out and it is "
            "derived."
        )
    return Batching(global_batch_size, share, accumulation)


def count_targets(ids: np.ndarray, target_counts: dict[str, np.ndarray | None]) -> dict[str, float]:
    """Return term -> number of targets of these samples."""
    return {
        term: float(len(ids) if per_sample is None else per_sample[ids].sum())
        for term, per_sample in target_counts.items()
    }


def iterate_micro_batches(
    plan: Plan,
    lengths: np.ndarray,
    target_counts: dict[str, np.ndarray | None],
    batching: Batching,
    num_replicas: int,
    replica: int,
    epoch: int,
    first_step: int = 0,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of one replica from `first_step` of the epoch on."""
    for step in range(first_step, plan.num_steps):
        ids = plan.step_ids(step)
        denominators = count_targets(ids, target_counts)
        accumulation = batching.accumulate_grad_batches
        for chunk, weights in deal(ids, lengths, num_replicas, replica, accumulation):
            yield MicroBatch(epoch, step, chunk, weights, denominators)


def iterate_whole_batches(
    plan: Plan, num_replicas: int, replica: int, done: frozenset[int] = frozenset()
) -> Iterator[MicroBatch]:
    """Yield the batches of one replica in prediction: whole batches, dealt round-robin, without
    the batches that an interrupted run has `done`.

    Their content does not depend on the device count. Every replica makes the same number of
    calls: a replica that runs out repeats its last batch with weight 0. Where nothing is left,
    every replica gets one such batch, since Lightning skips the end hooks of an empty run.
    """
    todo = [step for step in range(plan.num_steps) if step not in done]
    if plan.num_steps and not todo:
        ids = plan.step_ids(0)
        yield MicroBatch(0, 0, ids, np.zeros(len(ids), np.float32), {})
    for start in range(0, len(todo), num_replicas):
        position = start + replica
        index = todo[min(position, len(todo) - 1)]
        ids = plan.step_ids(index)
        weights = np.full(len(ids), 1.0 if position < len(todo) else 0.0, np.float32)
        yield MicroBatch(0, index, ids, weights, {})
