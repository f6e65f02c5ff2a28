"""The plan: each sample once on any number of devices; the same on every machine."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from datamodules.core import plan as planning

# Fixed values: another order would make every checkpoint refuse to resume.
EXPECTED_ORDER = [15, 10, 11, 18, 14, 7, 0, 8, 3, 17, 4, 5, 19, 12, 13, 6, 1, 2, 9, 16]


def request(num_samples: int, size: int = 8, **changes: object) -> planning.PlanRequest:
    values = {"fingerprint": "f", "seed": 1, "bucket_window": 4, **changes}
    return planning.PlanRequest(num_samples=num_samples, global_batch_size=size, **values)


def lengths_of(num_samples: int, longest: int = 40) -> np.ndarray:
    return np.random.default_rng(num_samples).integers(1, longest + 1, num_samples)


@given(
    num_samples=st.integers(1, 200),
    size=st.integers(1, 40),
    window=st.integers(1, 6),
    epoch=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_every_epoch_holds_every_sample_once(num_samples, size, window, epoch):
    lengths = lengths_of(num_samples)
    plan = planning.make_plan(request(num_samples, size, bucket_window=window), lengths, epoch)
    assert sorted(plan.order.tolist()) == list(range(num_samples))
    sizes = [len(plan.step_ids(step)) for step in range(plan.num_steps)]
    assert sizes[:-1] == [size] * (plan.num_steps - 1)
    assert sum(sizes) == num_samples
    assert plan.samples_in(plan.num_steps) == num_samples


@given(
    num_samples=st.integers(1, 150),
    size=st.integers(1, 32),
    replicas=st.integers(1, 5),
    accumulation=st.integers(1, 5),
)
@settings(max_examples=80, deadline=None)
def test_dealing_gives_each_sample_to_one_replica_with_weight_one(
    num_samples, size, replicas, accumulation
):
    lengths = lengths_of(num_samples)
    plan = planning.make_plan(request(num_samples, size), lengths, 0)
    batching = planning.derive_batching(replicas, size, "auto", accumulation)
    shares = [
        list(
            planning.iterate_micro_batches(plan, lengths, {"n": None}, batching, replicas, rank, 0)
        )
        for rank in range(replicas)
    ]
    assert {len(share) for share in shares} == {plan.num_steps * accumulation}
    for step in range(plan.num_steps):
        step_batches = [b for share in shares for b in share if b.step == step]
        used = np.concatenate([b.ids[b.weights > 0] for b in step_batches])
        assert sorted(used.tolist()) == sorted(plan.step_ids(step).tolist())
        assert len({len(b.ids) for b in step_batches}) == 1  # equally many rows on each replica
        assert {b.denominators["n"] for b in step_batches} == {float(len(used))}


def test_the_plan_is_the_same_on_every_machine_and_another_for_each_seed_and_epoch():
    lengths, keys = np.arange(20) % 7 + 1, [(1, 0), (1, 1), (2, 0), (2, 1)]
    plans = [planning.make_plan(request(20, 4, seed=seed), lengths, epoch) for seed, epoch in keys]
    assert plans[0].order.tolist() == EXPECTED_ORDER
    assert len({tuple(plan.order.tolist()) for plan in plans}) == 4


def test_a_short_last_step_is_a_random_sample_not_the_longest_rows():
    lengths = np.arange(1000)
    last = planning.make_plan(request(1000, 64, bucket_window=50), lengths, 0).step_ids(15)
    assert len(last) == 1000 - 15 * 64
    assert lengths[last].min() < 500


def test_fillers_repeat_the_shortest_sample_with_weight_zero():
    ids, weights = planning.deal(np.array([4, 2, 0]), np.array([9, 0, 1, 0, 5]), 2, 1, 1)[0]
    assert ids.tolist() == [2, 2]
    assert weights.tolist() == [1.0, 0.0]


@given(replicas=st.integers(1, 4), done=st.sets(st.integers(0, 6)))
@settings(max_examples=40, deadline=None)
def test_prediction_batches_are_whole_and_the_same_on_any_device_count(replicas, done):
    plan = planning.make_plan(request(50, 8, shuffle=False), lengths_of(50), 0)
    shares = [
        list(planning.iterate_whole_batches(plan, replicas, rank, frozenset(done)))
        for rank in range(replicas)
    ]
    assert len({len(share) for share in shares}) == 1
    written = [b for share in shares for b in share if b.weights[0] > 0]
    assert sorted(b.step for b in written) == sorted(set(range(7)) - done)
    for batch in written:
        assert (batch.ids == plan.step_ids(batch.step)).all()


@pytest.mark.parametrize(
    ("given_values", "expected"),
    [
        ((1, 64), (64, 64, 1)),
        ((4, 64), (64, 16, 1)),
        ((2, 64, 8), (64, 8, 4)),
        ((3, 64, 8), (64, 8, 3)),
        ((1, 16, 64), (16, 16, 1)),
        ((2, 64, "auto", 4), (64, 8, 4)),
    ],
)
def test_accumulation_and_micro_batch_follow_from_each_other(given_values, expected):
    found = planning.derive_batching(*given_values)
    sizes = (found.global_batch_size, found.micro_batch_size, found.accumulate_grad_batches)
    assert sizes == expected


@pytest.mark.parametrize(
    ("given_values", "message"),
    [
        ((2, 64, 4, 4), r"2 devices x micro_batch_size 4 x accumulate_grad_batches 4 = 32"),
        ((2, 0), "global_batch_size must be at least 1, got 0"),
        ((2, 64, 0), "micro_batch_size must be at least 1, got 0"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(given_values, message):
    with pytest.raises(ValueError, match=message):
        planning.derive_batching(*given_values)


def test_digest_sees_a_swapped_a_missing_and_a_repeated_sample():
    step = np.arange(10)
    others = (np.append(step[:-1], 10), step[:-1], np.append(step, 0))
    assert planning.digest_ids(step) == planning.digest_ids(step[::-1])
    assert all(planning.digest_ids(step) != planning.digest_ids(other) for other in others)


def mixed(word: int) -> int:
    """SplitMix64's finaliser in plain integers."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word ^ (word >> 31)


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 7), (-3, 2), (2**63, 10**6)])
def test_draws_are_splitmix_streams_keyed_by_the_sample(seed, epoch):
    ids, golden = np.array([0, 1, 5, 2**31, 2**40]), 0x9E3779B97F4A7C15
    draws = planning.uniforms_for(seed, epoch, ids, 5)
    for sample_id, found in zip(ids.tolist(), draws, strict=True):
        key = 0
        for part in (seed, epoch, sample_id):
            key = mixed((part + (key + 1) * golden) % 2**64)
        words = [mixed((key + n * golden) % 2**64) for n in range(1, 6)]
        assert found.tolist() == [(word >> 11) / 2**53 for word in words]
        # The words of Random123's philox4x64 with this key, from the counter 1 on.
        words = np.random.Generator(np.random.Philox(key=key)).random(9)
        assert planning.rng_for(seed, epoch, sample_id).random(9).tolist() == words.tolist()
    np.testing.assert_array_equal(planning.uniforms_for(seed, epoch, ids[[3]], 2), draws[3:4, :2])
