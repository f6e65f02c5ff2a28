"""The numbers of a step on their way to the host."""

import pytest
import torch

from lit_models.training.ledger import HostCopy


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
