"""The micro-batches of a whole run that take most memory, found without going through the run."""

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from datamodules.core.loader import collated
from datamodules.core.plan import MicroBatch, Plan, PlanRequest, count_targets, derive_batching

if TYPE_CHECKING:
    from datamodules.core.planned import PlannedDataModule


def heaviest_batches(data: "PlannedDataModule", micro_batch_size: int) -> list[dict[str, Any]]:
    """Return the batches of training that take most memory, dealt by this micro-batch: real
    samples, as the loader would hand them over."""
    dataset = data.datasets["train"]
    batching = derive_batching(data.num_replicas, data.global_batch_size, micro_batch_size)
    num_chunks = data.num_replicas * batching.accumulate_grad_batches
    plan = data.plan("train", 0)
    batches = []
    for ids in heaviest_ids(data.request("train"), plan, dataset.lengths, num_chunks):
        weights = np.ones(len(ids), np.float32)
        counts = count_targets(ids, dataset.target_counts)
        batches.append(collated(dataset, MicroBatch(0, 0, ids, weights, counts)))
    return batches


def heaviest_ids(
    request: PlanRequest, plan: Plan, lengths: np.ndarray, num_chunks: int
) -> list[np.ndarray]:
    """Return the sample ids of the micro-batches with most positions per row and most in all.

    Cut by number, every step has the same rows, and the longest samples of the split make a
    batch that none of any epoch exceeds. Cut by a budget of positions, each epoch has the same
    steps in another order: the longest and the widest of the first one are those of all.

    Args:
        request: what the plan was made from.
        plan: of any epoch.
        lengths: [N] positions of each sample.
        num_chunks: micro-batches that a step is cut into, over all replicas.

    Returns:
        one or two arrays of ids, each from the longest sample to shorter ones.
    """
    if request.global_batch_tokens is None:
        rows = math.ceil(int(np.diff(plan.offsets).max()) / num_chunks)
        return [longest_ids(np.arange(len(lengths)), lengths, rows)]
    rows_of = -(-np.diff(plan.offsets) // num_chunks)  # [steps]
    widths = np.maximum.reduceat(lengths[plan.order], plan.offsets[:-1]).astype(np.int64)
    positions = rows_of * widths
    longest = int(np.lexsort((positions, widths))[-1])
    widest = int(np.lexsort((widths, positions))[-1])
    return [
        longest_ids(plan.step_ids(step), lengths, int(rows_of[step]))
        for step in dict.fromkeys((longest, widest))
    ]


def longest_ids(ids: np.ndarray, lengths: np.ndarray, rows: int) -> np.ndarray:
    """Return the ids of the `rows` longest of these samples, the longest first."""
    if rows < len(ids):
        ids = ids[np.argpartition(lengths[ids], len(ids) - rows)[len(ids) - rows :]]
    return ids[np.argsort(-lengths[ids].astype(np.int64), kind="stable")]
