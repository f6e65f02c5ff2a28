"""The order of rows of shards: a bijection, its windows, and several sources."""

import json
from itertools import pairwise

import numpy as np
import pytest

from datamodules.core.plan import hash_ids, keys_for
from datamodules.shards import order
from datamodules.shards.order import (
    ORDER_OF_STEPS,
    ShardedRequest,
    bijection,
    longest_rows,
    num_rows,
    of_sources,
    planned_epoch,
    request_of,
    rows_of_pass,
    write_lengths,
)


def request(sources, size=8, window=5, together=0, seed=3):
    total = sum(samples for _, samples, _ in sources)
    return ShardedRequest("f", total, size, seed, window, sources=sources, shuffle_shards=together)


def lengths_of(wanted):
    return hash_ids(np.arange(num_rows(wanted))).astype(np.int64) % 50 + 1


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000, 4097])
def test_the_bijection_reaches_each_number_once_and_depends_on_its_key(size):
    images = [bijection(np.arange(size), size, key) for key in (0, 1, 2**63)]
    assert all(sorted(one.tolist()) == list(range(size)) for one in images)
    assert size < 60 or not any((a == b).mean() > 0.2 for a, b in pairwise(images))


def test_the_bijection_keeps_no_order_and_takes_any_range():
    images = bijection(np.arange(10_000), 10_000, 5)
    assert abs(np.corrcoef(np.arange(10_000), images)[0, 1]) < 0.05
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 0.05
    far = bijection(np.arange(10**12 - 5, 10**12), 10**12, 5)
    assert len(set(far.tolist())) == 5
    assert 0 <= far.min() <= far.max() < 10**12


@pytest.mark.parametrize("rows", [(5, 0, 9, 4, 7), (3, 3, 3, 3)])
@pytest.mark.parametrize("together", [0, 1, 2, 9])
def test_a_pass_takes_each_row_once_and_groups_of_shards_one_after_the_other(rows, together):
    total = sum(rows)
    found = rows_of_pass(np.arange(total), rows, 11, together)
    assert sorted(found.tolist()) == list(range(total))
    some = rows_of_pass(np.array([total - 1, 0]), rows, 11, together)
    assert some.tolist() == [found[-1], found[0]]
    if together == 1:
        shards = np.searchsorted(np.cumsum(rows), found, side="right")
        assert np.count_nonzero(np.diff(shards)) == np.count_nonzero(rows) - 1


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize("together", [0, 2])
def test_a_plan_is_that_of_a_slow_reference_from_any_step_on(window, together):
    wanted = request((("", 203, (60, 80, 63)),), window=window, together=together)
    lengths, epoch = lengths_of(wanted), 4
    (key,) = keys_for(3, epoch, np.array([0])).tolist()
    order = rows_of_pass(np.arange(203), (60, 80, 63), key, together).tolist()
    expected = []
    for first in range(0, 200, 8 * window):
        some = order[first : min(first + 8 * window, 200)]
        some = sorted(some, key=lambda row: lengths[row]) if window > 1 else some
        steps = [some[i : i + 8] for i in range(0, len(some), 8)]
        (own,) = keys_for(3, epoch, np.array([first])).tolist()
        lots = hash_ids(np.arange(len(steps)), own + ORDER_OF_STEPS)
        expected += [steps[i] for i in np.argsort(lots, kind="stable")]
    expected.append(order[200:])
    plan = planned_epoch(wanted, lengths, epoch)
    assert (plan.num_steps, plan.samples_in(26), plan.samples_in(3)) == (26, 203, 24)
    for step in (25, 7, 0, 24, *range(26)):
        assert plan.step_ids(step).tolist() == expected[step]
    assert plan.order[:].tolist() == [row for step in expected for row in step]


def test_a_mixture_takes_its_exact_share_everywhere_and_each_row_in_turn():
    sources = (("web", 90, (60, 40)), ("books", 50, (20,)), ("none", 0, (5,)), ("code", 7, (30,)))
    wanted = request(sources, size=6, window=4)
    lengths, seen = lengths_of(wanted), []
    for epoch in range(4):
        plan = planned_epoch(wanted, lengths, epoch)
        ids = plan.order[:]
        assert len(set(ids.tolist())) == len(ids) == plan.samples_in(99) == 147
        counts = of_sources(wanted, lengths, ids)
        assert [counts[name][0] for name, _, _ in sources] == [90, 50, 0, 7]
        own = ids % 155
        assert counts["web"][1] == lengths[own[own < 100]].sum()
        for start in range(0, 144, 24):  # each window has its share of every source
            own = of_sources(wanted, lengths, ids[start : start + 24])
            assert abs(own["web"][0] - 24 * 90 / 147) < 1
            assert abs(own["code"][0] - 24 * 7 / 147) < 1
        seen.append(ids % 155)
    for name, (start, size, passes) in {"web": (0, 100, 3), "books": (100, 20, 10)}.items():
        own = np.concatenate(seen)
        taken = np.bincount(own[(own >= start) & (own < start + size)] - start, minlength=size)
        assert taken.min() >= passes <= taken.max() <= passes + 1, name
    (again,) = [request_of(json.loads(json.dumps(vars(wanted))))]
    assert again == wanted
    assert again.digest() == wanted.digest()


def test_lengths_are_looked_at_in_stretches_of_any_size(tmp_path, monkeypatch):
    monkeypatch.setattr(order, "LENGTHS_AT_ONCE", 7)
    lengths = np.random.default_rng(0).integers(0, 9, 100).astype(np.uint16)
    for count in (1, 5, 40, 200):
        expected = np.argsort(-lengths.astype(int), kind="stable")[:count]
        assert longest_rows(lengths, count).tolist() == expected.tolist()
    write_lengths(tmp_path / "lengths.npy", lengths)
    assert np.array_equal(np.load(tmp_path / "lengths.npy"), lengths)
