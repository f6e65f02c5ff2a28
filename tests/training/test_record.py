"""The sums of a step: the same bits on a CPU as on a device; what a CPU run leaves out."""

import math

import pytest
import torch

from lit_models.training.record import DeviceSums, HostSums, LossSum, StepRecord
from tests.toy import ToyData


def vector_of(sums, losses, norm):
    generator = torch.Generator().manual_seed(0)
    for loss in losses:
        ids = torch.randint(2**40, (5,), generator=generator)
        used = torch.rand(5, generator=generator) > 0.3
        count = torch.tensor(7.0, dtype=torch.float64)
        sums.add(ids, used, [torch.tensor(loss), torch.tensor(loss) * 7, count])
    return sums.vector([0.0, 1.0], norm)


@pytest.mark.parametrize("losses", [[0.1, 1e8, -0.3], [-0.0], [0.1, float("nan")]])
@pytest.mark.parametrize("norm", [None, torch.tensor(0.3), torch.tensor(float("inf"))])
def test_sums_on_the_host_have_the_bits_of_those_on_a_device(losses, norm):
    host, device = (vector_of(sums(), losses, norm) for sums in (HostSums, DeviceSums))
    assert host.dtype == device.dtype == torch.float64
    assert host.view(torch.int64).tolist() == device.view(torch.int64).tolist()
    is_finite = all(map(math.isfinite, [*losses, 0.0 if norm is None else norm]))
    assert host[0] == (not is_finite)


def test_samples_of_a_loss_that_is_not_finite_are_named_without_fillers():
    record = StepRecord()
    for first, loss in ((0, 1.0), (3, float("inf"))):
        ids, weight = torch.arange(first, first + 3), torch.tensor([1.0, 0.0, 1.0])
        record.add(ids, weight, {"a": LossSum(weight.sum(), weight.sum())}, torch.tensor(loss))
    record.vector(False, False, step=1)
    assert record.suspects(1) == ([3, 5], [0, 2, 3, 5])


def test_a_batch_stays_where_it_is_on_a_cpu_and_moves_to_a_device():
    data = ToyData()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert data.transfer_batch_to_device(batch, torch.device("cpu"), 0) is batch
    moved = data.transfer_batch_to_device(batch, torch.device("meta"), 0)
    assert moved["weight"].device.type == "meta"
    assert moved["step_index"] == 0
