"""Ledger's parts: the record of a step, and its numbers on their way to the host."""

import numpy as np
import pytest
import torch

from datamodules.core.plan import digest_ids
from lit_models.training.ledger import HostCopy, StepRecord, read_vector
from lit_models.training.metrics import LossSum, hash_ids


def test_a_step_that_never_called_exact_mean_is_refused():
    with pytest.raises(RuntimeError, match="must go through it"):
        StepRecord().vector(False, False)


def test_ids_hash_alike_in_torch_and_numpy():
    ids = np.random.default_rng(0).integers(0, 2**40, 1000)
    total = int(hash_ids(torch.from_numpy(ids)).sum()) & ((1 << 63) - 1)
    assert total == digest_ids(ids)


def test_the_record_adds_over_micro_batches_and_ranks():
    ids = torch.arange(12)
    weight = torch.ones(12)
    weight[[3, 7]] = 0
    vectors = []
    for rank in range(2):
        record = StepRecord()
        for part in range(2):
            rows = slice(rank * 6 + part * 3, rank * 6 + part * 3 + 3)
            terms = {"a": LossSum(weight[rows].sum() * 2, weight[rows].sum())}
            record.add(ids[rows], weight[rows], terms, torch.tensor(0.25))
        vectors.append(record.vector(stop=rank == 1, save=False))
    summary = read_vector(sum(vectors).tolist(), ("a",))
    used = np.delete(np.arange(12), [3, 7])
    assert summary == {
        **{"digest": f"{digest_ids(used):016x}", "samples": 10, "loss": 1.0, "is_finite": True},
        **{"stop": True, "save": False, "terms": {"a": 2.0}, "targets": {"a": 10.0}},
    }


@pytest.mark.parametrize(
    ("loss", "norm", "is_finite"),
    [(0.5, 2.0, True), (0.5, None, True), (float("nan"), 2.0, False), (0.5, float("inf"), False)],
)
def test_a_loss_or_a_gradient_that_is_not_finite_is_a_flag(loss, norm, is_finite):
    record = StepRecord()
    ids, weight = torch.arange(3), torch.ones(3)
    record.add(ids, weight, {"a": LossSum(weight.sum(), weight.sum())}, torch.tensor(loss))
    record.grad_norm = None if norm is None else torch.tensor(norm)
    summary = read_vector(record.vector(stop=False, save=True).tolist(), ("a",))
    assert [summary[n] for n in ("is_finite", "stop", "save")] == [is_finite, False, True]
    assert record.grad_norm is None  # of the next step


def test_samples_of_a_loss_that_is_not_finite_are_named_without_fillers():
    record = StepRecord()
    for first, loss in ((0, 1.0), (3, float("inf"))):
        ids, weight = torch.arange(first, first + 3), torch.tensor([1.0, 0.0, 1.0])
        record.add(ids, weight, {"a": LossSum(weight.sum(), weight.sum())}, torch.tensor(loss))
    record.vector(False, False, step=1)
    assert record.suspects(1) == ([3, 5], [0, 2, 3, 5])


class Work:
    """A collective that doubles a vector when it is waited for."""

    def __init__(self, vector: torch.Tensor) -> None:
        self.vector = vector

    def wait(self) -> None:
        self.vector *= 2


def test_a_cpu_reads_what_the_collective_left() -> None:
    vector = torch.tensor([1.0, 2.5], dtype=torch.float64)
    copy = HostCopy(vector, Work(vector))  # type: ignore[arg-type]
    assert vector.tolist() == [1.0, 2.5]  # not waited for yet
    assert copy.read() == [2.0, 5.0]
    assert HostCopy(torch.tensor(0.5)).read() == 0.5  # without a collective


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_not_waited_for() -> None:
    vector = torch.ones(3, dtype=torch.float64, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    copy = HostCopy(vector * 2)
    assert not torch.cuda.current_stream().query()  # still asleep, and the host is here
    assert copy.read() == [2.0, 2.0, 2.0]
