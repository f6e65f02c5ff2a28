"""Throughput of two real processes: the slow rank is named, the other's wait is communication."""

import json

import pytest
import torch

from lit_models.training.checkpoints import read_checkpoint
from tests.distributed.launch import run
from tests.distributed.throughput_run import NAP_S, STEPS
from tests.training.throughput_runs import seconds_in, throughput_lines

pytestmark = pytest.mark.slow
SAMPLES = 2 * 50 + 2 * 8  # two epochs of seven steps, and two steps


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("throughput")
    done = run("-m", "tests.distributed.throughput_run", str(folder))
    assert done.returncode == 0, done.stdout
    return folder


def facts(folder):
    return json.loads((folder / "facts.json").read_text())


def weights(folder):
    return read_checkpoint(folder / "checkpoints" / "last.ckpt")["state_dict"]


def test_a_slow_rank_is_named_once(runs):
    lines = throughput_lines(runs / "slow")
    assert [line["step"] for line in lines] == [4, 8, 12, 16]
    for line in lines:
        fast, slow = line["ranks"]["seconds"]
        assert slow > NAP_S
        assert slow > fast + 0.6 * NAP_S
        assert line["slowest_rank"] == 1
    (said,) = facts(runs / "slow")["said"]
    assert "rank 1 is slow" in said


def test_the_wait_of_the_others_is_communication(runs):
    assert seconds_in(runs / "slow", "communication") > 0.6 * STEPS * NAP_S


def test_samples_and_arithmetic_are_those_of_both_ranks(runs):
    lines = throughput_lines(runs / "slow")
    samples = sum(line["samples_per_s"] * line["seconds"] for line in lines)
    assert samples == pytest.approx(SAMPLES, abs=0.1)
    assert all(line["matmul_share"] is not None for line in lines)


def test_bits_stay_and_only_intervals_are_told(runs):
    # Beside the ledger's vector in every step: once in each of the four intervals.
    assert facts(runs / "slow")["calls"] == facts(runs / "without")["calls"] + 4
    expected = weights(runs / "without")
    for name, value in weights(runs / "slow").items():
        assert torch.equal(value, expected[name])


def test_under_fsdp_the_wait_is_not_told_apart(runs):
    lines = throughput_lines(runs / "fsdp")
    for line in lines:
        assert line["split"]["communication"] is None
        assert (line["ranks"]["seconds"], line["slowest_rank"]) == (None, None)
        known = [s for s in line["split"].values() if s is not None]
        assert line["seconds"] == pytest.approx(sum(known), abs=1e-9)
    samples = sum(line["samples_per_s"] * line["seconds"] for line in lines)
    assert samples == pytest.approx(SAMPLES, abs=0.1)
