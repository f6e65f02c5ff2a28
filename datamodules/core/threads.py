"""A fixed number of threads, where every bit of a result matters."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def threads_pinned(num_threads: int = 1) -> Iterator[None]:
    """Let torch compute with so many threads, whatever the machine or the launcher gave.

    A matrix product is cut by threads, and its kernels add up in another order at the cuts: with
    another number of threads its last bits differ.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
